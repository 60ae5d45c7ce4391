"""Runs in several processes of which one does not do what it should."""

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from loops import curve, go, push
from shared_runs import CLOSE, helpers, run_of

from engine.home.run_dir import Home
from engine.machine.processes import programs
from engine.worker.core.failures import WorkerFailure
from engine.worker.ranks import collective, leader

pytestmark = [pytest.mark.worker, pytest.mark.timeout(90)]

# What runs in place of the other ranks: the same, but for one fault on one of them.
RANK = """
import os, sys, threading
from pathlib import Path

from engine.worker.helper import __main__ as helper
import torch
from engine.worker.ranks import collective
from engine.worker.update.supervised import SupervisedPass

def fail_once(*arguments):
    SupervisedPass.run = run
    raise torch.OutOfMemoryError("no room for a test")

run = SupervisedPass.run
if helper.own_rank() == {rank}:
    {fault}
os._exit(helper.main(Path(sys.argv[1])))
"""
Fault = Callable[[int, str], None]


@pytest.fixture
def env_id(home: Home, tmp_path: Path) -> str:
    return push(home, tmp_path / "sums")


@pytest.fixture
def fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fault:
    """Plant a fault, a statement, on a rank of the runs that follow."""

    def plant(rank: int, statement: str) -> None:
        script = tmp_path / "rank.py"
        script.write_text(RANK.format(rank=rank, fault=statement))
        monkeypatch.setenv(programs.STAND_INS, json.dumps({"rank": str(script)}))

    return plant


def test_memory_that_runs_out_on_one_rank_halves_the_microbatches_of_all(
    home: Home, env_id: str, fault: Fault
) -> None:
    alone, shared = (run_of(home, env_id, "sft", n, batch_size=2) for n in (1, 3))
    go(alone)
    fault(2, "SupervisedPass.run = fail_once")
    go(shared)  # two rows on three ranks: one of them has no part of any step
    losses = [[line.get("loss") for line in curve(run)] for run in (alone, shared)]
    assert losses[1][1:] == pytest.approx(losses[0][1:], **CLOSE)
    (event,) = [e for e in map(json.loads, shared.events.open()) if e["event"] == "memory"]
    assert event["evidence"] == "rank 2: no room for a test"


def test_the_failure_is_that_of_the_rank_that_ended_first(
    home: Home, env_id: str, fault: Fault
) -> None:
    """The other one ends too, since it waits for it in a collective call."""
    fault(2, "collective.sum_gradients = lambda parameters: os._exit(7)")
    with pytest.raises(WorkerFailure, match="Rank 2 is gone: its exit status is 7") as failed:
        go(run_of(home, env_id, "sft", 3))
    assert failed.value.kind == "killed" and helpers() == []


def test_a_rank_that_does_not_come_to_a_collective_call_is_named(
    home: Home, env_id: str, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collective, "PATIENCE", timedelta(seconds=4))
    monkeypatch.setattr(leader, "LEAVE_S", 0.5)
    fault(1, "collective.sum_gradients = lambda parameters: threading.Event().wait()")
    with pytest.raises(WorkerFailure, match="Rank 1 did not come") as failed:
        go(run_of(home, env_id, "sft", 2))
    assert failed.value.kind == "stalled" and helpers() == []
