"""Moves the wall clock of a Python process by the seconds in the file HONESMITH_TEST_CLOCK."""

import os
import time

_FILE, _now = os.environ.get("HONESMITH_TEST_CLOCK", ""), time.time


def _moved() -> float:
    try:
        with open(_FILE) as file:
            return _now() + float(file.read() or 0)
    except (OSError, ValueError):
        return _now()


if _FILE:
    time.time = _moved
    time.time_ns = lambda: int(_moved() * 1e9)
