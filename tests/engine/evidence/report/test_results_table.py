"""Answers as a table that other programs read."""

import csv
import json
from pathlib import Path

import pyarrow.parquet
import pytest

from engine.core.errors import UserError
from engine.evidence.report.results_table import COLUMNS, write_results

ENV_ID = "arith@0123456789ab"
PROMPT = [{"role": "user", "content": 'Say "yes",\nplease.'}]


@pytest.fixture
def evaluation(home, make_run, rows):
    """An evaluation of two models on two tasks; the version has their metadata and groups."""
    folder = home.env("arith", "0123456789ab")
    folder.mkdir(parents=True, exist_ok=True)
    tasks = [
        {
            "id": "t0",
            "prompt": PROMPT,
            "answer": [{"role": "assistant", "content": "yes"}],
            "split": "heldout",
            "metadata": {"operation": "plus", "levels": [1, 2]},
            "group": "sums",
        },
        {"id": "t1", "prompt": PROMPT, "answer": None, "split": "heldout", "metadata": {}},
    ]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    run = make_run(
        "evaluate",
        kind="evaluate",
        env_id=ENV_ID,
        models=[{"ref": "pebble"}, {"ref": "tuned"}],
        attempts=1,
        settings={},
    )
    for index in range(2):
        answers = [rows.eval("t0", index == 1), rows.eval("t1", False)]
        answers[0] |= {"prompt": PROMPT, "metrics": {"form": 0.25}, "completion": "é = 1"}
        answers[1] |= {"error": "boom", "success": None, "reward": None}
        run.model_evals(index, answers)
    return run.finish()


def test_csv_has_a_row_per_task_and_model(home, evaluation, tmp_path: Path):
    path = tmp_path / "out" / "table.csv"
    written = write_results(home, evaluation.id, path, "csv")
    assert (written.rows, written.path) == (4, str(path))
    with path.open(newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert list(table[0]) == written.columns
    assert list(table[0]) == [
        *COLUMNS,
        "metrics.form",
        "metrics.format",
        "metadata.levels",
        "metadata.operation",
    ]
    assert [(row["model"], row["task"], row["success"]) for row in table] == [
        ("pebble", "t0", "false"),
        ("pebble", "t1", ""),
        ("tuned", "t0", "true"),
        ("tuned", "t1", ""),
    ]
    first, second = table[:2]
    assert first["prompt"] == PROMPT[0]["content"] and first["answer"] == "é = 1"
    assert (first["reference"], first["group"], first["split"]) == ("yes", "sums", "heldout")
    assert (first["metrics.form"], first["metadata.operation"]) == ("0.25", "plus")
    assert first["metadata.levels"] == "[1, 2]"
    assert (second["metrics.form"], second["metadata.operation"], second["error"]) == (
        "",
        "",
        "boom",
    )
    assert first["prompt_hash"] == table[2]["prompt_hash"] != ""


def test_parquet_has_the_same_rows_with_types(home, evaluation, tmp_path: Path):
    path = tmp_path / "table.parquet"
    write_results(home, evaluation.id, path, "parquet")
    table = pyarrow.parquet.read_table(path)
    assert table.schema.field("success").type == pyarrow.bool_()
    assert table.schema.field("metrics.form").type == pyarrow.float64()
    rows = table.to_pylist()
    assert [row["success"] for row in rows] == [False, None, True, None]
    assert [row["metrics.form"] for row in rows] == [0.25, None, 0.25, None]
    assert [row["step"] for row in rows] == [None] * 4


def test_a_training_run_has_the_answers_of_each_step(home, make_run, rows, tmp_path: Path):
    run = make_run("grpo")
    for step in (0, 20):
        run.evals(step, rows.halved(lambda i: i % 2 == 0, 4))
    run.finish()
    path = tmp_path / "table.csv"
    write_results(home, run.id, path, "csv")
    with path.open(newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert {(row["model"], row["step"]) for row in table} == {
        (f"{run.id}@step0", "0"),
        (f"{run.id}@step20", "20"),
    }
    assert {row["half"] for row in table} == {"select", "report"}


def test_a_run_without_answers_is_refused(home, make_run, tmp_path: Path):
    run = make_run("grpo").finish()
    with pytest.raises(UserError) as caught:
        write_results(home, run.id, tmp_path / "table.csv", "csv")
    assert caught.value.code == "NO_EVALUATION"


def test_a_file_that_cannot_be_written_is_named(home, evaluation, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written") as caught:
        write_results(home, evaluation.id, tmp_path / "file" / "table.csv", "csv")
    assert caught.value.code == "BAD_ARGUMENT"
