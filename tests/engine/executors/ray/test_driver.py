"""What Ray starts: it ends when its child does, and what it started ends in order when it dies."""

import os
import subprocess
import sys
from pathlib import Path

import engine
from engine.core.files import read_object, write_json
from engine.executors.cluster.place import Place

SOURCE = str(Path(str(engine.__file__)).parent.parent)


def drive(*arguments: str) -> subprocess.Popen[bytes]:
    variables = {**os.environ, "PYTHONPATH": SOURCE, "RAY_AUTH_TOKEN": "secret"}
    command = [sys.executable, "-P", "-m", "engine.executors.ray.driver", *arguments]
    return subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL)


def test_a_launch_that_another_job_has_is_left_to_it(tmp_path):
    place = Place(tmp_path, "home", "run-1", 1)
    place.run.path.mkdir(parents=True)
    write_json(place.order, {"lease_s": 60.0, "row": {}, "config_toml": "", "envs": []})
    write_json(place.claim, {"job": "another"})
    assert drive(str(tmp_path), "home", "run-1", "1").wait(20) == 75
    assert read_object(place.claim) == {"job": "another"}


def test_a_node_says_what_it_has(tmp_path):
    file = tmp_path / "homes/check/x.json"
    file.parent.mkdir(parents=True)
    assert drive("--describe", str(tmp_path), str(file)).wait(30) == 0
    described = read_object(file)
    assert described["database"] == "" and described["hardware"]["cores"] >= 1
