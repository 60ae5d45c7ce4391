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
