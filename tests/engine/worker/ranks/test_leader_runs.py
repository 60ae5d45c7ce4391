"""Whole small runs in several processes, on pebble: the same run as in one."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from loops import curve, go, metrics, push, rollouts, weights
from shared_runs import CLOSE, helpers, run_of

from engine.core.files import read_json
from engine.home.run_dir import Home, RunDir
from engine.worker import training
from engine.worker.core.failures import WorkerFailure

pytestmark = [pytest.mark.worker, pytest.mark.timeout(90)]


@pytest.fixture
def env_id(home: Home, tmp_path: Path) -> str:
    return push(home, tmp_path / "sums")


# Of runs in one process, which several tests compare with: by algorithm and changes.
CURVES: dict[tuple[str, str], list[dict[str, Any]]] = {}


def curve_alone(home: Home, env_id: str, algorithm: str, **changes: Any) -> list[dict[str, Any]]:
    key = (algorithm, str(changes))
    if key not in CURVES:
        run = run_of(home, env_id, algorithm, 1, **changes)
        go(run)
        CURVES[key] = curve(run)
    return CURVES[key]


def assert_same_curve(
    alone: list[dict[str, Any]], shared: RunDir, close: dict[str, float] = CLOSE
) -> None:
    """Every metric of every step is that of the run in one process, within rounding."""
    for one, many in zip(alone, curve(shared), strict=True):
        # Those of rank 0, which has fewer.
        expected, got = (
            {k: v for k, v in line.items() if k != "microbatches"} for line in (one, many)
        )
        assert got == {
            k: v if v is None else pytest.approx(v, **close) for k, v in expected.items()
        }


@pytest.mark.parametrize(
    ("algorithm", "ranks"),
    [
        *(("grpo", 3), ("sft", 4)),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                *(("sft", 2), ("sft", 3), ("grpo", 2), ("grpo", 4)),
                *(("dpo", 3), ("distill", 2)),
            )
        ),
    ],
)
def test_a_run_on_several_ranks_has_the_curve_of_one(
    home: Home, env_id: str, algorithm: str, ranks: int
) -> None:
    shared = run_of(home, env_id, algorithm, ranks)
    go(shared)
    assert_same_curve(curve_alone(home, env_id, algorithm), shared)
    assert helpers() == []


@pytest.mark.parametrize(
    ("algorithm", "ranks", "changes"),
    [("sft", 3, {}), pytest.param("grpo", 2, {"kl_coef": 0.05}, marks=pytest.mark.long)],
)
def test_a_base_sharded_over_ranks_gives_the_curve_of_a_whole_one(
    home: Home, env_id: str, algorithm: str, ranks: int, changes: dict[str, Any]
) -> None:
    sharded = run_of(home, env_id, algorithm, ranks, shard_base=True, **changes)
    go(sharded)
    alone = curve_alone(home, env_id, algorithm, **changes)  # by our own forward
    assert_same_curve(alone, sharded, {"rel": 1e-4, "abs": 1e-4})
    forward = read_json(sharded.manifest)["forward"]
    assert forward["kind"] == "transformers" and "sharded" in forward["why"]


def test_ranks_that_sample_beside_training_give_the_curve_of_one_process(
    home: Home, env_id: str
) -> None:
    changes = {"async_sampling": True, "steps": 3, "eval_every": 3}
    beside = run_of(home, env_id, "grpo", 4, **changes)  # two train, two sample
    go(beside)
    assert_same_curve(curve_alone(home, env_id, "grpo", **changes), beside)
    stamped = [{row["policy_step"] for row in rollouts(beside, step)} for step in (1, 2, 3)]
    assert stamped == [{0}, {0}, {1}]
    assert [line["export_s"] > 0 for line in metrics(beside)[1:]] == [True] * 3
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


@pytest.mark.long
def test_a_run_that_is_asked_to_stop_saves_and_ends_with_all_ranks(home: Home, env_id: str) -> None:
    run = run_of(home, env_id, "sft", 2, steps=100_000, eval_every=100_000, save_every=100_000)
    trainer, helper = started(run)
    for pid in (helper.pid, trainer.pid):  # as a machine that shuts down asks all of them
        os.kill(pid, signal.SIGTERM)
    assert trainer.wait(60) == 4 and not helper.is_running()
    assert run.latest_checkpoint() is not None


@pytest.mark.parametrize(
    "killed", [pytest.param("the trainer", marks=pytest.mark.long), "another rank"]
)
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
