"""Rows of a push: their side, and what kind of dataset they make."""

import json
from pathlib import Path

import pytest

from engine.core.errors import UserError
from engine.environments.push import push_env
from engine.environments.registry import find_env, read_tasks
from engine.home.run_dir import Home
from envs.base import Task

pytestmark = pytest.mark.timeout(30)


def test_a_training_file_alone_gets_held_out_rows_like_any_other(home: Home, tmp_path: Path):
    folder = tmp_path / "rows"
    (folder / "datasets").mkdir(parents=True)
    lines = [json.dumps({"prompt": f"p{n}", "completion": f"c{n}"}) for n in range(60)]
    (folder / "datasets" / "train.jsonl").write_text("\n".join(lines))
    alone = push_env(home, folder)
    assert (alone.rows, alone.split) == ({"train": 30, "heldout": 30}, "hash")
    assert not any("verdict" in warning for warning in alone.warnings)
    (folder / "datasets" / "test.jsonl").write_text('{"prompt": "t", "completion": "c"}')
    beside = push_env(home, folder)
    assert (beside.rows, beside.split) == ({"train": 60, "heldout": 1}, "rows")


def test_preferences_are_a_kind_of_their_own_and_not_mixed_with_answers(home: Home, tmp_path: Path):
    folder = tmp_path / "pairs"
    folder.mkdir()
    lines = [json.dumps({"prompt": f"p{n}", "chosen": "a", "rejected": "b"}) for n in range(4)]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    pushed = push_env(home, folder)
    assert (pushed.kind, pushed.rows) == ("preference", {"train": 2, "heldout": 2})
    row = read_tasks(find_env(home, pushed.env_id))[0]
    assert row["gold"] is None and Task.from_row(row).preference is not None
    lines.append(json.dumps({"prompt": "p", "completion": "c"}))
    (folder / "rows.jsonl").write_text("\n".join(lines))
    with pytest.raises(UserError, match="4 of 5 rows are preferences") as caught:
        push_env(home, folder)
    assert caught.value.code == "DATASET_INVALID"


def data_folder(folder: Path, rows_of_file: dict[str, int], **fields: str) -> Path:
    """A folder with these data files and so many rows in each; row n of a file has the prompt
    "NAME n"."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in rows_of_file.items():
        rows = [{"prompt": f"{name} {n}", "completion": f"c{n}", **fields} for n in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def test_a_file_named_dev_is_a_split_of_its_own(home: Home, tmp_path: Path):
    folder = data_folder(tmp_path / "rows", {"train": 12, "dev": 5, "heldout": 7})
    pushed = push_env(home, folder)
    assert pushed.rows == {"train": 12, "dev": 5, "heldout": 7}
    assert "12 train, 5 dev and 7 held-out rows" in pushed.summary
    record = find_env(home, pushed.env_id)
    assert {row["prompt"][0]["content"] for row in read_tasks(record, "dev")} == {
        f"dev {n}" for n in range(5)
    }
    assert len(read_tasks(record, "heldout")) == 7


def test_one_training_file_is_divided_into_three_where_its_settings_say_so(
    home: Home, tmp_path: Path
):
    folder = data_folder(tmp_path / "rows", {"train": 200})
    (folder / "environment.toml").write_text("[split]\ndev = 0.1\n")
    pushed = push_env(home, folder)
    assert pushed.rows == {"train": 130, "dev": 20, "heldout": 50}


def test_rows_of_one_group_are_stored_on_one_side(home: Home, tmp_path: Path):
    rows = [
        {"prompt": f"{a} + {b}", "completion": str(a + b), "group": f"{min(a, b)} and {max(a, b)}"}
        for a in range(12)
        for b in range(12)
    ]
    folder = data_folder(tmp_path / "rows", {})
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    record = find_env(home, push_env(home, folder).env_id)
    side_of = {row["prompt"][0]["content"]: row["split"] for row in read_tasks(record)}
    assert set(side_of.values()) == {"train", "heldout"}
    assert all(side_of[f"{a} + {b}"] == side_of[f"{b} + {a}"] for a in range(12) for b in range(12))


def test_training_rows_that_repeat_a_dev_row_are_told(home: Home, tmp_path: Path):
    folder = data_folder(tmp_path / "rows", {"train": 20, "dev": 6, "heldout": 6})
    copies = [{"prompt": f"DEV  {n}!", "completion": f"c{n}"} for n in range(6)]
    with (folder / "train.jsonl").open("a") as file:
        file.write("\n" + "\n".join(map(json.dumps, copies)))
    record = find_env(home, push_env(home, folder).env_id)
    assert record.contamination["leaked"] == [f"dev-{n + 1}" for n in range(6)]


def leaky_folder(folder: Path, settings: str = "") -> Path:
    """40 training rows, three of which ask a held-out question in other letters and two word for
    word; 30 held-out rows."""
    folder.mkdir(parents=True, exist_ok=True)
    train = [{"prompt": f"Name colour {n} now", "completion": str(n)} for n in range(35)]
    train += [{"prompt": f"say NUMBER {n} again !", "completion": str(n)} for n in range(3)]
    train += [{"prompt": f"Say number {n} again", "completion": str(n)} for n in (7, 8)]
    exam = [{"prompt": f"Say number {n} again", "completion": str(n)} for n in range(30)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, train)))
    (folder / "heldout.jsonl").write_text("\n".join(map(json.dumps, exam)))
    if settings:
        (folder / "environment.toml").write_text(settings)
    return folder


def test_leaking_rows_are_listed_by_file_and_line(home: Home, tmp_path: Path):
    pushed = push_env(home, leaky_folder(tmp_path / "rows"))
    assert pushed.rows == {"train": 38, "heldout": 32}  # equal prompts share a side
    messages = [
        problem.message
        for problem in pushed.problems
        if not problem.message.startswith("no scorer")
    ]
    assert messages == [
        f"train.jsonl:{36 + n} asks heldout.jsonl:{1 + n} (normalised, prompt)" for n in range(3)
    ]
    assert any("drop_leaks" in warning for warning in pushed.warnings)


def test_drop_leaks_leaves_out_the_copies_and_asks_each_question_once(home: Home, tmp_path: Path):
    folder = leaky_folder(tmp_path / "rows", "[split]\ndrop_leaks = true\n")
    pushed = push_env(home, folder)
    assert pushed.rows == {"train": 35, "heldout": 30}
    assert not any("asks heldout" in problem.message for problem in pushed.problems)
    assert any(
        "3 training rows that teach" in warning and "2 copies" in warning
        for warning in pushed.warnings
    )
    record = find_env(home, pushed.env_id)
    assert record.contamination["verdict"] == "clean"
    # Of two rows with one prompt the one stays that says of itself that it is held out.
    assert {row["id"] for row in read_tasks(record, "heldout")} == {
        f"heldout-{n + 1}" for n in range(30)
    }
