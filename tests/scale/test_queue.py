"""10,000 queued runs over 1,000 GPUs through the code that starts every run (`make scale`).

Nothing trains: supervisors are not started, everything else is what a home does. Whoever starts
runs dies now and then, runs die without a word, and at times nobody can be asked.
HONESMITH_SCALE_RUNS and HONESMITH_SCALE_GPUS make it smaller.
"""

import json
import os
import resource
import statistics
import time
from collections.abc import Iterator

import psutil
import pytest
from simulated_gpus import Simulation, World, machine_with

from engine.home.store import Store
from engine.home.team.owners import PRIORITIES, Viewer

pytestmark = [pytest.mark.scale, pytest.mark.timeout(7_200)]
RUNS = int(os.environ.get("HONESMITH_SCALE_RUNS", "10000"))
GPUS = int(os.environ.get("HONESMITH_SCALE_GPUS", "1000"))
LENGTHS = [length for length in (100, 1_000, 10_000) if length <= RUNS]
SMALL = (12,)  # GiB: fits on every GPU
MEASURED = 30  # decisions at each length


@pytest.fixture
def many_files() -> Iterator[None]:
    """A lock for each living run is an open file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4 * GPUS + 1_000), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def milliseconds(simulation: Simulation) -> float:
    """CPU time of one decision: a run has ended, and its supervisor starts the next."""
    took = []
    for _ in range(MEASURED):
        assert simulation.end_one()
        began = time.process_time()
        simulation.decide()
        took.append(time.process_time() - began)
    return 1e3 * statistics.median(took)


def test_10_000_runs_over_1_000_gpus(home, many_files, record_property):
    world = World(machine_with(GPUS))
    simulation = Simulation(home, world)
    began = time.process_time()
    simulation.queue(GPUS, needs=SMALL)
    simulation.decide()
    assert len(world.living) == GPUS
    filled_s = time.process_time() - began
    per_decision: dict[int, float] = {}
    for length in LENGTHS:
        with Store(home) as store:
            queued = len(store.queue())
        simulation.queue(length - queued, needs=SMALL)
        per_decision[length] = milliseconds(simulation)
    # Some fit on few of the GPUs, some need several; of many owners.
    owners = [Viewer(f"key{number}", priority=PRIORITIES[number % 3]) for number in range(50)]
    simulation.queue(GPUS // 2, gpus=4, owners=owners)
    per_decision_of_owners = milliseconds(simulation)
    numbers = {
        "gpus": GPUS,
        "filled_s": filled_s,
        "ms_per_decision": per_decision,
        "ms_per_decision_with_50_owners": per_decision_of_owners,
    }
    world.faults = 0.02
    began = time.process_time()
    decisions = len(simulation.decisions)
    simulation.work_off(reap_every=100)
    simulation.check_ends()
    numbers |= {
        "worked_off_s": time.process_time() - began,
        "decisions": len(simulation.decisions) - decisions,
        "starts": len(world.started),
        "starters_died": world.died,
        "runs_died": world.killed,
        "not_answered": world.unknown,
        "memory_mb": psutil.Process().memory_info().rss / 1e6,
        "database_mb": home.db.stat().st_size / 1e6,
    }
    record_property("said", json.dumps(numbers))
    assert per_decision[LENGTHS[-1]] <= 2 * per_decision[LENGTHS[0]]
