"""Ends the server when the agent that started it is gone.

When an agent is killed, its stdio servers notice nothing if another process holds their pipe open.
Only the server ends: runs and deployments are processes in sessions of their own.
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
    """Start a thread that calls `on_death` once the process `parent` has died.

    Returns the thread, which does not keep the process alive.

    Args:
        parent: process id of the parent to watch; None: the parent that this process has now.
        every_s: seconds between two checks.
        on_death: called once, in the thread. By default it ends this process at once: a stdio
            server has nothing to clean up.
    """
    parent_id = os.getppid() if parent is None else parent
    never_set = threading.Event()  # waiting for it with a timeout is a pause

    def call_after_death() -> None:
        """Wait until this process has another parent, then call `on_death`. The system gives a
        process another parent when its parent dies."""
        while os.getppid() == parent_id:
            never_set.wait(every_s)
        on_death()

    thread = threading.Thread(target=call_after_death, name="parent watch", daemon=True)
    thread.start()
    return thread
