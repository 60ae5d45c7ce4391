"""Whole small runs in several processes, on pebble: the same run as in one."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from loops import BASE, curve, go, make_run, push, weights

from engine.core.files import read_json
from engine.home.run_dir import Home, RunDir
from engine.worker import training
from engine.worker.core.failures import WorkerFailure

pytestmark = [pytest.mark.worker, pytest.mark.timeout(90)]
# Every rank has an adapter of its own, and all of them the same gradient but for rounding.
CLOSE = {"rel": 1e-5, "abs": 1e-5}


@pytest.fixture
def env_id(home: Home, tmp_path: Path) -> str:
    return push(home, tmp_path / "sums")


# What keeps a run short: two steps, and few and short answers.
SHORT = {"steps": 2, "eval_every": 2, "save_every": 2, "eval_rows": 4, "skill_rows": 0}
SAMPLED = {"prompts_per_step": 4, "group_size": 3, "max_tokens": 12}


def run_of(
    home: Home, env_id: str, algorithm: str, ranks: int, run_id: str = "", **changes: Any
) -> RunDir:
    settings = BASE[algorithm] | SHORT | (SAMPLED if algorithm in ("grpo", "distill") else {})
    settings |= {"gpus": ranks} | changes
    run_id = run_id or f"sums-{algorithm}-{ranks}"
    return make_run(home, env_id, algorithm, settings, run_id=run_id)


def helpers() -> list[psutil.Process]:
    """The other ranks that live below this process."""
    living = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            if "engine.worker.helper" in process.cmdline():
                living.append(process)
    return living


def assert_same_curve(alone: RunDir, shared: RunDir) -> None:
    """Every metric of every step is that of the run in one process, within 1e-5."""
    for one, many in zip(curve(alone), curve(shared), strict=True):
        # Those of rank 0, which has fewer.
        expected, got = (
            {k: v for k, v in line.items() if k != "microbatches"} for line in (one, many)
        )
        assert got == {
            k: v if v is None else pytest.approx(v, **CLOSE) for k, v in expected.items()
        }


@pytest.mark.parametrize(
    ("algorithm", "ranks"),
    [("sft", 2), ("sft", 4), ("grpo", 2), ("grpo", 3), ("dpo", 3), ("distill", 2)],
)
def test_a_run_on_several_ranks_has_the_curve_of_one(
    home: Home, env_id: str, algorithm: str, ranks: int
) -> None:
    alone, shared = (run_of(home, env_id, algorithm, count) for count in (1, ranks))
    go(alone)
    go(shared)
    assert_same_curve(alone, shared)
    assert helpers() == []


def test_a_killed_rank_ends_the_run_which_resumes_with_the_same_curve(
    home: Home, env_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"steps": 4, "eval_every": 4, "save_every": 2}
    undisturbed = run_of(home, env_id, "sft", 2, **changes)
    go(undisturbed)
    disturbed = run_of(home, env_id, "sft", 2, **changes, run_id="sums-sft-9")
    log = training.Training.log

    def kill_after_three(self: training.Training, step: int, *arguments: Any) -> None:
        log(self, step, *arguments)
        if step == 3:
            (helper,) = helpers()
            helper.kill()

    with monkeypatch.context() as patch:
        patch.setattr(training.Training, "log", kill_after_three)
        with pytest.raises(WorkerFailure, match=r"Rank 1 is gone.*signal 9") as failed:
            go(disturbed)
    assert failed.value.kind == "killed" and helpers() == []
    assert disturbed.latest_checkpoint() == disturbed.checkpoint(2)
    go(disturbed)
    assert curve(disturbed) == curve(undisturbed)
    assert weights(disturbed) == weights(undisturbed)


def started(run: RunDir) -> tuple["subprocess.Popen[bytes]", psutil.Process]:
    """The trainer of a run as a process, and its other rank, once that has joined."""
    trainer = subprocess.Popen(
        [sys.executable, "-P", "-m", "engine.worker", str(run.path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not (run.metrics.exists() and run.metrics.read_text()):
        assert trainer.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    (helper,) = helpers()
    return trainer, helper


@pytest.mark.parametrize("killed", ["the trainer", "another rank"])
def test_whichever_process_is_killed_the_other_ends_too(
    home: Home, env_id: str, killed: str
) -> None:
    run = run_of(home, env_id, "sft", 2, steps=100_000, eval_every=100_000, save_every=100_000)
    trainer, helper = started(run)
    os.kill(trainer.pid if killed == "the trainer" else helper.pid, signal.SIGKILL)
    status = trainer.wait(30)
    psutil.wait_procs([helper], timeout=30)
    assert not helper.is_running()
    if killed == "another rank":
        assert status == 3
        assert read_json(run.failure)["kind"] == "killed"
