"""The answers of a run as a table for other programs: CSV or parquet, one row per answer."""

import contextlib
import csv
import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine.core.errors import UserError
from engine.core.hints import Hint
from engine.core.reply import ReplyBase
from engine.core.split import prompt_key
from engine.evidence.stats.results import answer_text, load_rows, text_of
from engine.home.owner_marks import refuse_if_of_sealed
from engine.home.run_dir import Home, RunDir
from engine.home.sanitize import Redactor, redactor_for
from engine.records.lines.evaluation_row import EvaluationRow, read_evaluation
from engine.records.run_config import AskingConfig, RunConfig
from envs.json_types import TaskRow

Format = Literal["csv", "parquet"]
Cell = str | float | int | bool | None
_HASH_CHARS = 16  # hexadecimal digits of the SHA-256 of a prompt
# The columns that every table has, in this order, with their types. `metrics.NAME` (numbers) and
# `metadata.KEY` (text) follow.
COLUMNS: Mapping[str, type] = {
    "run": str,
    "env_id": str,
    "model": str,
    "step": int,
    "split": str,
    "half": str,
    "task": str,
    "group": str,
    "attempt": int,
    "prompt_hash": str,
    "prompt": str,
    "answer": str,
    "reference": str,
    "reward": float,
    "success": bool,
    "loss": float,
    "error": str,
    "stop_reason": str,
    "tokens": int,
}


@dataclass(frozen=True)
class WrittenTable(ReplyBase):
    """A table that was written to the file `path`, with the number of its rows and its columns."""

    run_id: str
    path: str
    rows: int
    columns: list[str]
    summary: str


def write_results(home: Home, run_id: str, path: Path, form: Format) -> WrittenTable:
    """Write every held-out answer of a training run, or every answer of an evaluation, into a file.

    A row is one answer of one model to one task; a training run has answers at each evaluated step.
    Secrets of the environment are hidden. An existing file is replaced.

    Raises UserError: ENV_SEALED if the environment's tasks must not be shown; NO_EVALUATION if the
    run has no answers; BAD_ARGUMENT if the file cannot be written, or if parquet is wanted and
    pyarrow is not installed.
    """
    run = home.run(run_id)
    refuse_if_of_sealed(run.find_config(), "its answers cannot be read")
    rows = list(_table_rows(run))
    if not rows:
        raise UserError(
            "NO_EVALUATION",
            f"{run_id} has no stored answers",
            hint="Wait for its first evaluation, or evaluate its model.",
            field="run_id",
        )
    columns = _column_types(rows)
    content = _as_csv(rows, columns) if form == "csv" else _as_parquet(rows, columns)
    _replace_file(path, content)
    return WrittenTable(
        run_id,
        path=str(path),
        rows=len(rows),
        columns=list(columns),
        summary=f"{len(rows)} answers of {run_id} are in {path}.",
    )


def _table_rows(run: RunDir) -> Iterator[dict[str, Cell]]:
    """The rows of the table: by model (of an evaluation) or by step (of a training run), and within
    those in the order of the answers."""
    config = run.find_config()
    redact = redactor_for(run.home, config.env_dir if config else None)
    tasks = _tasks_by_id(run, config)
    for model, step, answers in _answers_by_model_and_step(run, config):
        for answer in answers:
            task = tasks.get(answer.task, {})
            same_for_all_answers: dict[str, Cell] = {
                "run": run.id,
                "env_id": config.env_id if config else None,
                "model": model,
                "step": step,
            }
            yield same_for_all_answers | _table_row(answer, task, redact)


def _answers_by_model_and_step(
    run: RunDir, config: RunConfig | None
) -> Iterator[tuple[str, int | None, Sequence[EvaluationRow]]]:
    """(model, step, answers) for each model of an evaluation (its step is None), or for each
    evaluated step of a training run."""
    if isinstance(config, AskingConfig):
        for index, ref in enumerate(config.model_refs):
            yield ref, None, read_evaluation(run.model_evals(index))
        return
    for step in run.eval_steps():
        yield f"{run.id}@step{step}", step, read_evaluation(run.evals(step))


def _tasks_by_id(run: RunDir, config: RunConfig | None) -> Mapping[str, TaskRow]:
    """The tasks of the run's environment version, by id. Returns {} if the version is gone."""
    name, _, hash12 = (config.env_id if config else "").partition("@")
    if not hash12:
        return {}
    return {row["id"]: row for row in load_rows(run.home.env(name, hash12) / "tasks.jsonl")}


