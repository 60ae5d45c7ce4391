"""Runs first in every Python process that a test starts with this folder on PYTHONPATH.

HONESMITH_TEST_CLOCK: a file with the seconds by which the wall clock is off.
HONESMITH_CRASH_AT: the point at which the process is killed (tests/helpers/crash_points.py).
"""

import importlib.util
import os
import time
from pathlib import Path

_FILE, _now = os.environ.get("HONESMITH_TEST_CLOCK", ""), time.time


def _moved() -> float:
    try:
        with open(_FILE) as file:
            return _now() + float(file.read() or 0)
    except (OSError, ValueError):
        return _now()


def _kill_at(label: str) -> None:
    place = Path(__file__).parents[1] / "crash_points.py"
    spec = importlib.util.spec_from_file_location("crash_points", place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.install(label)


if _FILE:
    time.time = _moved
    time.time_ns = lambda: int(_moved() * 1e9)
if _label := os.environ.get("HONESMITH_CRASH_AT", ""):
    _kill_at(_label)
