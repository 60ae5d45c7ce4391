"""End the server when the agent that started it is gone.

A host that is killed leaves its stdio servers behind whenever something else holds their pipe
open. Only the server ends: runs and deployments live in sessions of their own.
"""

import os
import threading
from collections.abc import Callable


def watch_parent(
    parent: int | None = None,
    *,
    every_s: float = 1.0,
    on_death: Callable[[], None] = lambda: os._exit(0),
) -> threading.Thread:
    """Call `on_death` once this process has another parent than `parent`.

    Args:
        parent: process id of the parent; default: the present one.
        every_s: seconds between two looks.
        on_death: default: leave at once; a stdio server has nothing to clean up.
    """
    expected = os.getppid() if parent is None else parent
    stopped = threading.Event()

    def look() -> None:
        while os.getppid() == expected:
            stopped.wait(every_s)
        on_death()

    thread = threading.Thread(target=look, name="parent watch", daemon=True)
    thread.start()
    return thread
