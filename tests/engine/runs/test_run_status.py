"""Where a run stands while it goes on: hours that it has taken, how much is answered."""

import fcntl

import pytest

from engine.core.files import append_line
from engine.home.store import Store
from engine.runs import lifecycle
from engine.runs.submit.requests import EvaluationRequest

pytestmark = pytest.mark.timeout(60)


def test_the_hours_of_a_run_count_while_it_goes_on(bench, env):
    run = bench.start(steps=2, hold_at=2)
    bench.until_step(run, 1)
    bench.until(
        lambda: lifecycle.status(bench.home, run.id)["spent_hours"] > 0, "some time is counted"
    )
    assert bench.row(run).spent_hours == 0
    bench.go(run)
    row = bench.until_state(run, "done")
    status = lifecycle.status(bench.home, run.id)
    assert status["spent_hours"] == pytest.approx(row.spent_hours, abs=1e-5)


def test_an_evaluation_under_way_says_how_much_is_answered(busy, bench, env):
    request = EvaluationRequest(env_id=env, models=["pebble"], rows=500, attempts=2)  # there are 20
    reply = lifecycle.submit_evaluation(bench.home, request)
    assert reply["estimate"]["gpu_hours"] > 0
    run = bench.home.run(reply["run_id"])
    with Store(bench.home) as store:
        assert store.get_run(run.id).estimated_hours == pytest.approx(
            reply["estimate"]["gpu_hours"], abs=1e-4
        )
        assert "percent" not in lifecycle.status(bench.home, run.id)
        lock = launcher_lock(run)
        store.set_state(run.id, "preparing", only_from={"queued"}, device="cuda:7")
        for _ in range(5):
            append_line(run.model_evals(0), {"task": "a"})
        assert lifecycle.status(bench.home, run.id)["percent"] == 12.5
        store.set_state(run.id, "failed", only_from={"preparing"})
    lock.close()


def launcher_lock(run):
    """Hold the run's lock, so that nobody takes it for dead."""
    file = run.lock.open("a")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file
