"""What the other side is told of a run."""

import pytest

from engine.executors import orders
from engine.home.store import Store


def test_the_hours_that_are_left_are_those_of_the_run_its_plan_and_the_home(bench):
    runs = [bench.queue(max_gpu_hours=6.0) for _ in range(2)]
    with Store(bench.home) as store:
        for run in runs:
            store.update_run(run.id, only_in={"queued"}, plan="sums-plan-1", gpus=2)
        store.update_run(runs[0].id, only_in={"queued"}, spent_hours=5.0)
        store.update_run(runs[1].id, only_in={"queued"}, spent_hours=0.5)
        row = store.get_run(runs[1].id)
    assert orders.cap_left(bench.home, row) == pytest.approx(0.5)
    bench.home.config_file.write_text("max_gpu_hours_total = 5.75\n")
    assert orders.cap_left(bench.home, row) == pytest.approx(0.25)


def test_a_run_without_a_cap_has_none_over_there(bench):
    run = bench.queue()
    assert orders.cap_left(bench.home, bench.row(run)) == 0
