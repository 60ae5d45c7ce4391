"""Fixtures every room's tests share: a home of their own, and no process left behind."""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported. Two processes of tests share two cores: their threads would mostly wait
# for each other, and a short run in such a process takes five times as long with two of them.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil
import pytest

from engine.home.run_dir import Home

_PR_SET_CHILD_SUBREAPER = 36
_GRACE_S = 3.0  # what a process that was told to end may take to be gone
_SHARED = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "ray::")


def pytest_configure() -> None:
    _keep_to_own_cores()
    # Detached processes become our children when their parent ends, so none can hide.
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _keep_to_own_cores() -> None:
    """Give each of pytest-xdist's workers, and all that it starts, cores of its own: two trainers
    with a thread on both of two cores take twice as long as each on one."""
    name = os.environ.get("PYTEST_XDIST_WORKER", "")  # such as gw1
    if not name or not hasattr(os, "sched_setaffinity"):
        return
    workers, cores = int(os.environ["PYTEST_XDIST_WORKER_COUNT"]), sorted(os.sched_getaffinity(0))
    share = len(cores) // workers
    if share:
        first = int(name.removeprefix("gw")) * share
        os.sched_setaffinity(0, cores[first : first + share])


def pytest_terminal_summary(terminalreporter) -> None:
    """What tests said about what they did: `record_property("said", ...)`."""
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", []):
                if name == "said" and report.when == "call":
                    terminalreporter.write_line(str(value))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """An empty home in the test's own folder, which is also HONESMITH_HOME."""
    monkeypatch.setenv("HONESMITH_HOME", str(tmp_path / "home"))
    return Home.locate()


@pytest.fixture(autouse=True)
def no_width_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest-xdist tells its workers the width of its own terminal."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(autouse=True)
def no_process_survives() -> Iterator[None]:
    """Fails a test that leaves a process running, and ends that process."""
    before = {process.pid for process in _living()}
    yield
    deadline = time.monotonic() + _GRACE_S
    while survivors := [process for process in _living() if process.pid not in before]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    said = [_describe(process) for process in survivors]
    for process in survivors:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    if said:
        pytest.fail("processes outlived the test: " + "; ".join(said))


def _living() -> list[psutil.Process]:
    """Descendants of this process that run, zombies and Python's own helpers left out."""
    pids = _descendants(os.getpid())
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            helper = any(name in part for part in process.cmdline() for name in _SHARED)
            is_service = b"\0OUTLIVES_TESTS=" in _environment(pid)  # of several tests
            if process.status() != psutil.STATUS_ZOMBIE and not helper and not is_service:
                found.append(process)
    return found


def _environment(pid: int) -> bytes:
    """The variables that a process was started with, where that is shown."""
    with contextlib.suppress(OSError):
        return b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    return b""


def _descendants(pid: int) -> list[int]:
    if sys.platform != "linux":
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    found = []
    for task in _tasks(pid):
        with contextlib.suppress(OSError):
            for child in Path(task, "children").read_text().split():
                found += [int(child), *_descendants(int(child))]
    return found


def _tasks(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return [f"/proc/{pid}/task/{name}" for name in os.listdir(f"/proc/{pid}/task")]
    return []


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:200]}"
    except psutil.NoSuchProcess:
        return f"{process.pid} (gone meanwhile)"
