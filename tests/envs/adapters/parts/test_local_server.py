"""A server that an environment started is ended, or left to the box where no signal may be sent."""

import subprocess
import sys

import pytest

from envs.adapters.parts import local_server


class Unkillable(subprocess.Popen):
    """A process to which the box lets nobody send a signal."""

    def kill(self) -> None:
        raise PermissionError(1, "Operation not permitted")


def started(kind: type[subprocess.Popen], program: str) -> subprocess.Popen:
    return kind([sys.executable, "-c", program], stdin=subprocess.PIPE)


def test_a_server_is_killed_and_waited_for():
    process = started(subprocess.Popen, "import time; time.sleep(60)")
    local_server.end(process)
    assert process.returncode == -9


def test_a_server_that_cannot_be_killed_may_leave_by_itself():
    process = started(Unkillable, "import sys; sys.stdin.read()")
    assert process.stdin is not None
    process.stdin.close()
    local_server.end(process, seconds=4.0)
    assert process.returncode == 0


@pytest.mark.parametrize("seconds", [0.0, 0.05])
def test_a_server_that_stays_is_left_to_the_box_and_nobody_waits_longer(seconds: float):
    process = started(Unkillable, "import sys; sys.stdin.read()")
    local_server.end(process, seconds)
    assert process.returncode is None
    process.communicate()
