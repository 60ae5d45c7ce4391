"""The synthetic runs of the evidence tests, in the home every test has."""

import pytest

from engine.machine.processes import launcher
from engine.runs import lifecycle
from tests.engine.evidence.conftest import make_run, rows  # noqa: F401


@pytest.fixture
def busy(bench):
    """A run that holds the device until the test is over."""
    run = bench.start(name="busy", steps=2, hold_at=2)
    bench.until_step(run, 1)
    yield run
    bench.go(run)
    lifecycle.cancel(bench.home, run.id)
    for row in lifecycle.overview(bench.home, "runs")["runs"]:
        lifecycle.cancel(bench.home, row["run_id"])
    bench.until_state(run, "done", "cancelled")
    bench.until(lambda: not launcher.is_alive(run), "the supervisor is gone")
