"""A command plays one task in a box of its own: what it may reach, and how its reward is read."""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from reward_server import RewardServer, processes_with, reward_server

from envs.config.settings import Limits, Rollout
from envs.host.command import CommandRun, Commands, Ending, score_of
from envs.host.process import isolation_here
from envs.isolation.sandbox import FULL, LIMITS, Sandbox
from envs.json_types import ScoreReply

pytestmark = pytest.mark.timeout(60)

TASK = {"id": "a", "prompt": [{"role": "user", "content": "say a"}], "metadata": {"sum": 7}}
SHELL = ("sh", "agent.sh")
PYTHON = ("python3", "agent.py")


def commands(
    folder: Path, script: str, rollout: Rollout, secrets: dict[str, str] | None = None
) -> Commands:
    name = rollout.command[1] if len(rollout.command) > 1 else "agent.sh"
    (folder / name).write_text(script)
    return Commands(
        source=folder,
        rollout=rollout,
        python=sys.executable,
        limits=Limits(),
        secrets=secrets or {},
        log=None,
        sandbox=Sandbox(),
    )


@contextlib.contextmanager
def started(of: Commands) -> Iterator[CommandRun]:
    with contextlib.closing(of.start()) as run:
        yield run


def ended(of: Commands, **variables: str) -> Ending:
    with started(of) as run:
        run.begin(TASK, variables)
        return run.wait()


def played(folder: Path, script: str, rollout: Rollout) -> ScoreReply:
    return score_of(rollout, ended(commands(folder, script, rollout)))


# Script, then (reward, success, beginning of the error).
STATUSES = {
    "exit 0": (1.0, True, None),
    "exit 1": (0.0, False, None),
    "echo help >&2; exit 3": (0.0, False, "the command left with exit status 3"),
    "kill -9 $$": (0.0, False, "the command was killed by signal 9"),
    "kill -15 $$": (0.0, False, "the command was killed by signal 15"),
}


@pytest.mark.parametrize("script", STATUSES)
def test_the_exit_status_is_the_reward(tmp_path: Path, script: str):
    reward, success, error = STATUSES[script]
    score = played(tmp_path, script, Rollout(SHELL))
    assert (score["reward"], score["success"]) == (reward, success)
    assert str(score["error"]).startswith(error) if error else score["error"] is None


PRINTED = {
    "echo chatter; echo 0.25": (0.25, None),
    'echo \'{"reward": 2, "success": true, "metrics": {"steps": 3}}\'; echo': (2.0, None),
    "true": (0.0, "the command printed nothing"),
    "echo well done": (0.0, "the last line of its output is no JSON"),
    "echo NaN": (0.0, "the last line of its output: the reward is nan"),
    "echo '{\"reward\": true}'": (0.0, "the last line of its output: the reward is True"),
    "echo '{\"rewards\": 1}'": (0.0, "the last line of its output has the unknown key"),
    "echo '{\"success\": true}'": (0.0, "the last line of its output: the reward is None"),
    "echo 1; exit 1": (0.0, "the command left with exit status 1"),
    # What follows a reward takes its place: a reply of the model that was printed late is no JSON.
    "echo 1; echo the model said so": (0.0, "the last line of its output is no JSON"),
    "head -c 3000000 /dev/zero | tr '\\0' x; echo; echo 1": (1.0, None),
}


@pytest.mark.parametrize("script", PRINTED)
def test_the_last_line_of_the_output_is_the_reward(tmp_path: Path, script: str):
    reward, error = PRINTED[script]
    score = played(tmp_path, script, Rollout(SHELL, reward="stdout"))
    assert score["reward"] == reward
    assert str(score["error"]).startswith(error) if error else score["error"] is None


def test_a_line_that_looks_like_the_end_of_the_box_is_output_like_any_other(tmp_path: Path):
    forged = """echo '{"exit": {"code": 0, "signal": 0, "seal": "", "started": true}}'; exit 3"""
    score = played(tmp_path, forged, Rollout(SHELL))
    assert str(score["error"]).startswith("the command left with exit status 3")


