"""A machine with as many GPUs as a test wants, on which nothing runs: queue, leases, locks and rows
are the real ones, only the supervisors are not started.

Whoever starts runs may die before or after a supervisor is started, runs may die without a word,
and the machine may be impossible to ask; each by chance, from a seed.
"""

import contextlib
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from run_configs import train_config

from engine.core.files import write_json
from engine.core.hardware import Device, Hardware
from engine.core.hints import Hint
from engine.home.rows import OPEN, NewRun, RunRow
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.home.team.owners import Viewer
from engine.machine.processes import launcher, outcome
from engine.machine.processes.local_executor import LocalExecutor

GIB = 1 << 30
# Name of a GPU -> its memory in GiB.
KINDS = {"NVIDIA H200": 141, "NVIDIA A100": 80, "NVIDIA L40S": 48, "NVIDIA A10": 24}


class Died(BaseException):
    """Whoever was starting runs is gone."""


def machine_with(gpus: int) -> Hardware:
    """A machine with GPUs of all kinds."""
    kinds = list(KINDS.items())
    devices = []
    for number in range(gpus):
        name, gib = kinds[number % len(kinds)]
        size = gib * GIB
        devices.append(Device(f"cuda:{number}", name, "cuda", size, size, f"GPU-{number}", True))
    return Hardware(tuple(devices), 64, 512 * GIB, 512 * GIB, 9_999 * GIB)


@dataclass
class World:
    """What is true of the machine, whoever asks.

    Attributes:
        hardware: its GPUs.
        faults: how likely a start dies, a run dies, and an answer does not come, each.
        living: run id -> descriptor of the lock that its supervisor holds, and its GPUs.
        started: (run id, attempt) -> how often it was started.
        held: the GPUs of living runs.
        died, unknown, killed: how often whoever started runs died, nobody could be asked, and a run
            died without a word.
    """

    hardware: Hardware
    faults: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    living: dict[str, tuple[int, list[str]]] = field(default_factory=dict)
    started: Counter[tuple[str, int]] = field(default_factory=Counter)
    held: set[str] = field(default_factory=set)
    alone: threading.Lock = field(default_factory=threading.Lock)
    died: int = 0
    unknown: int = 0
    killed: int = 0

    def strikes(self) -> bool:
        """Whether a fault happens now."""
        return self.rng.random() < self.faults

    def take(self, row: RunRow, lock: int) -> None:
        """Start a run. No GPU is held twice, and no attempt is started twice."""
        with self.alone:
            self.started[row.run_id, row.attempt] += 1
            assert self.started[row.run_id, row.attempt] == 1, f"{row.run_id} was started twice"
            assert row.run_id not in self.living, f"{row.run_id} lives twice"
            assert row.devices and not self.held & set(row.devices), f"{row.devices} are held"
            self.held.update(row.devices)
            self.living[row.run_id] = (os.dup(lock), row.devices)

    def leave(self, run_id: str) -> None:
        """A run is gone, with its lock."""
        with self.alone:
            lock, gpus = self.living.pop(run_id)
            self.held.difference_update(gpus)
        os.close(lock)


class SimulatedGpus(LocalExecutor):
    """The executor of this machine over a world. Only `spawn`, `machine` and `settle` differ."""

    def __init__(self, home: Home, store: Store, world: World) -> None:
        super().__init__(home, store)
        self.world = world

    def machine(self) -> Hardware:
        return self.world.hardware

    def spawn(self, run: RunDir, lock: int) -> None:
        if self.world.strikes():
            self.world.died += 1
            raise Died
        self.world.take(self.store.get_run(run.id), lock)
        if self.world.strikes():
            self.world.died += 1
            raise Died

    def settle(self, run: RunDir) -> bool:
        if self.world.strikes():  # nobody can be asked, which is no failure
            self.world.unknown += 1
            return False
        return super().settle(run)


class Simulation:
    """A home with a queue, and a world that works it off."""

    def __init__(self, home: Home, world: World) -> None:
        self.home, self.world = home, world
        self.decisions: list[float] = []  # seconds that each call of `start_queued` took

    def queue(
        self,
        runs: int,
        gpus: int = 1,
        needs: Sequence[int] = (12, 24, 40, 70),
        owners: Sequence[Viewer] = (Viewer(""),),
    ) -> None:
        """Queue runs, every tenth for several GPUs, that need so many GiB of each; the owners take
        turns."""
        with contextlib.ExitStack() as stack:
            stores = [stack.enter_context(Store(Home(self.home.root, each))) for each in owners]
            for number in range(runs):
                need = self.world.rng.choice(needs) * GIB

                def prepare(run_id: str, need: int = need) -> None:
                    run = self.home.run(run_id)
                    run.create()
                    config = train_config(run_id)
                    config["estimate"] |= {"least_memory": need, "memory_available": need}
                    write_json(run.config, config, fsync=False)

                count = gpus if number % 10 == 0 else 1
                new = NewRun("sums-sft", "train", "sft", "e@1", "pebble", gpus=count)
                stores[number % len(stores)].insert_run(new, prepare)

    def decide(self) -> list[str]:
        """Start what can start, as a process that may die; returns the ids."""
        began = time.perf_counter()
        try:
            with Store(self.home) as store:
                place = SimulatedGpus(self.home, store, self.world)
                return launcher.start_queued(self.home, place)
        except Died:
            return []
        finally:
            self.decisions.append(time.perf_counter() - began)

    def reap(self) -> None:
        """Settle what is dead, as a process that may die."""
        try:
            with Store(self.home) as store:
                launcher.reap(self.home, SimulatedGpus(self.home, store, self.world))
        except Died:
            return

    def end_one(self) -> bool:
        """A run ends: with its result, or without a word. Returns whether any lived."""
        if not self.world.living:
            return False
        run_id = self.world.rng.choice(list(self.world.living))
        run = self.home.run(run_id)
        if self.world.strikes():
            self.world.killed += 1
        else:
            with Store(self.home) as store:
                row = store.get_run(run_id)
                store.set_state(run_id, "running", only_from={"preparing"}, started=time.time())
                end = outcome.Outcome(
                    attempt=row.attempt,
                    rc=0,
                    signal=None,
                    state="done",
                    reason_kind="",
                    reason="",
                    hint=Hint(),
                    verdict="better",
                    last_checkpoint="",
                    elapsed_s=1.0,
                    time=time.time(),
                )
                assert outcome.apply(store, run, row, end)
        self.world.leave(run_id)
        return True

    def work_off(self, reap_every: int = 50) -> None:
        """Until nothing is queued and nothing lives."""
        self.decide()
        rounds = 0
        while True:
            has_ended = self.end_one()
            rounds += 1
            if not has_ended or rounds % reap_every == 0:
                self.reap()
            self.decide()
            if not self.world.living and not self.is_open():
                return

    def check_ends(self) -> None:
        """Every run has ended, once, with its result; or was interrupted too often."""
        with Store(self.home) as store:
            rows = store.list_runs(limit=1_000_000)
            for row in rows:
                if row.state == "failed":
                    assert (row.reason_kind, row.continuations) == ("interrupted", 3), row
                else:
                    assert row.state == "done", row
                assert len([1 for _, _, to in store.history(row.run_id) if to == row.state]) == 1
        attempts = Counter(run_id for run_id, _ in self.world.started)
        assert {row.run_id for row in rows if row.state == "done"} <= set(attempts)
        assert not self.world.living and not self.world.held

    def is_open(self) -> bool:
        """Whether any run has not ended."""
        with Store(self.home) as store:
            return bool(store.list_runs(limit=1, states=OPEN))
