"""A sandbox that is reached by a shell: commands, files, and the end of every process."""

import shlex
from collections.abc import Mapping

import pytest
from mini_container import MiniContainer

from envs.sandboxes.contract import KEPT_BYTES, Order, Ran, SandboxFault
from envs.sandboxes.remote import RemoteSandbox, opened

pytestmark = pytest.mark.timeout(20)


@pytest.fixture
def sandbox(container: MiniContainer) -> RemoteSandbox:
    def run(text: str, _seconds: float, variables: Mapping[str, str]) -> Ran:
        done = container.run(text, variables)
        return Ran(done.returncode, done.stdout.decode(), done.stderr.decode())

    def upload(path: str, data: bytes) -> None:
        container.run(f"cat >{shlex.quote(path)}", data=data)

    return opened(
        RemoteSandbox(Order(workdir="/app", variables={"A": "1"}), run, upload, lambda: None)
    )


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

    sandbox = opened(RemoteSandbox(Order(), run, lambda *_: None, lambda: None))
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

    assert len(living()) == 2
    sandbox.end_processes()
    assert living() == []
    assert b"sleep 99" not in container.run("ps -eo args").stdout
    assert sandbox.exec("echo on", 5, {}, grading=False).stdout == "on\n"


def test_a_sandbox_without_bash_is_given_back_and_named():
    given_back: list[int] = []
    sandbox = RemoteSandbox(
        Order(),
        lambda *_: Ran(127, "", "bash: not found"),
        lambda *_: None,
        lambda: given_back.append(1),
    )
    with pytest.raises(SandboxFault, match=r"could not be prepared .*bash: not found"):
        opened(sandbox)
    assert given_back == [1]


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
