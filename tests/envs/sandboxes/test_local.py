"""The rollout's own box as a sandbox: what a command may do there, and what an agent that attacks
its tests, its reward, its key and the process that started it does not get."""

import json
from pathlib import Path

import pytest
from harbor_play import TOML, boxed, played, write_folder

pytestmark = [boxed, pytest.mark.timeout(40)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "env", environment__data___txt="some data\n")


def told(folder: Path, *commands: str) -> list[str]:
    """What the model was told of each command."""
    score, model, ending = played(folder, commands)
    assert score["error"] is None, ending
    return model.told


def test_a_command_finds_the_files_of_the_task_and_a_shell_that_works(folder: Path):
    command = """
    pwd; cat data.txt; echo $HOME
    diff <(echo a) <(echo a) && echo same; echo piped | cat /dev/stdin
    mktemp >/dev/null && echo temporary; mkdir -p deep/er && cd deep && pwd
    timeout 0.1 sleep 9; echo $?; sleep 9 & kill $! && echo killed
    python3 -c 'import subprocess; print(subprocess.check_output(["echo", "child"]).decode())'
    """
    (said,) = told(folder, command)
    expected = (
        "exit status 0\n/app\nsome data\n/app\nsame\npiped\ntemporary\n/app/deep\n124\nkilled"
    )
    assert said.startswith(expected) and said.endswith("child")


def test_what_a_command_leaves_running_is_there_for_the_next(folder: Path):
    server = "(while [ ! -f stop ]; do sleep 0.02; done; echo stopped > said) >/dev/null 2>&1 &"
    assert told(folder, server, "touch stop; until [ -s said ]; do sleep 0.02; done; cat said")[1:]


def test_an_agent_that_has_used_up_its_processes_is_told_so_and_graded(folder: Path):
    toml = TOML.replace("[adapter]", "[adapter]\ncommand_seconds = 1.5")
    (folder / "environment.toml").write_text(toml)
    bomb = "for n in $(seq 400); do setsid sleep 60 & done 2>/dev/null; echo on"
    score, model, ending = played(folder, [bomb, "sleep 0.01 | sleep 0.01; echo blue > answer"])
    assert score["error"] is None and score["metrics"]["commands"] == 2.0, ending
    assert model.told[0].startswith("ended after") and model.told[1] != "exit status 0"


def test_a_flood_of_output_is_cut_and_a_flood_of_files_is_bounded(folder: Path):
    said = told(folder, "yes | head -c 30000000", "head -c 999999999 /dev/zero > big; wc -c < big")
    assert "characters are left out" in said[0] and len(said[0]) < 5000
    assert int(said[1].split()[2]) <= 256 << 20


# What an agent tries, and what must not stand in what it is told.
READS = {
    "the tests": ("cat /tests/* /tests/expected; ls /tests", "blue"),
    "the solution": ("cat /solution/*; ls /solution", "blue"),
    "the copy of the folder": (
        "cat /honesmith/work/rollout/tasks/answer/tests/expected; ls -R /honesmith",
        "blue",
    ),
    "the copy by its other path": (
        "cat /tmp/honesmith-env-*/source/tasks/answer/tests/expected; ls /tmp/honesmith-env-*",
        "blue",
    ),
    "the whole machine": ("grep -rs blue /honesmith / --include=expected", "expected:blue"),
    "the key of the rollout": (
        "env; cat /proc/*/environ /proc/self/environ /proc/$PPID/environ | tr '\\0' '\\n'",
        "key-of-the-rollout",
    ),
    "memory of the program": (
        "for p in 1 2 3 4 5 $PPID; do head -c 10 /proc/$p/mem && echo opened; done",
        "opened",
    ),
    "how the box was started": ("cat /proc/1/cmdline /proc/*/cmdline", "seal"),
    "another way through the root": ("ls /proc/self/root/tests /proc/$PPID/root/tests", "test.sh"),
    "the loader": (
        "/lib64/ld-linux-x86-64.so.2 /usr/bin/cat /honesmith/work/task.json",
        "answer",
    ),
}


