"""Hours that another machine counts."""

import dataclasses

from engine.executors.attending import hours
from engine.home.store import Store
from engine.machine.processes.limits import held_elsewhere_s
from engine.runs.run_status import status_of


def test_an_attempt_counts_all_of_its_launches_and_what_came_since_the_one_before(bench):
    run = bench.queue()
    assert held_elsewhere_s(run, 1) is None
    hours.note(run, 1, 1, 0.0)
    assert held_elsewhere_s(run, 1) == 0.0  # it waits
    hours.note(run, 1, 1, 40.0)
    hours.note(run, 1, 1, 60.0)
    hours.note(run, 1, 2, 5.0)  # it goes on in another job
    assert held_elsewhere_s(run, 1) == 65.0
    hours.note(run, 2, 2, 25.0)  # everything here died meanwhile
    assert held_elsewhere_s(run, 2) == 20.0
    hours.note(run, 2, 2, 24.0)  # an older look
    hours.note(run, 2, 2, 26.0)
    assert held_elsewhere_s(run, 2) == 21.0
    assert held_elsewhere_s(run, 1) is None


def test_an_attempt_that_has_reached_nobody_yet_costs_nothing(bench):
    run = bench.queue()
    hours.begin(run, 1)
    assert held_elsewhere_s(run, 1) == 0.0
    hours.note(run, 1, 1, 40.0)
    hours.begin(run, 1)  # what looks after it was started again
    assert held_elsewhere_s(run, 1) == 40.0
    hours.begin(run, 2)
    assert held_elsewhere_s(run, 2) == 0.0
    hours.note(run, 2, 1, 50.0)
    assert held_elsewhere_s(run, 2) == 10.0


def test_a_run_that_waits_on_a_cluster_says_so_in_its_status(bench):
    run = bench.queue()
    with Store(bench.home) as store:
        values = {"compute": "slurm:hpc", "state": "preparing"}
        row = dataclasses.replace(store.get_run(run.id), **values)
        hours.note(run, 1, 1, 0.0, "Slurm: Priority")
        warnings = status_of(bench.home, store, row)["warnings"]
        assert "it waits on slurm:hpc: Slurm: Priority" in warnings
        hours.note(run, 1, 1, 2.0)  # it runs
        assert "Slurm" not in str(status_of(bench.home, store, row)["warnings"])
