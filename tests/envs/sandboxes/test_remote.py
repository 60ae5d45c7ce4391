"""A sandbox that is reached by a shell: commands, files, and the end of every process."""

import contextlib
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from mini_container import MiniContainer

from envs.sandboxes.contract import KEPT_BYTES, Order, Ran, SandboxFault
from envs.sandboxes.remote import RemoteSandbox

pytestmark = pytest.mark.timeout(20)


@pytest.fixture
def sandbox(container: MiniContainer) -> RemoteSandbox:
    def run(text: str, _seconds: float, variables: Mapping[str, str]) -> Ran:
        done = container.run(text, variables)
        return Ran(done.returncode, done.stdout.decode(), done.stderr.decode())

    def upload(path: str, data: bytes) -> None:
        container.run(f"cat >{shlex.quote(path)}", data=data)

    made = RemoteSandbox(Order(workdir="/app", variables={"A": "1"}), run, upload, lambda: None)
    made.prepare()
    return made


def test_a_command_gives_its_status_both_streams_and_sees_its_variables(sandbox: RemoteSandbox):
    ran = sandbox.exec("pwd; echo $A$B >&2; exit 3", 5, {"B": "2"}, grading=False)
    assert ran == Ran(3, "/app\n", "12\n", timed_out=False)


def test_a_command_that_is_killed_sooner_has_not_run_out_of_time(sandbox: RemoteSandbox):
    ran = sandbox.exec("kill -9 $$", 5, {}, grading=False)
    assert (ran.status, ran.timed_out) == (137, False)


def test_commands_run_where_the_image_says_if_the_task_does_not(container: MiniContainer):
    def run(text: str, *_: object) -> Ran:
        done = container.run(f"cd /solution; {text}")
        return Ran(done.returncode, done.stdout.decode(), done.stderr.decode())

    sandbox = RemoteSandbox(Order(), run, lambda *_: None, lambda: None)
    sandbox.prepare()
    assert sandbox.workdir == "/solution"
    assert sandbox.exec("pwd", 5, {}, grading=False).stdout == "/solution\n"


def test_a_command_that_takes_too_long_is_ended_and_says_so(sandbox: RemoteSandbox):
    ran = sandbox.exec("echo begun; sleep 30", 0.3, {}, grading=False)
    assert ran.timed_out and ran.stdout == "begun\n"


def test_what_a_command_leaves_in_the_background_holds_nothing_up(sandbox: RemoteSandbox):
    ran = sandbox.exec("sleep 100 & echo on", 5, {}, grading=False)
    assert (ran.status, ran.stdout) == (0, "on\n")


def test_much_output_keeps_its_two_ends(sandbox: RemoteSandbox):
    ran = sandbox.exec("seq 1 50000", 5, {}, grading=False)
    assert ran.stdout.startswith("1\n2\n") and ran.stdout.endswith("49999\n50000\n")
    assert "bytes are left out" in ran.stdout and len(ran.stdout) < KEPT_BYTES + 200


def test_files_are_written_read_and_removed(sandbox: RemoteSandbox):
    sandbox.write("/tests/deep/it's here.txt", b"text")
    assert sandbox.read("/tests/deep/it's here.txt", 10) == b"text"
    sandbox.remove("/tests/deep")
    assert sandbox.read("/tests/deep/it's here.txt", 10) is None


@pytest.mark.parametrize("made", ["mkdir x", "ln -s /etc/passwd x", "mkfifo x", "seq 99 >x"])
def test_what_is_no_plain_small_file_is_not_read(made: str, sandbox: RemoteSandbox):
    sandbox.exec(made, 5, {}, grading=False)
    with pytest.raises(SandboxFault, match="/app/x is"):
        sandbox.read("/app/x", 20)


FORKING = """
cat >/tmp/fork.sh <<'END'
trap '' TERM HUP
n=0
while [ $n -lt 400 ]; do n=$((n + 1)); sleep 0.02; sh -c 'sleep 99' & done
END
setsid sh /tmp/fork.sh >/dev/null 2>&1 &
setsid sleep 77 >/dev/null 2>&1 &
"""


def test_every_process_of_the_agent_is_ended_and_the_sandbox_lives(
    sandbox: RemoteSandbox, container: MiniContainer
):
    sandbox.exec(FORKING, 5, {}, grading=False)

    def living() -> list[bytes]:
        lines = container.run("ps -eo stat,args").stdout.splitlines()
        return [line for line in lines if b"sleep 77" in line or b"fork.sh" in line]

    assert len(living()) >= 2  # more while it forks
    sandbox.end_processes()
    assert living() == []
    assert b"sleep 99" not in container.run("ps -eo args").stdout
    assert sandbox.exec("echo on", 5, {}, grading=False).stdout == "on\n"