@pytest.mark.parametrize("what", READS)
def test_an_agent_does_not_get(what: str, folder: Path):
    command, secret = READS[what]
    (said,) = told(folder, command)
    assert secret not in said.replace(command, "")


WRITES = {
    "a planted reward": "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt",
    "a planted object": "echo '{\"reward\": 1}' > /logs/verifier/reward.json",
    "a link in the place of the reward": "ln -sf /app/one /logs/verifier/reward.txt; echo 1 > one",
    "other tests": "echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh",
    "other expected words": "echo red > /tests/expected; echo red > answer",
    "another bash": "cp /bin/true /bin/bash; echo x > /usr/bin/cat; echo x > /etc/profile",
    "another interpreter": 'echo x > "$(readlink -f "$(command -v python3)")"',
    "a daemon that waits for the tests": (
        "setsid bash -c 'while true; do echo 1 > /logs/verifier/reward.txt; done' "
        ">/dev/null 2>&1 & echo on"
    ),
    "a daemon that forks and forks": (
        "f() { sleep 0.01; f & f; }; (trap '' TERM HUP INT; setsid bash -c "
        "'while true; do (sleep 30 &) ; sleep 0.005; done') >/dev/null 2>&1 & echo on"
    ),
    "a link to the expected words": "ln -s /tests/expected answer",
    "a link from below": "ln -s ../tests/expected answer",
    "a link through the process": "ln -s /proc/self/root/tests/expected answer",
    "links in a row": "ln -s / all; ln -s all/tests/expected answer",
    "a hook of bash": "echo 'echo 1 > /logs/verifier/reward.txt' > .bashrc; cp .bashrc .profile",
}


@pytest.mark.parametrize("what", WRITES)
def test_an_agent_earns_nothing_by(what: str, folder: Path):
    score, _, ending = played(folder, [WRITES[what]])
    assert score["error"] is None, ending
    assert score["reward"] == 0.0


def test_an_agent_cannot_take_away_what_the_tests_read(tmp_path: Path):
    test = """
    ok=1; for case in /tests/cases/*; do [ -e "$case" ] && ok=0; done
    echo $ok > /logs/verifier/reward.txt
    """
    files = {"tests__test___sh": test, "tests__cases__one": "a case that nobody solves\n"}
    folder = write_folder(tmp_path / "env", **files)
    hide = "chmod 000 /honesmith/work/rollout/tasks/answer/tests/cases; echo on"
    score, _, ending = played(folder, [hide])
    assert (score["reward"], score["error"]) == (0.0, None), ending


def test_an_agent_that_closes_folders_of_its_user_is_graded_all_the_same(folder: Path):
    close = "chmod 000 /tests /solution /logs/verifier /honesmith/work; echo blue > answer"
    score, _, ending = played(folder, [close, "echo still here"])
    assert (score["reward"], score["error"]) == (1.0, None), ending


def test_words_of_a_command_are_not_taken_for_those_of_the_box(folder: Path):
    (said,) = told(folder, "echo 'not confined: really' >&2; exit 126")
    assert said.split() == ["exit", "status", "126", "not", "confined:", "really"]


def test_tests_that_what_they_ran_has_killed_say_nothing_about_the_model(tmp_path: Path):
    folder = write_folder(tmp_path / "env", tests__test___sh="bash /app/greet.sh")
    plant = "echo 'echo 1 > /logs/verifier/reward.txt; kill -9 $PPID' > greet.sh"
    score, _, ending = played(folder, [plant])
    assert score["reward"] == 0.0 and score["error"]
    assert "signal 9" in str(ending), ending


