"""The queue over a machine with many GPUs on which nothing runs: `make scale` has the long form."""

import threading
from collections import Counter

import pytest
from simulated_gpus import Simulation, World, machine_with

from engine.home.rows import NewRun
from engine.home.store import Store
from engine.home.team.owners import Viewer

pytestmark = pytest.mark.timeout(60)


def test_whatever_dies_and_cannot_be_asked_no_run_is_lost_or_started_twice(home):
    world = World(machine_with(8), faults=0.08)
    simulation = Simulation(home, world)
    owners = [Viewer("ana"), Viewer("bo", priority="high"), Viewer("bo", priority="low")]
    simulation.queue(40, gpus=3, owners=owners)
    simulation.work_off(reap_every=4)
    simulation.check_ends()
    assert world.died and world.unknown and world.killed  # the seed had all of them happen


def test_launchers_that_work_off_a_queue_at_once_start_each_run_once(home):
    simulation = Simulation(home, World(machine_with(8)))
    simulation.queue(16, needs=(12,), owners=[Viewer("ana")])
    simulation.queue(16, needs=(12,), owners=[Viewer("bo")])
    threads = [threading.Thread(target=simulation.decide) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    started = Counter(run_id.partition(".")[0] for run_id in simulation.world.living)
    assert started == {"ana": 4, "bo": 4}  # whose runs were all queued later
    simulation.work_off()
    simulation.check_ends()


def test_a_decision_reads_as_much_of_a_long_queue_as_of_a_short_one(home):
    """Counted in steps of SQLite's machine, which no load of this one changes."""
    steps = [0]

    def count() -> int:
        steps[0] += 1
        return 0

    def cost(store: Store) -> int:
        steps[0] = 0
        store._db.set_progress_handler(count, 10)
        assert store.has_ready() and store.has_queued() and store.waiting_runs() == []
        leased = store.lease_next(["cuda:0", "cuda:1"], elsewhere={"ssh:box": 1})
        assert leased is not None
        store.insert_run(NewRun("new", "train", "sft", "e@1", "pebble"))
        store._db.set_progress_handler(None, 0)
        store.set_state(leased.run_id, "interrupted", only_from={"preparing"})
        return steps[0]

    def queue(store: Store, runs: int) -> None:
        for _ in range(runs):
            store.insert_run(NewRun("long", "train", "sft", "e@1", "pebble"))

    with Store(home) as store:
        queue(store, 30)
        short = cost(store)
        queue(store, 300)
        assert cost(store) <= 1.2 * short
