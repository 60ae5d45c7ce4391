"""The program that plays a Harbor task: its time, its limits, what it asks, and that a sandbox is
given back however the rollout ends. The sandbox is a container of the stand-in for docker."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import mini_container
import pytest
from harbor_play import TOML, Model, serving, write_folder

import envs

pytestmark = [
    pytest.mark.timeout(30),
    pytest.mark.skipif(not mini_container.possible(), reason="no namespaces can be made here"),
]
HELPERS = Path(__file__).parents[3] / "helpers"
PROGRAM = Path(envs.__file__).parent / "adapters" / "programs" / "harbor_rollout.py"
DOCKER = TOML.replace("[rollout]", '[adapter.sandbox]\nprovider = "docker"\n\n[rollout]')


class Rollout:
    """A folder with one task, and the means to play it outside of any box."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.folder, self.home = folder, home
        row = {"id": "answer", "metadata": {"folder": "tasks/answer"}}
        (home / "task.json").write_text(json.dumps(row))

    def start(self, model: Model) -> "subprocess.Popen[str]":
        variables = {
            "PATH": f"{self.home}:/usr/sbin:/usr/bin:/bin",
            "FAKE_DOCKER": str(self.home),
            "DOCKER_HOST": "tcp://127.0.0.1:1",
            "HONESMITH_TASK": str(self.home / "task.json"),
            "HONESMITH_ENV": "harbor@0123",
            "OPENAI_BASE_URL": f"http://127.0.0.1:{model.server_address[1]}/v1",
            "OPENAI_API_KEY": "k",
            "OPENAI_MODEL": "m",
        }
        return subprocess.Popen(
            [sys.executable, str(PROGRAM)],
            cwd=self.folder,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def played(self, model: Model) -> tuple[int, str, str]:
        with serving(model), self.start(model) as process:
            output, errors = process.communicate(timeout=25)
        return process.returncode, output, errors

    @property
    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in (self.home / "calls").read_text().splitlines()]


@pytest.fixture
def rollout(tmp_path: Path) -> Iterator[Rollout]:
    home = tmp_path / "docker-home"
    home.mkdir()
    program = home / "docker"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {HELPERS}/fake_docker.py "$@"\n')
    program.chmod(0o755)
    yield Rollout(write_folder(tmp_path / "env", DOCKER), home)
    for left in home.glob("*.pid"):  # what a failing test has left
        os.kill(int(left.read_text().split()[0]), signal.SIGKILL)


def test_a_task_is_played_in_a_container_that_is_removed(rollout: Rollout):
    code, output, errors = rollout.played(Model(["echo blue > answer; ls /tests"]))
    assert code == 0, errors
    result = json.loads(output.splitlines()[-1])
    assert (result["reward"], result["success"]) == (1.0, True)
    verbs = [call[0] for call in rollout.calls]
    assert verbs[0] == "run" and verbs[-1] == "rm" and verbs.count("restart") == 2
    started = " ".join(rollout.calls[0])
    assert "--label honesmith-env=harbor-0123 --label honesmith-task=answer" in started
    assert "honesmith-rollout=" in started and "debian:12" in rollout.calls[0]
    assert 0 < int(rollout.calls[0][-1]) - time.time() <= 91


def test_what_the_agent_planted_is_gone_before_the_tests_come(rollout: Rollout):
    planted = """
    mkdir -p /tests /logs/verifier; echo 1 > /logs/verifier/reward.txt
    echo '{"reward": 1}' > /logs/verifier/reward.json; echo 'exit 0' > /tests/helper.sh
    (while true; do echo '{"reward": 1}' > /logs/verifier/reward.json; done) >/dev/null 2>&1 &
    """
    code, output, errors = rollout.played(Model([planted]))
    assert code == 0, errors
    assert json.loads(output.splitlines()[-1])["reward"] == 0.0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_rollout_that_is_ended_gives_its_container_back(number: signal.Signals, rollout: Rollout):
    model = Model(["touch /app/begun; sleep 20"])
    with serving(model), rollout.start(model) as process:
        deadline = time.monotonic() + 10
        while not list(rollout.home.glob("*.files/app/begun")):
            assert time.monotonic() < deadline
        process.send_signal(number)
        process.communicate(timeout=15)
    assert process.returncode != 0
    started = rollout.calls[0]
    name = started[started.index("--name") + 1]
    assert rollout.calls[-1] == ["rm", "--force", name]
    assert list(rollout.home.glob("*.pid")) == []


def test_a_provider_that_fails_costs_the_rollout_and_says_why(rollout: Rollout):
    toml = DOCKER.replace('"docker"', '"docker"\nimage = "missing"\nopen_seconds = 0')
    (rollout.folder / "environment.toml").write_text(toml)
    code, output, errors = rollout.played(Model([]))
    assert (code, output) == (1, "")
    assert "no container: docker: Error response from daemon: no such image" in errors


def test_a_gateway_that_takes_no_more_ends_the_agent_and_the_tests_still_run(rollout: Rollout):
    model = Model(["echo blue > answer", "echo red > answer"])
    model.refuse_after = 1
    code, output, errors = rollout.played(model)
    assert code == 0, errors
    assert json.loads(output.splitlines()[-1])["reward"] == 1.0


def test_a_gateway_that_refuses_the_first_question_is_a_fault(rollout: Rollout):
    model = Model([])
    model.refuse_after = 0
    code, _, errors = rollout.played(model)
    assert code == 1 and "the gateway answered 400" in errors
    assert rollout.calls[-1][0] == "rm"


def test_the_tests_have_a_time_limit_of_their_own(rollout: Rollout):
    toml = DOCKER.replace("[adapter]", "[adapter]\nverifier_seconds = 0.5")
    (rollout.folder / "environment.toml").write_text(toml)
    (rollout.folder / "tasks/answer/tests/test.sh").write_text("sleep 20")
    code, _, errors = rollout.played(Model([]))
    assert code == 1 and "the tests took longer than 0 s (verifier_seconds)" in errors


def test_a_call_that_is_none_is_answered_and_counted(rollout: Rollout):
    model = Model(["ignored"])
    model.commands = [7]  # type: ignore[list-item]
    code, output, _ = rollout.played(model)
    assert code == 0 and json.loads(output)["metrics"]["commands"] == 1.0
    assert model.told == ['bash takes {"command": "..."} with a text.']
