"""A browser, and the synthetic runs of the evidence tests to look at."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Chromium, find_browser

_PLACE = Path(__file__).parents[1] / "engine" / "evidence" / "conftest.py"
_SPEC = importlib.util.spec_from_file_location("evidence_runs", _PLACE)
assert _SPEC is not None and _SPEC.loader is not None
_RUNS = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_RUNS)

home, make_run, rows, learned_run = _RUNS.home, _RUNS.make_run, _RUNS.rows, _RUNS.learned_run


@pytest.fixture
def browser() -> Iterator[Chromium]:
    program = find_browser()
    if not program:
        pytest.fail("no Chromium here: apt-get install chromium, or name one in HONESMITH_CHROMIUM")
    with Chromium(program) as found:
        yield found
