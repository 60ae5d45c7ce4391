"""A launch in its shared folder: made ready, looked at, taken back, removed."""

import fcntl
import os
from pathlib import Path

import pytest

from engine.core.files import read_object, write_json
from engine.executors.cluster.node_side import NodeSide
from engine.executors.cluster.place import Place
from engine.executors.ray import folder_side

ORDER = {"lease_s": 60.0, "row": {}, "config_toml": "", "envs": []}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A launch whose files were put."""
    made = Place(tmp_path, "home", "run-1", 1)
    made.run.path.mkdir(parents=True)
    return made


def start(place: Place) -> bool:
    root = str(place.root)
    answer = folder_side.start(root, "home", "run-1", place.launch, ORDER, {"KEY": "secret"})
    return answer["needs_job"]


def look(place: Place) -> dict:
    return folder_side.look(str(place.root), "home", "run-1", place.launch, 60.0)


def test_secrets_lie_there_for_this_user_alone_and_only_until_the_job_has_begun(place):
    assert start(place) is True
    assert read_object(place.secrets) == {"KEY": "secret"}
    assert place.secrets.stat().st_mode & 0o077 == 0
    write_json(place.claim, {"job": "j"})
    place.secrets.unlink()  # as the job does
    assert start(place) is False
    assert not place.secrets.exists()


def test_a_launch_that_was_never_put_is_gone(place):
    assert look(place) == {"launch": 0}


def test_one_that_is_taken_back_before_it_began_never_begins(place):
    start(place)
    answer = folder_side.stop(str(place.root), "home", "run-1", 1, "no longer wanted")
    assert answer == {"taken_back": True}
    seen = look(place)
    assert seen["claim"] == folder_side.TAKEN_BACK and seen["asked_s"] is not None
    assert not place.secrets.exists()
    assert NodeSide(place, "a-job", "Ray").run() == 75


def test_one_that_has_begun_is_not_taken_back(place):
    start(place)
    write_json(place.claim, {"job": "j"})
    assert folder_side.stop(str(place.root), "home", "run-1", 1, "x") == {"taken_back": False}
    assert read_object(place.claim) == {"job": "j"}


def test_last_words_count_once_every_file_has_come(place):
    start(place)
    (place.run.path / "metrics.jsonl").write_text("{}\n")
    words = {"end": {"state": "done"}, "sizes": {"metrics.jsonl": 6}, "taken": False}
    write_json(place.ended, words)
    assert (look(place)["has_words"], look(place)["end"]) == (True, None)
    (place.run.path / "metrics.jsonl").write_text("{}\n{}\n")
    assert look(place)["end"] == {"state": "done"}


def test_what_makes_way_is_told_to_end_by_its_stop_and_its_lease(place):
    start(place)
    write_json(place.claim, {"job": "j"})
    with place.run.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (owned,) = folder_side.list_owned(str(place.root), "home")["owned"]
        assert (owned["is_held"], owned["has_ended"]) == (True, False)
        folder_side.make_way(str(place.root), "home", "run-1", 1)
    assert place.stop.exists() and read_object(place.run.far("lease"))["seconds"] == 0


def test_an_older_launch_is_not_started_beside_a_newer_one(place):
    newer = Place(place.root, "home", "run-1", 2)
    newer.run.path.mkdir(parents=True)
    assert start(place) is False and not place.order.exists()
    assert start(newer) is True
    folder_side.reap(str(place.root), "home", "run-1", 1)
    assert start(place) is False and not os.path.exists(place.path)
    assert newer.path.exists()
