"""Ends a process as soon as its supervisor has ended."""

import contextlib
import os
import threading


def end_with_supervisor() -> None:
    """Make this process end as soon as its supervisor ends; do nothing if it has no supervisor."""
    # The descriptor of a pipe whose other end closes when the supervisor ends.
    lifeline = os.environ.get("HONESMITH_LIFELINE_FD")
    if lifeline:
        threading.Thread(target=_exit_with_parent, args=(int(lifeline),), daemon=True).start()


def _exit_with_parent(descriptor: int) -> None:
    """Wait until the supervisor has ended, then end this process at once.

    The supervisor holds the other end of the pipe `descriptor`, which closes when the supervisor
    ends.
    """
    with contextlib.suppress(OSError):
        while os.read(descriptor, 1):  # nothing is ever written; at the end read returns b""
            pass
    os._exit(9)  # without cleaning up; nobody is left to read the status
