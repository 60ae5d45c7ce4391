"""All processes that this one and its children have started: found, and killed to the last."""

import contextlib
import os
import signal
import time
from pathlib import Path

from envs.isolation import kernel

KILL_SECONDS = 5.0  # time to kill all descendants; whatever survives longer is left behind


def kill_all(group: int) -> bool:
    """Kill all descendants of this process, for at most KILL_SECONDS; return whether none is left.

    Orphans become children of this process (their subreaper), so none escapes. `group` is the
    child's process group, which is killed too; 0 for none.
    """
    deadline = time.monotonic() + KILL_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if group:
                os.killpg(group, signal.SIGKILL)
        try:
            reaped_pid = -1
            while reaped_pid != 0:  # 0: children are left, and none of them has ended
                reaped_pid, _status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:  # no child is left
            return True
        for descendant in _pids():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(descendant, signal.SIGKILL)
        time.sleep(0.002)
    return False


def _pids() -> list[int]:
    """Return the pids of all descendants of this process; [] if this is not Linux."""
    children_of = by_parent()
    pids: list[int] = []
    unvisited = [os.getpid()]
    while unvisited:
        child_pids = children_of.get(unvisited.pop(), [])
        pids += child_pids
        unvisited += child_pids
    return pids


def by_parent() -> dict[int, list[int]]:
    """Return, for all processes in /proc, pid of a parent -> the pids of its children; {} where
    there is no /proc."""
    children: dict[int, list[int]] = {}
    if not kernel.LINUX:
        return children
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():  # the folder of a process
            with contextlib.suppress(OSError):  # the process has ended meanwhile
                line = Path(entry.path, "stat").read_bytes()
                # It is "pid (name) state parent ...", and the name may hold any character.
                _state, parent, *_ = line.rpartition(b")")[2].split()
                children.setdefault(int(parent), []).append(int(entry.name))
    return children
