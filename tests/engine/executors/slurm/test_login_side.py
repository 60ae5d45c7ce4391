"""Jobs looked after from a login node, whose Slurm answers what a test says."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.core.files import read_json, write_json
from engine.executors.cluster.place import Place, place_of_job, places
from engine.executors.slurm import commands, login_side
from engine.executors.slurm.commands import Job, SlurmDown

HOME_ID = "0a1b2c3d4e5f"
ORDER = {"row": {}, "lease_s": 60.0, "config_toml": "", "envs": []}


class FakeSlurm:
    """Answers of Slurm, and what was asked of it."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.submitted: list[Sequence[str]] = []
        self.cancelled: list[tuple[str, str]] = []
        self.is_down = False
        self.loses_answer = False

    def submit(self, script: str, options: Sequence[str]) -> str:
        self._check()
        self.submitted.append([script, *options])
        name = next(each for each in options if each.startswith("--job-name="))
        job = Job(str(len(self.submitted)), "PENDING", name=name.partition("=")[2])
        self.jobs.append(job)
        if self.loses_answer:
            raise SlurmDown("zero bytes were transmitted")
        return job.id

    def named(self, names: Sequence[str] = ()) -> list[Job]:
        self._check()
        return [job for job in self.jobs if not names or job.name in names]

    def ended(self, job_id: str) -> Job | None:
        return None

    def cancel(self, job_id: str, *, signal: str = "") -> None:
        self._check()
        self.cancelled.append((job_id, signal))

    def becomes(self, state: str, reason: str = "") -> None:
        """Let the last job have a state."""
        last = self.jobs.pop()
        self.jobs.append(Job(last.id, state, reason, name=last.name))

    def _check(self) -> None:
        if self.is_down:
            raise SlurmDown("Unable to contact slurm controller")


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm()
    for name in ("submit", "named", "ended", "cancel"):
        monkeypatch.setattr(commands, name, getattr(fake, name))
    monkeypatch.setattr(login_side, "_ASK_S", (0.0, 0.0))
    monkeypatch.setattr(login_side, "_SETTLE_S", 0.0)
    monkeypatch.setattr(login_side, "_MISSING_S", 0.0)
    monkeypatch.setattr(login_side, "_watches", {})
    return fake


@pytest.fixture
def place(tmp_path: Path, slurm: FakeSlurm) -> Place:
    """A launch that was submitted."""
    made = Place(tmp_path, HOME_ID, "far-1", 1)
    made.run.path.mkdir(parents=True)
    start(made)
    return made


def start(place: Place) -> Any:
    of = (str(place.root), place.home_id, place.run_id, place.launch)
    return login_side.start(*of, ORDER, ["--time=5"], ["python", "-m"], {"KEY": "secret"})


def look(place: Place) -> Any:
    return login_side.look(str(place.root), place.home_id, place.run_id, place.launch, 60.0)


def stop(place: Place) -> None:
    login_side.stop(str(place.root), place.home_id, place.run_id, place.launch, "enough")


def beat(place: Place, number: int) -> None:
    write_json(place.claim, {"job": "1"})
    write_json(place.beat, {"beat": number, "state": "running", "device": "cuda:0", "spent_s": 5.0})


def last_words(place: Place, **more: Any) -> None:
    beat(place, 9)
    end = {"state": "done", "reason_kind": "", "reason": "", "hint": "", "verdict": "better"}
    words = {"end": end, "sizes": {}, "taken": False, "spent_s": 7.0} | more
    write_json(place.ended, words)


def test_a_second_start_submits_nothing(place: Place, slurm: FakeSlurm):
    assert start(place) == {"job": "1"}
    assert len(slurm.submitted) == 1
    script, *options = slurm.submitted[0]
    assert script.startswith("#!/bin/sh\nexec python -m engine.executors.cluster.node_side ")
    assert "--job-name=hs-0a1b2c-far-1-1" in options and "--time=5" in options
    assert "secret" not in " ".join(slurm.submitted[0])
    assert read_json(place.secrets) == {"KEY": "secret"}
    assert place.secrets.stat().st_mode & 0o077 == 0


def test_a_job_whose_submission_was_cut_is_found_by_its_name(place: Place, slurm: FakeSlurm):
    write_json(place.submitted, {"job": ""})
    assert start(place) == {"job": "1"}
    assert len(slurm.submitted) == 1
    slurm.jobs = []  # sbatch was not reached
    write_json(place.submitted, {"job": ""})
    assert start(place) == {"job": "2"}


def test_a_controller_that_dies_between_request_and_answer_makes_no_second_job(tmp_path, slurm):
    place = Place(tmp_path, HOME_ID, "far-2", 1)
    place.run.path.mkdir(parents=True)
    slurm.loses_answer = True
    with pytest.raises(SlurmDown):
        start(place)
    slurm.loses_answer = False
    assert start(place) == {"job": "1"}
    assert len(slurm.submitted) == 1


def test_a_job_that_waits_says_why(place: Place, slurm: FakeSlurm):
    slurm.becomes("PENDING", "Resources")
    seen = look(place)
    assert (seen["life"], seen["why"], seen["spent_s"]) == ("pending", "Slurm: Resources", 0.0)


def test_a_job_that_gives_signs_of_life_runs_whatever_slurm_says(place: Place, slurm: FakeSlurm):
    slurm.is_down = True
    beat(place, 1)
    seen = look(place)
    assert (seen["life"], seen["state"], seen["device"]) == ("running", "running", "cuda:0")
    assert seen["spent_s"] == 5.0


def test_nothing_is_known_of_a_silent_job_while_the_controller_is_away(place, slurm):
    slurm.is_down = True
    seen = look(place)
    assert seen["life"] == "unknown" and "controller" in seen["why"]