NAMED = """
import ctypes, os, sys, time
ctypes.CDLL(None).prctl(15, os.fsencode(sys.argv[1]), 0, 0, 0)
open("/tmp/ready", "w").close()
time.sleep(99)
"""
LEADERLESS = """
import ctypes, os, threading, time
libc = ctypes.CDLL(None)
libc.prctl(15, b"threads-on", 0, 0, 0)
def live():
    while ") Z " not in open(f"/proc/{os.getpid()}/stat").read():
        time.sleep(0.001)
    open("/tmp/ready", "w").close()
    time.sleep(99)
threading.Thread(target=live).start()
libc.syscall({"x86_64": 60}.get(os.uname().machine, 93), 0)  # exit of this thread alone
"""
HIDING = {
    "the main thread is gone": (LEADERLESS, ""),
    "a line": (NAMED, "a) Z \n"),
    "two lines": (NAMED, "\n) Z 1 \n"),
    "only lines": (NAMED, "\n\n\n"),
    "a name that is a state": (NAMED, ") Z 1 1 1"),
    "bytes that are no text": (NAMED, "\udcff) Z \udc80\n"),
    "a pattern": (NAMED, "*) * ?\n[a]"),
}


def threads(container: MiniContainer) -> list[str]:
    """The folders in /proc of the container's living threads, but for that of its first process."""
    inside = os.readlink(f"/proc/{container.first}/ns/pid")
    found = []
    for thread in Path("/proc").glob("[0-9]*/task/[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            state = (thread / "stat").read_bytes().rpartition(b") ")[2][:1]
            if os.readlink(thread / "ns" / "pid") == inside and state not in b"ZX":
                found.append(str(thread))
    return [each for each in found if not each.endswith(f"/{container.first}")]


@pytest.mark.parametrize("how", HIDING)
@pytest.mark.parametrize("begin", ["before", "after"])
def test_a_process_that_looks_dead_or_has_a_false_name_is_ended(
    how: str, begin: str, sandbox: RemoteSandbox, container: MiniContainer
):
    program, name = HIDING[how]
    # Not through a virtual environment: the container's /tmp hides one that is below it.
    interpreter = os.path.realpath(sys.executable)
    command = shlex.join([interpreter, "-I", "-S", "-c", program])
    if name:
        command += " $'" + "".join(f"\\x{byte:02x}" for byte in os.fsencode(name)) + "'"
    command = f"setsid {command} >/dev/null 2>&1 & until [ -e /tmp/ready ]; do sleep 0.01; done"

    if begin == "before":  # it was there before any command, so that it stays
        assert container.run(f"bash -c {shlex.quote(command)}").returncode == 0
        sandbox.prepare()
        sandbox.end_processes()
        assert threads(container) != []
        return
    assert sandbox.exec(command, 5, {}, grading=False).status == 0
    assert threads(container) != []
    sandbox.end_processes()
    assert threads(container) == []


def test_a_sandbox_without_bash_says_so():
    sandbox = RemoteSandbox(
        Order(), lambda *_: Ran(127, "", "bash: not found"), lambda *_: None, lambda: None
    )
    with pytest.raises(SandboxFault, match=r"could not be prepared .*bash: not found"):
        sandbox.prepare()


@pytest.mark.parametrize("command", ["echo \0", "echo \ud800", "true " + "x" * 200_000])
def test_a_command_that_no_shell_can_be_given_asks_the_provider_for_nothing(command: str):
    asked: list[str] = []

    def run(text: str, *_: object) -> Ran:
        asked.append(text)
        return Ran(0)

    sandbox = RemoteSandbox(Order(), run, lambda *_: None, lambda: None)
    ran = sandbox.exec(command, 5, {}, grading=False)
    assert ran.status == 126 and "the command was not run: it " in ran.stderr
    assert asked == []


@pytest.mark.parametrize("path", ["/tests/a\0b", "/tests/\ud800"])
def test_a_path_that_no_shell_can_be_given_is_a_fault(path: str):
    def run(text: str, *_: object) -> Ran:
        raise AssertionError(text)

    sandbox = RemoteSandbox(Order(), run, lambda *_: None, lambda: None)
    for ask in (lambda: sandbox.read(path, 5), lambda: sandbox.remove(path)):
        with pytest.raises(SandboxFault, match="cannot be passed"):
            ask()
    with pytest.raises(SandboxFault, match="cannot be passed"):
        sandbox.write(path, b"")


def test_it_is_given_back_once_and_again_only_if_that_failed():
    tries: list[int] = []

    def give_back() -> None:
        tries.append(1)
        if len(tries) == 1:
            raise SandboxFault("busy")

    sandbox = RemoteSandbox(Order(), lambda *_: Ran(0), lambda *_: None, give_back)
    with pytest.raises(SandboxFault):
        sandbox.close()
    sandbox.close()
    sandbox.close()
    assert len(tries) == 2