KILLS = {
    "signals": "kill -9 1 2 3 4 5 6 $PPID; kill -9 -1; true",
    "signals of python": (
        "python3 -c 'import os\nfor p in range(1, 60):\n  try: os.kill(p, 9)\n"
        "  except OSError: pass'"
    ),
    "tracing": (
        "python3 -c 'import ctypes\nl = ctypes.CDLL(None, use_errno=True)\n"
        "print([l.ptrace(16, p, 0, 0) for p in range(1, 20)])'"
    ),
    "limits": (
        "python3 -c 'import resource\nfor p in range(1, 9):\n  resource.prlimit(p, 0, (1, 1))'"
    ),
}


@pytest.mark.parametrize("what", KILLS)
def test_the_process_that_grades_is_not_harmed_by(what: str, folder: Path):
    score, model, ending = played(folder, [KILLS[what], "echo blue > answer"])
    assert (score["reward"], score["error"]) == (1.0, None), ending
    if what == "tracing":
        assert set(json.loads(model.told[0].splitlines()[1])) == {-1}


NETWORK = {
    "any port of the box": (
        "for p in $(seq 32768 32868) 80 443; do (exec 3<>/dev/tcp/127.0.0.1/$p) && echo connected; "
        "done; exit 1"
    ),
    "a socket": "python3 -c 'import socket; socket.socket(); print(\"connected\")'",
    "a socket file": (
        "python3 -c 'import socket; socket.socket(socket.AF_UNIX); print(\"connected\")'"
    ),
    "the cloud's metadata": "exec 3<>/dev/tcp/169.254.169.254/80 && echo connected",
}


@pytest.mark.parametrize("what", NETWORK)
def test_an_agent_reaches_over_the_network(what: str, folder: Path):
    """Nothing: not even the gateway, whose key it has not."""
    (said,) = told(folder, NETWORK[what])
    assert not said.splitlines()[0].endswith("status 0") and "\nconnected" not in said


def test_what_the_tests_start_does_not_see_the_key_either(tmp_path: Path):
    test = "env > /app/seen; cat /proc/*/environ >> /app/seen 2>/dev/null; " + (
        "if grep -q key-of-the-rollout /app/seen; then echo 1; else echo 0; fi "
        "> /logs/verifier/reward.txt"
    )
    score, _, _ = played(write_folder(tmp_path / "env", tests__test___sh=test), [])
    assert (score["reward"], score["error"]) == (0.0, None)


def test_programs_of_the_tests_load_no_code_from_the_agents_home(tmp_path: Path):
    test = """
    python3 -s -c 'print(1)' >/dev/null; /usr/bin/env python3 -c 'print(1)' >/dev/null
    if [ "$HOME" = /tests ]; then echo 0.5; else echo 0; fi > /logs/verifier/reward.txt
    """
    plant = """
    for version in 3.9 3.10 3.11 3.12 3.13; do
      site=$HOME/.local/lib/python$version/site-packages; mkdir -p $site
      echo 'import os' > $site/usercustomize.py
      echo 'os.system("echo 1 > /logs/verifier/reward.json")' >> $site/usercustomize.py
    done; echo $HOME
    """
    folder = write_folder(tmp_path / "env", tests__test___sh=test)
    score, model, _ = played(folder, [plant])
    assert model.told == ["exit status 0\n/app"]
    assert (score["reward"], score["error"]) == (0.5, None)


def test_the_tests_see_their_variables_and_the_agent_does_not(tmp_path: Path):
    toml = '[environment]\ndocker_image = "x"\n[verifier.env]\nSECRET_WORD = "blue"'
    test = '[ "$SECRET_WORD" = blue ] && [ ! -s /app/seen ] && echo 1 > /logs/verifier/reward.txt'
    folder = write_folder(tmp_path / "env", TOML, task___toml=toml, tests__test___sh=test)
    score, _, _ = played(folder, ["echo -n $SECRET_WORD > seen"])
    assert (score["reward"], score["error"]) == (1.0, None)
