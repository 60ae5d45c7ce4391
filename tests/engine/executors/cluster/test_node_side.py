"""The job of a cluster, run here as a cluster runs it."""

import os
from pathlib import Path
from typing import Any

import pytest
from run_configs import train_config

from engine.core.files import UNFINISHED, read_json, write_json
from engine.executors.cluster.node_side import EXIT_CLAIMED, NodeSide, describe
from engine.executors.cluster.place import Place
from engine.machine.processes import limits

pytestmark = pytest.mark.timeout(30)  # a supervisor and a trainer start


@pytest.fixture
def place(tmp_path: Path, bench: Any, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A launch of the fake trainer, as it is submitted."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("HONESMITH_HOME", "")  # restored, whatever the job sets it to
    made = Place(tmp_path / "root", "0a1b2c3d4e5f", "far-1", 1)
    made.run.path.mkdir(parents=True)
    made.envs.mkdir(parents=True)
    os.symlink(made.envs, made.path / "envs")
    config = train_config("far-1") | {"fake_trainer": {"steps": 2, "save_every": 1}}
    write_json(made.run.config, config)
    limits.renew_lease(made.run, 60.0)
    columns = {"kind": "train", "algorithm": "grpo", "env_id": "sums@0123456789ab"}
    row = {"name": "far", **columns, "model": "pebble"}
    order = {"row": row, "lease_s": 60.0, "config_toml": "", "envs": []}
    write_json(made.order, order)
    return made


def test_a_lease_that_is_just_being_renewed_is_no_file_that_has_to_come(place: Place):
    (place.run.path / f".lease.json.0123456789ab{UNFINISHED}").touch()
    assert NodeSide(place, "7", "Slurm").run() == 0
    sizes = read_json(place.ended)["sizes"]
    assert "result.json" in sizes and not [name for name in sizes if name.endswith(UNFINISHED)]


def test_a_job_runs_the_run_to_its_end_and_says_so_last(place: Place, monkeypatch):
    write_json(place.secrets, {"KEY_OF_A_JUDGE": "x"})
    monkeypatch.delenv("KEY_OF_A_JUDGE", raising=False)
    assert NodeSide(place, "7", "Slurm").run() == 0
    assert os.environ.pop("KEY_OF_A_JUDGE") == "x"
    assert not place.secrets.exists()
    words = read_json(place.ended)
    assert (words["end"]["state"], words["end"]["verdict"]) == ("done", "better")
    assert words["taken"] is False and words["spent_s"] > 0
    assert words["sizes"]["result.json"] == place.run.result.stat().st_size
    assert read_json(place.beat)["job"] == read_json(place.claim)["job"] == "7"
    assert place.run.checkpoint_steps() == [1, 2]


def test_a_second_job_of_a_launch_leaves_it_to_the_first(place: Place):
    write_json(place.claim, {"job": "6"})
    assert NodeSide(place, "7", "Slurm").run() == EXIT_CLAIMED
    assert not place.beat.exists() and not place.run.lock.exists()


def test_a_job_that_waited_longer_than_its_lease_does_not_begin(place: Place):
    stale = read_json(place.run.far("lease"))
    write_json(place.run.far("lease"), stale | {"time": stale["time"] - 3600})
    assert NodeSide(place, "7", "Slurm").run() == 0
    assert read_json(place.ended)["end"]["reason_kind"] == "lease"
    assert not place.run.lock.exists()


def test_a_node_says_what_it_has_and_whether_it_keeps_a_database(tmp_path: Path):
    file = tmp_path / "homes" / "check" / "0a1b.json"
    file.parent.mkdir(parents=True)
    assert describe(tmp_path, file) == 0
    described = read_json(file)
    assert described["database"] == "" and described["hardware"]["cores"] >= 1
