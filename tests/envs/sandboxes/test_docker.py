"""Containers through the command line of docker, with a stand-in for it on PATH."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import mini_container
import pytest

from envs.sandboxes import docker, opening
from envs.sandboxes.contract import Order, Ran, SandboxFault

pytestmark = pytest.mark.timeout(30)
HELPERS = Path(__file__).parents[2] / "helpers"


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A `docker` on PATH; each call of it is a line of JSON in the file that is returned."""
    if not mini_container.possible():
        pytest.skip("no namespaces can be made here")
    log, program = tmp_path / "calls", tmp_path / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {HELPERS}/fake_docker.py "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/sbin:/usr/bin:/bin")
    monkeypatch.setenv("FAKE_DOCKER", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    yield log
    for left in tmp_path.glob("*.pid"):  # what a failing test has left
        docker._Client("docker").call(["rm", "--force", left.stem], 10)


def name_of(started: list[str]) -> str:
    """The name in a call of `docker run`."""
    return started[started.index("--name") + 1]


def only_name(log: Path) -> str:
    """The name of the one container that runs."""
    (file,) = log.parent.glob("*.pid")
    return file.stem


def called(log: Path) -> list[list[str]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


ORDER = Order(
    image="debian:12", workdir="/app", cpus=2, memory_mb=512, lifetime_s=90.5, labels={"task": "t"}
)


def test_a_container_has_labels_limits_a_lifetime_and_no_network(calls: Path):
    with opening.opened({"provider": "docker"}, ORDER) as lease:
        ran = lease.sandbox.exec("cat > /dev/null; echo $X; pwd; exit 4", 5, {"X": "1"}, False)
        assert (ran.status, ran.stdout) == (4, "1\n/app\n")
    started = called(calls)[0]
    assert started[-5:-3] == ["debian:12", "-c"] and "--rm" in started
    text = " ".join(started)
    assert "--pids-limit 512" in text
    assert "--network none" in text and "--cpus 2" in text and "--memory 512m" in text
    assert "--label honesmith=1 --label task=t" in text
    assert called(calls)[-1] == ["rm", "--force", name_of(started)]
    assert list(calls.parent.glob("*.pid")) == []


def test_a_task_that_says_so_has_the_network(calls: Path):
    with opening.opened({"provider": "docker"}, Order(image="x", network=True)):
        pass
    assert "--network bridge" in " ".join(called(calls)[0])
    assert "--memory 4096m" in " ".join(called(calls)[0])  # where the task names none


def test_a_container_ends_at_one_second_however_often_it_starts(calls: Path):
    with opening.opened({"provider": "docker"}, ORDER) as lease:
        lease.sandbox.end_processes()
    started = called(calls)[0]
    assert abs(int(started[-1]) - time.time() - 90.5) < 20
    first = [started[started.index("--entrypoint") + 1], *started[-4:-1]]
    assert (
        subprocess.run([*first, str(int(time.time()) - 1)], timeout=4, check=False).returncode == 0
    )
    again = subprocess.run([*first, str(int(time.time()) + 1)], timeout=4, check=False)
    assert again.returncode == 0


@pytest.mark.parametrize("status", [1, 125, 126, 127, 137, 255])
def test_no_status_and_no_words_of_the_agent_are_taken_for_a_fault_of_docker(
    status: int, calls: Path
):
    command = f"echo Error response from daemon: gone >&2; printf out; exit {status}"
    with opening.opened({"provider": "docker"}, ORDER) as lease:
        ran = lease.sandbox.exec(command, 5, {}, False)
        assert ran == Ran(status, "out", "Error response from daemon: gone\n", False)


def test_a_command_that_kills_all_it_can_has_failed_and_the_container_lives(calls: Path):
    with opening.opened({"provider": "docker"}, ORDER) as lease:
        assert lease.sandbox.exec("kill -9 -1", 5, {}, False).status == 137
        assert lease.sandbox.exec("echo on", 5, {}, False).stdout == "on\n"


@pytest.mark.parametrize("command", ["echo \0", "echo \ud800", "true " + "'" * 200_000])
def test_a_command_that_no_shell_can_be_given_is_not_run_and_says_so(command: str, calls: Path):
    with opening.opened({"provider": "docker"}, ORDER) as lease:
        ran = lease.sandbox.exec(command, 5, {}, False)
        assert ran.status == 126 and "the command was not run: it " in ran.stderr
        long = "printf %s '" + "é" * 50_000 + "' | wc -c"
        assert lease.sandbox.exec(long, 5, {}, False).stdout.strip() == "100000"
        with pytest.raises(SandboxFault):
            lease.sandbox.exec("true", 5, {"A": "\0"}, False)


def test_a_container_of_which_docker_says_nothing_is_removed(
    calls: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(docker, "START_SECONDS", 1.0)
    with (
        pytest.raises(SandboxFault, match="docker run took longer than 1 s"),
        opening.opened({"provider": "docker"}, Order(image="slow")),
    ):
        pass
    started, removed = called(calls)
    assert removed == ["rm", "--force", name_of(started)]
    assert list(calls.parent.glob("*.pid")) == []


def test_what_the_agent_left_is_ended_by_a_restart_and_its_files_stay(calls: Path):
    with opening.opened({"provider": "docker"}, ORDER) as lease:
        lease.sandbox.exec("echo kept > f; setsid sleep 88 >/dev/null 2>&1 &", 5, {}, False)
        lease.sandbox.end_processes()
        ran = lease.sandbox.exec("cat f; pgrep -c sleep.88", 5, {}, False)
        assert ran.stdout == "kept\n0\n"
        lease.sandbox.write("/tests/a b/x", b"\x00\xff")
        assert lease.sandbox.exec("wc -c <'/tests/a b/x'", 5, {}, True).stdout.strip() == "2"


def test_an_image_that_is_not_there_and_a_container_that_is_lost_are_faults(calls: Path):
    with (
        pytest.raises(SandboxFault, match=r"no container: .*no such image"),
        opening.opened({"provider": "docker"}, Order(image="missing")),
    ):
        pass
    with opening.opened({"provider": "docker"}, ORDER) as lease:
        docker._Client("docker").call(["rm", "--force", only_name(calls)], 10)
        with pytest.raises(SandboxFault, match="the container is lost"):
            lease.sandbox.exec("true", 5, {}, False)


def test_what_is_missing_is_said_before_a_push(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "docker is not on the PATH" in docker.problem({})
    assert "program is docker or podman" in docker.problem({"program": "runc"})
    (tmp_path / "podman").write_text("#!/bin/sh\n")
    (tmp_path / "podman").chmod(0o755)
    monkeypatch.setenv("CONTAINER_HOST", "unix:///run/podman.sock")
    assert 'secrets = ["CONTAINER_HOST"] with a tcp://' in docker.problem({"program": "podman"})
    monkeypatch.setenv("CONTAINER_HOST", "tcp://10.0.0.1:8888")
    assert docker.problem({"program": "podman"}) == ""
