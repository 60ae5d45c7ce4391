"""Pushed versions are found by id, name and prefix, and read as they were stored."""

import json
import sys
from pathlib import Path

import pytest

from engine.core.errors import UserError
from engine.environments import registry
from engine.environments.registry import AUDIT, FACTS, TASKS, find_env, list_envs, read_tasks
from engine.home.run_dir import Home
from engine.home.store import Store
from envs.config.settings import Limits


def stored(home: Home, name: str, hash12: str, **facts) -> Path:
    """A version as a push leaves it, without running anything."""
    folder = home.env(name, hash12)
    folder.mkdir(parents=True)
    known = {
        "kind": "single",
        "scored": True,
        "tools": [],
        "rows": {"train": 2, "heldout": 1},
        "limits": {"call_seconds": 3.0},
        "secrets": [],
        "python": "",
    }
    (folder / FACTS).write_text(json.dumps(known | facts))
    (folder / AUDIT).write_text(json.dumps({"verdict": "ok", "headline": "ok"}))
    rows = [{"id": str(n), "split": split} for n, split in enumerate(["train", "heldout", "train"])]
    (folder / TASKS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    with Store(home) as store:
        store.add_env(name, hash12, kind="single", info={"rows": known["rows"], "audit": "ok"})
    return folder


@pytest.fixture
def three(home: Home) -> Home:
    stored(home, "sums", "aaaa11112222")
    stored(home, "sums", "aaaa33334444")
    stored(home, "summaries", "bbbb11112222")
    return home


@pytest.mark.parametrize(
    ("ref", "found"),
    [
        ("sums@aaaa11112222", "sums@aaaa11112222"),
        ("sums", "sums@aaaa33334444"),
        ("sums@aaaa1", "sums@aaaa11112222"),
        ("summ", "summaries@bbbb11112222"),
        ("sums@aaaa33334444", "sums@aaaa33334444"),
    ],
)
def test_a_version_is_found_by_id_name_and_prefix(three: Home, ref: str, found: str):
    assert find_env(three, ref).env_id == found


@pytest.mark.parametrize("ref", ["word_game", "word-game", "Word_Game", "word_game@cccc1"])
def test_a_version_is_found_by_the_name_its_folder_had(three: Home, ref: str):
    stored(three, "word-game", "cccc11112222")
    assert find_env(three, ref).env_id == "word-game@cccc11112222"


@pytest.mark.parametrize("ref", ["sum", "sums@aaaa", "s"])
def test_what_may_mean_several_is_refused(three: Home, ref: str):
    with pytest.raises(UserError) as caught:
        find_env(three, ref)
    assert caught.value.code == "ENV_AMBIGUOUS"


@pytest.mark.parametrize("ref", ["", "smus", "sums@cccc", "x" * 500])
def test_what_means_none_is_refused_with_what_there_is(three: Home, ref: str):
    with pytest.raises(UserError) as caught:
        find_env(three, ref)
    assert caught.value.code == "ENV_NOT_FOUND"
    assert "Known: summaries, sums" in caught.value.hint
    assert len(caught.value.message) < 200


def test_a_misspelt_name_gets_a_suggestion(three: Home):
    with pytest.raises(UserError) as caught:
        find_env(three, "smus")
    assert "Did you mean sums?" in caught.value.hint


def test_an_empty_home_says_how_to_fill_it(home: Home):
    with pytest.raises(UserError) as caught:
        find_env(home, "sums")
    assert "push_env" in caught.value.hint


def test_a_record_holds_what_the_version_says(home: Home):
    folder = stored(home, "sums", "aaaa11112222", secrets=["KEY"], tools=[{"a": 1}])
    record = find_env(home, "sums")
    assert (record.name, record.hash, record.dir) == ("sums", "aaaa11112222", folder)
    assert record.limits == Limits(call_seconds=3.0) and record.secrets == ("KEY",)
    assert record.tools == [{"a": 1}] and record.audit.verdict == "ok"
    assert record.source == folder / "source"


def test_rows_are_read_whole_or_by_side(three: Home):
    record = find_env(three, "sums")
    assert [row["id"] for row in read_tasks(record)] == ["0", "1", "2"]
    assert [row["id"] for row in read_tasks(record, "train")] == ["0", "2"]
    assert [row["id"] for row in read_tasks(record, "heldout")] == ["1"]


def test_the_list_begins_with_the_last_pushed(three: Home):
    found = list_envs(three)
    assert [entry.env_id for entry in found] == [
        "summaries@bbbb11112222",
        "sums@aaaa33334444",
        "sums@aaaa11112222",
    ]
    assert found[0].rows == {"train": 2, "heldout": 1} and found[0].audit == "ok"
    assert [entry.env_id for entry in list_envs(three, limit=1, offset=1)] == ["sums@aaaa33334444"]


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_version_whose_files_are_damaged_is_not_found(three: Home, damage: str):
    path = three.env("sums", "aaaa33334444") / FACTS
    path.unlink() if damage == "gone" else path.write_text('{"kind": ')
    with pytest.raises(UserError, match="gone or damaged") as caught:
        find_env(three, "sums")
    assert caught.value.code == "ENV_NOT_FOUND"


def test_the_interpreter_is_this_one_unless_packages_say_another(home: Home, tmp_path: Path):
    stored(home, "plain", "aaaa11112222")
    assert registry.env_python(find_env(home, "plain")) == sys.executable
    stored(home, "own", "aaaa11112222", python=str(tmp_path / "python"))
    with pytest.raises(UserError) as caught:
        registry.env_python(find_env(home, "own"))
    assert caught.value.code == "ENV_DEPS" and "install=true" in caught.value.hint
    (tmp_path / "python").touch(mode=0o755)
    assert registry.env_python(find_env(home, "own")) == str(tmp_path / "python")


def test_secrets_come_from_the_variables_of_this_process_alone(monkeypatch):
    monkeypatch.setenv("A_KEY", "1")
    monkeypatch.delenv("B_KEY", raising=False)
    assert registry.secrets_of(("A_KEY",)) == {"A_KEY": "1"}
    with pytest.raises(UserError, match="B_KEY") as caught:
        registry.secrets_of(("A_KEY", "B_KEY"))
    assert caught.value.code == "ENV_SECRETS" and "1" not in caught.value.message