def _table_row(answer: EvaluationRow, task: TaskRow, redact: Redactor) -> dict[str, Cell]:
    """One answer as a row: column -> cell, without the columns run, env_id, model and step.

    `task` is the task that was answered; {} if the environment is gone.
    """
    prompt = answer.prompt or task.get("prompt") or []
    row: dict[str, Cell] = {  # the texts without secrets
        "split": task.get("split"),
        "half": answer.half,
        "task": answer.task,
        "group": answer.task_group or task.get("group"),
        "attempt": answer.attempt,
        "prompt_hash": _prompt_hash(prompt) if prompt else None,
        "prompt": redact.text(text_of(prompt)),
        "answer": redact.text(answer_text(answer)),
        "reference": redact.text(text_of(task.get("answer"))),
        "reward": answer.reward,
        "success": answer.success,
        "loss": answer.loss,
        "error": redact.text(answer.error) if answer.error else None,
        "stop_reason": answer.stop_reason,
        "tokens": answer.tokens,
    }
    for name, value in (answer.metrics or {}).items():
        row[f"metrics.{name}"] = float(value)
    for name, value in (task.get("metadata") or {}).items():
        row[f"metadata.{name}"] = redact.text(_as_text(value))
    return row


def _prompt_hash(prompt: Sequence[Mapping[str, Any]]) -> str:
    """A hash of a prompt's text: `_HASH_CHARS` hexadecimal digits. Equal prompts have the same hash
    in every run and environment."""
    return hashlib.sha256(prompt_key(prompt).encode()).hexdigest()[:_HASH_CHARS]


def _as_text(value: object) -> str:
    """A value of metadata as text: text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _column_types(rows: Iterable[Mapping[str, Cell]]) -> dict[str, type]:
    """The columns of the table with their types: `COLUMNS`, then the metrics, then the metadata;
    the latter two sorted by name."""
    all_names = {name for row in rows for name in row}
    optional_names = sorted(all_names - set(COLUMNS))
    metric_types = {name: float for name in optional_names if name.startswith("metrics.")}
    metadata_types = {name: str for name in optional_names if name not in metric_types}
    return {**COLUMNS, **metric_types, **metadata_types}


def _as_csv(rows: Iterable[Mapping[str, Cell]], columns: Mapping[str, type]) -> bytes:
    """The table as CSV in UTF-8: a header, "true" and "false", and an empty cell for a missing
    value."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_csv_cell(row.get(name)) for name in columns])
    return text.getvalue().encode("utf-8", "replace")  # a lone surrogate becomes "?"


def _csv_cell(value: Cell) -> Cell:
    """A value for a CSV cell: "true" or "false" for a bool, "" for None, else the value."""
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else value


def _as_parquet(rows: Sequence[Mapping[str, Cell]], columns: Mapping[str, type]) -> bytes:
    """The table as a parquet file; cells that a row lacks are null.

    `columns` maps each column to the type of its cells: str, float, int or bool. Raises UserError
    BAD_ARGUMENT if pyarrow is not installed.
    """
    try:
        import pyarrow  # noqa: PLC0415 # pyright: ignore[reportMissingImports] - optional
        import pyarrow.parquet  # noqa: PLC0415 # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(
            "BAD_ARGUMENT",
            "writing parquet needs pyarrow, which is not installed",
            hint=Hint("Install honesmith[data], or write --csv."),
            field="parquet",
        ) from error
    arrow_types = {
        str: pyarrow.string(),
        float: pyarrow.float64(),
        int: pyarrow.int64(),
        bool: pyarrow.bool_(),
    }
    schema = pyarrow.schema([(name, arrow_types[kind]) for name, kind in columns.items()])
    cells = {name: [_storable(row.get(name)) for row in rows] for name in columns}
    table = pyarrow.table(cells, schema=schema)
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(table, buffer)
    return buffer.getvalue()


def _storable(value: Cell) -> Cell:
    """A value that parquet can store: in a text, lone surrogates are replaced by "?", because UTF-8
    cannot hold them."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def _replace_file(path: Path, content: bytes) -> None:
    """Write the file, or replace it as a whole: readers see the old content or the new one.

    Raises UserError BAD_ARGUMENT if it cannot be written.
    """
    # With the id of this process in its name, so that two writers do not share a temporary file.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # the first error is the one to report
            temporary.unlink(missing_ok=True)
        raise UserError(
            "BAD_ARGUMENT", f"{path} cannot be written: {error.strerror}", field="path"
        ) from error