def test_a_run_has_ended_when_its_files_have_come_as_they_were_left(place, slurm):
    (place.run.path / "result.json").write_text("{}")
    last_words(place, sizes={"result.json": 4})
    assert look(place)["life"] == "running"  # the shared file system shows an older file
    (place.run.path / "result.json").write_text("{  }")
    seen = look(place)
    assert (seen["life"], seen["end"]["verdict"], seen["spent_s"]) == ("exited", "better", 7.0)


@pytest.mark.parametrize(
    ("state", "is_lost"),
    [("COMPLETED", True), ("PREEMPTED", True), ("TIMEOUT", True), ("CANCELLED", False)],
)
def test_why_slurm_told_a_job_to_end_is_asked_of_slurm(place, slurm, state, is_lost):
    last_words(place, taken=True)
    slurm.becomes("COMPLETING")
    assert look(place)["life"] == "running"
    slurm.becomes(state)
    seen = look(place)
    assert seen["life"] == "exited" and seen["end"].get("is_lost", False) is is_lost


@pytest.mark.parametrize("state", ["NODE_FAIL", "FAILED", "COMPLETED", "TIMEOUT"])
def test_a_job_that_ended_without_a_word_is_lost(place, slurm, monkeypatch, state: str):
    monkeypatch.setattr(login_side, "_SILENT_S", 0.0)
    monkeypatch.setattr(login_side, "_SETTLE_S", 1000.0)
    beat(place, 1)
    slurm.becomes(state)
    assert look(place)["life"] == "running"  # its last words may still come
    monkeypatch.setattr(login_side, "_SETTLE_S", 0.0)
    seen = look(place)
    assert seen["life"] == "exited" and seen["end"]["is_lost"] is True


def test_a_controller_that_forgot_a_job_ends_it_only_if_the_job_is_silent(place, slurm):
    slurm.jobs = []
    beat(place, 1)
    assert look(place)["life"] == "running"
    login_side._watches.clear()
    place.beat.unlink()
    assert look(place)["end"]["is_lost"] is True


def test_a_job_that_waits_is_cancelled_and_one_that_runs_is_told(place, slurm):
    stop(place)
    assert slurm.cancelled == [("1", "")]
    slurm.becomes("CANCELLED")
    seen = look(place)
    assert (seen["life"], seen["end"]["state"]) == ("exited", "cancelled")
    slurm.becomes("RUNNING")
    stop(place)
    assert slurm.cancelled[1:] == [("1", "TERM")]
    assert read_json(place.stop)["reason"] == "enough"


def test_a_run_that_does_not_end_when_it_is_told_is_ended(place, slurm, monkeypatch):
    beat(place, 1)
    slurm.becomes("RUNNING")
    stop(place)
    look(place)
    assert ("1", "") not in slurm.cancelled
    monkeypatch.setattr(login_side, "_STOP_S", -1.0)
    look(place)
    assert ("1", "") in slurm.cancelled


def test_what_lives_is_not_removed_and_what_has_ended_is(place, slurm):
    of = (str(place.root), HOME_ID, "far-1")
    slurm.becomes("RUNNING")
    write_json(place.claim, {"job": "1"})
    assert login_side.reap(*of, 1) == {"removed": False}
    assert not place.stop.exists()
    assert login_side.clear(*of, 1) == {"removed": True}  # nothing is older
    assert login_side.clear(*of, 2) == {"removed": False}
    assert place.stop.exists()  # it is told to end
    slurm.becomes("COMPLETED")
    assert login_side.reap(*of, 0) == {"removed": True}
    assert place.path.exists()  # a later launch than was named
    assert login_side.reap(*of, 1) == login_side.reap(*of, 1) == {"removed": True}
    assert places(place.root, HOME_ID) == []


def test_an_older_launch_submits_and_renews_nothing(place, slurm):
    newer = Place(place.root, HOME_ID, "far-1", 2)
    newer.run.path.mkdir(parents=True)
    before = read_json(place.run.far("lease"))
    assert start(place) == {}
    assert len(slurm.submitted) == 1 and read_json(place.run.far("lease")) == before
    assert login_side.clear(str(place.root), HOME_ID, "far-1", 1) == {"there": 2}
    assert start(Place(place.root, HOME_ID, "gone-1", 1)) == {}  # it was removed


def test_jobs_of_this_home_are_listed_with_and_without_a_folder(place, slurm):
    slurm.jobs += [
        Job("8", "RUNNING", name="hs-0a1b2c-lost-3-2"),
        Job("9", "RUNNING", name="hs-ffffff-theirs-1-1"),
        Job("10", "RUNNING", name="mine"),
        Job("11", "FAILED", name="hs-0a1b2c-old-1-1"),
    ]
    owned = login_side.list_owned(str(place.root), HOME_ID)["owned"]
    assert owned == [
        {"run_id": "far-1", "launch": 1, "life": "pending"},
        {"run_id": "lost-3", "launch": 2, "life": "running"},
    ]


def test_a_job_is_known_by_its_name(tmp_path: Path):
    place = Place(tmp_path, HOME_ID, "a-b-12", 3)
    assert place_of_job(tmp_path, HOME_ID, place.job_name) == place
    for name in ("hs-0a1b2c-", "hs-0a1b2c-check", "x", "hs-0a1b2c-a-1-x"):
        assert place_of_job(tmp_path, HOME_ID, name) is None


def test_nothing_is_known_of_a_launch_that_was_never_put_there(tmp_path: Path, slurm):
    assert look(Place(tmp_path, HOME_ID, "far-1", 1)) == {"life": "gone", "launch": 0}