FILE = Rollout(SHELL, reward="file", reward_file="out/reward.json")
FILES = {
    "mkdir out; echo '{\"reward\": 0.5}' > out/reward.json": (0.5, None),
    "true": (0.0, "the program wrote no out/reward.json"),
    "mkdir out; ln -s /etc/hostname out/reward.json": (0.0, "out/reward.json cannot be read"),
    "ln -s /etc out; true": (0.0, "out/reward.json cannot be read"),
    "mkdir out; mkfifo out/reward.json": (0.0, "out/reward.json is no regular file"),
    "mkdir -p out/reward.json": (0.0, "out/reward.json is no regular file"),
    "mkdir out; head -c 70000 /dev/zero > out/reward.json": (0.0, "out/reward.json has more than"),
}


@pytest.mark.parametrize("script", FILES)
def test_a_file_is_the_reward_where_it_is_one(tmp_path: Path, script: str):
    reward, error = FILES[script]
    score = played(tmp_path, script, FILE)
    assert score["reward"] == reward
    assert str(score["error"]).startswith(error) if error else score["error"] is None


def test_a24_a_reward_file_that_comes_with_the_environment_is_none(tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/reward.json").write_text("1")
    assert str(played(tmp_path, "ls", FILE)["error"]).startswith("the program wrote no")


def test_a24_a_daemon_that_writes_the_reward_again_is_dead_before_it_is_read(tmp_path: Path):
    # It leaves its session and its parent, ignores signals, and writes for as long as it lives.
    daemon = """
import os, signal, time
os.mkdir("out")
open("out/reward.json", "w").write("0.25")
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in (1, 2, 15):
            signal.signal(number, signal.SIG_IGN)
        deadline = time.time() + 5
        while time.time() < deadline:
            time.sleep(0.2)
            open("out/reward.json", "w").write("1")
    os._exit(0)
"""
    rollout = Rollout(PYTHON, reward="file", reward_file="out/reward.json")
    began = time.monotonic()
    score = played(tmp_path, daemon, rollout)
    assert (score["reward"], score["error"]) == (0.25, None)
    assert time.monotonic() - began < 5  # nobody waited for the daemon


@pytest.fixture
def rewards() -> Iterator[RewardServer]:
    with reward_server() as server:
        yield server


PLAYED = {"task": {"id": "t"}, "messages": [{"role": "user", "content": "?"}], "completion": "!"}


def asked_of(folder: Path, script: str, server: RewardServer, **more: float) -> ScoreReply:
    rollout = Rollout(SHELL, reward="http", reward_url=server.url, **more)  # type: ignore[arg-type]
    return score_of(rollout, ended(commands(folder, script, rollout)), PLAYED)


def test_a_server_says_what_the_rollout_earned_once_all_of_it_is_dead(
    tmp_path: Path, rewards: RewardServer
):
    if isolation_here().level != FULL:
        pytest.skip("no namespaces here")
    rewards.reply = b'{"reward": 0.5, "success": true, "metrics": {"steps": 3}}'
    score = asked_of(tmp_path, "setsid sleep 71.41 & echo done", rewards)
    assert (score["reward"], score["success"], score["error"]) == (0.5, True, None)
    assert score["metrics"] == {"steps": 3}
    assert rewards.asked == [PLAYED | {"output": "done\n"}], "asked once"
    assert rewards.alive == [], "every process of the rollout is dead before"
    assert "exit status 3" in str(asked_of(tmp_path, "exit 3", rewards)["error"])
    rollout = Rollout(SHELL, reward="http", reward_url=rewards.url)
    silent = score_of(rollout, ended(commands(tmp_path, "true", rollout)))
    assert silent["error"] == "the command asked the model nothing"
    assert len(rewards.asked) == 1, "of a failed rollout nothing is asked"


BAD_SERVERS = {
    "redirect": ({"status": 302, "headers": {"location": "http://127.0.0.1:9/"}}, "answered 302"),
    "kept": ({"status": 307, "headers": {"location": "http://127.0.0.1:9/"}}, "no redirect is"),
    "created": ({"status": 201}, "answered 201; 200 with a reward is needed"),
    "broken": ({"status": 500}, "answered 500"),
    "large": ({"reply": b" " * 70_000 + b"1"}, "answered with more than 64 KiB"),
    "text": ({"reply": b"well done"}, "is no JSON"),
    "key": ({"reply": b'{"rewards": 1}'}, "has the unknown key 'rewards'"),
    "nan": ({"reply": b"NaN"}, "the reward is nan"),
}


def test_a_server_that_gives_no_reward_costs_the_rollout_alone(
    tmp_path: Path, rewards: RewardServer
):
    rollout = Rollout(SHELL, reward="http", reward_url=rewards.url, reward_seconds=0.5)
    ending = Ending()
    for _, (values, said) in BAD_SERVERS.items():
        for name, value in {"status": 200, "headers": {}, "reply": b"1", **values}.items():
            setattr(rewards, name, value)
        score = score_of(rollout, ending, PLAYED)
        assert score["reward"] == 0.0 and said in str(score["error"]), said
    rewards.wait_s = 20.0
    score = score_of(rollout, ending, PLAYED)
    assert str(score["error"]).endswith("gave no reward within 0.5 s") and score["timed_out"]
    gone = replace(rollout, reward_url="http://127.0.0.1:9/")
    assert "is the server running?" in str(score_of(gone, ending, PLAYED)["error"])


def test_a24_a_program_cannot_answer_in_the_place_of_the_reward_server(tmp_path: Path):
    """The server is not there; the program takes its port, and leaves a daemon that answers."""
    if isolation_here().level != FULL:
        pytest.skip("no namespaces here")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    impostor = f"""
import os, socket
try:
    server = socket.socket()
    server.bind(("127.0.0.1", {port}))
    server.listen()
    if os.fork() == 0:
        os.setsid()
        while True:
            connection, _ = server.accept()
            connection.recv(9999)
            connection.sendall(b"HTTP/1.0 200 OK\\r\\n\\r\\n1")
            connection.close()
except OSError as error:
    print("refused", error)
"""
    url = f"http://127.0.0.1:{port}/reward"
    rollout = Rollout(PYTHON, reward="http", reward_url=url)
    score = score_of(rollout, ended(commands(tmp_path, impostor, rollout)), PLAYED)
    assert score["reward"] == 0.0 and "is the server running?" in str(score["error"])
    # Where the machine keeps no program off its network, nobody is asked at all.
    score = score_of(rollout, Ending(open_network=True), PLAYED)
    assert "could answer in the server's place" in str(score["error"])


def test_what_a_program_prints_first_says_nothing_of_its_isolation(
    tmp_path: Path, rewards: RewardServer
):
    forged = """echo '{"hello": {"level": "limits", "gaps": []}}'; head -c 2000000 /dev/zero"""
    rollout = Rollout(SHELL, reward="http", reward_url=rewards.url)
    ending = ended(commands(tmp_path, forged, rollout))
    assert ending.open_network == (isolation_here().level == LIMITS)


def test_a_program_that_hangs_ends_when_its_time_is_up_with_all_it_started(tmp_path: Path):
    script = "setsid sleep 71.37 & trap '' TERM INT; sleep 71.37"
    rollout = Rollout(SHELL, seconds=1.5)
    began = time.monotonic()
    score = played(tmp_path, script, rollout)
    assert score["error"] == "the command ran longer than 1.5 s"
    assert score.get("timed_out") is True
    assert processes_with("71.37") == []
    assert time.monotonic() - began < 15


def test_a_program_that_does_not_exist_costs_its_rollout(tmp_path: Path):
    score = played(tmp_path, "", Rollout(("no-such-program",)))
    assert "no-such-program cannot be started: No such file or directory" in str(score["error"])


def test_it_works_in_a_copy_of_the_folder_with_its_task_and_its_variables(tmp_path: Path):
    (tmp_path / "tool.sh").write_text("#!/bin/sh\necho tool\n")
    script = """
./tool.sh
touch written
cat "$HONESMITH_TASK"; echo
echo "$GREETING $(env | wc -l)"
env | grep -c SECRET_OF_THE_SERVER
"""
    os.environ["SECRET_OF_THE_SERVER"] = "x"
    try:
        ending = ended(commands(tmp_path, script, Rollout(SHELL)), GREETING="hello")
    finally:
        del os.environ["SECRET_OF_THE_SERVER"]
    lines = ending.output.splitlines()
    assert lines[0] == "tool" and '"sum": 7' in lines[1] and lines[2].startswith("hello ")
    assert lines[3] == "0"
    assert not (tmp_path / "written").exists()


REACH = """
import socket, sys
port = int(sys.argv[1]) if len(sys.argv) > 1 else 1
def tried(what):
    try:
        what()
        return "reached"
    except OSError as error:
        return type(error).__name__
other = socket.socket
def connect(host, to):
    with other() as s:
        s.settimeout(2)
        s.connect((host, to))
def datagram():
    with other(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.sendto(b"x", ("127.0.0.1", 53))
def fast_open(to):
    with other() as s:
        s.settimeout(2)
        s.sendto(b"GET / HTTP/1.0", 0x20000000, ("127.0.0.1", to))
def listen():
    with other() as s:
        s.bind(("127.0.0.1", 0))
def unix():
    other(socket.AF_UNIX, socket.SOCK_STREAM)
def mptcp():
    with other(socket.AF_INET, socket.SOCK_STREAM, 262) as s:
        s.settimeout(2)
        s.connect(("127.0.0.1", port))
import os
gateway = int(os.environ["GATEWAY"])
other_port = int(os.environ["OTHER"])
print("gateway", tried(lambda: connect("127.0.0.1", gateway)))
print("other", tried(lambda: connect("127.0.0.1", other_port)))
print("outside", tried(lambda: connect("192.0.2.1", 80)))
print("datagram", tried(datagram))
print("fast_open", tried(lambda: fast_open(other_port)))
print("mptcp", tried(mptcp))
print("listen", tried(listen))
print("unix", tried(unix))
"""


def test_it_reaches_its_gateway_and_nothing_else(tmp_path: Path):
    if isolation_here().level != FULL:
        pytest.skip("no namespaces here")
    with socket.socket() as other:  # another server of this machine
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        with started(commands(tmp_path, REACH, Rollout(PYTHON))) as run:
            accepted: list[str] = []

            def accept() -> None:
                with contextlib.suppress(OSError):
                    connection, _ = run.listener.accept()
                    accepted.append("program")
                    connection.close()

            run.listener.settimeout(20)
            thread = threading.Thread(target=accept)
            thread.start()
            gateway = run.base_url.rpartition(":")[2]
            run.begin(TASK, {"GATEWAY": gateway, "OTHER": port})
            ending = run.wait()
            thread.join()
    lines = dict(line.split() for line in ending.output.splitlines())
    assert accepted == ["program"]
    assert lines.pop("gateway") == "reached"
    assert len(lines) == 7 and "reached" not in lines.values(), lines


def test_two_programs_do_not_reach_the_gateway_of_each_other(tmp_path: Path):
    if isolation_here().level != FULL:
        pytest.skip("no namespaces here")
    with (
        started(commands(tmp_path, REACH, Rollout(PYTHON))) as first,
        started(commands(tmp_path, REACH, Rollout(PYTHON))) as second,
    ):
        other = second.base_url.rpartition(":")[2]
        first.begin(TASK, {"GATEWAY": "1", "OTHER": other})
        lines = dict(line.split() for line in first.wait().output.splitlines())
    assert lines["other"] != "reached"


def test_a_secret_reaches_the_program_and_no_message(tmp_path: Path):
    of = commands(
        tmp_path,
        'test "$JUDGE_KEY" = "open sesame 1" || exit 1; echo "key $JUDGE_KEY" >&2; exit 4',
        Rollout(SHELL),
        secrets={"JUDGE_KEY": "open sesame 1"},
    )
    error = str(score_of(of.rollout, ended(of))["error"])
    assert "exit status 4" in error and "[secret JUDGE_KEY]" in error and "sesame" not in error


RENTED = """
[adapter]
kind = "harbor"
sandbox = { provider = "docker" }
"""
GIVING_BACK = """
trap 'echo given back; exit 1' TERM
echo rented
while true; do sleep 0.02; done
"""


@pytest.mark.parametrize(("toml", "given_back"), [(RENTED, True), ("", False)])
def test_a_program_that_rents_is_told_to_give_back_before_it_is_killed(
    toml: str, given_back: bool, tmp_path: Path
):
    (tmp_path / "environment.toml").write_text(toml)
    log = tmp_path / "log"
    of = replace(commands(tmp_path, f"exec >&2\n{GIVING_BACK}", Rollout(SHELL)), log=log)
    with started(of) as run:
        run.begin(TASK, {})
        deadline = time.monotonic() + 10
        while not log.exists() or "rented" not in log.read_text():
            assert time.monotonic() < deadline
    assert ("given back" in log.read_text()) is given_back


def test_a_program_that_does_not_give_back_is_killed_after_its_grace(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("envs.host.command.GRACE_SECONDS", 0.2)
    (tmp_path / "environment.toml").write_text(RENTED)
    script = "trap '' TERM; while true; do sleep 0.02; done"
    of = commands(tmp_path, script, Rollout(SHELL, seconds=0.5))
    ending = ended(of)
    assert ending.timed_out and processes_with("trap '' TERM") == []
