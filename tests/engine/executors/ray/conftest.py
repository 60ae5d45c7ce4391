"""What tests of Ray have in common."""

import contextlib
import time
from collections.abc import Iterator

import psutil
import pytest


@pytest.fixture(autouse=True)
def no_process_survives() -> Iterator[None]:
    """Fails a test that leaves a process of ours running. Ray's own outlive a test that starts a
    node again."""
    yield

    def ours() -> list[psutil.Process]:
        found = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                words = process.cmdline()
                if "-P" in words or "-I" in words:  # as everything of ours is started
                    found.append(process)
        return found

    deadline = time.monotonic() + 10
    while ours() and time.monotonic() < deadline:
        time.sleep(0.05)
    left = ours()
    said = [" ".join(process.cmdline())[:200] for process in left]
    for process in left:
        process.kill()
    assert not said
