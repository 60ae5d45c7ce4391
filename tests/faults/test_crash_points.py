"""F3, F4, F15: kill -9 at every labelled point of a run's life; nothing promised is lost.

The labels stand in tests/helpers/crash_points.py. Those of submit, lease and supervisor are passed
with a trainer that needs no torch, those of the trainer with the real one.
"""

import json
import os
import signal
import subprocess
import sys
from typing import Any

import crash_points
import pytest
from invariants import Witness, assert_same_curve, curve, until
from steady_trainer import expected

from engine.home.rows import TERMINAL
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.machine.processes import launcher
from engine.runs import lifecycle
from engine.runs.submit.requests import TrainRequest
from tests.engine.conftest import add_env

STEADY = {"steps": 8, "save_every": 3}
# Small on purpose: what matters is where it dies, not what it learns.
TORCH: dict[str, dict[str, Any]] = {
    "sft": {
        "steps": 5,
        "batch_size": 4,
        "eval_rows": 4,
        "skill_rows": 4,
        "eval_every": 2,
        "save_every": 1,
        "keep_checkpoints": 1,
        "learning_rate": 1e-3,
        "lora_rank": 4,
    },
    "grpo": {
        "steps": 3,
        "prompts_per_step": 2,
        "group_size": 4,
        "max_tokens": 12,
        "eval_rows": 4,
        "skill_rows": 4,
        "eval_every": 2,
        "save_every": 1,
        "temperature": 1.5,
        "learning_rate": 1e-3,
        "lora_rank": 4,
    },
}
CONTROL = [label for label in crash_points.POINTS if label.split(".")[0] in ("submit", "lease")]
SUPERVISOR = [label for label in crash_points.POINTS if label.startswith("supervise.")]
TRAINER = [
    ("sft", "train.running:1"),
    ("sft", "step.updated:1"),
    ("grpo", "step.updated:2"),
    ("sft", "step.logged:1"),
    ("grpo", "step.logged:2"),
    ("sft", "checkpoint.aside:1"),
    ("grpo", "checkpoint.aside:3"),
    ("sft", "checkpoint.manifest:2"),
    ("sft", "checkpoint.renamed:1"),
    ("sft", "checkpoint.pruning:1"),
    ("sft", "checkpoint.best:1"),
    ("grpo", "finish.examined:1"),
    ("sft", "finish.result:1"),
    ("sft", "finish.sealed:1"),
]


def submit_in_a_process(home: Home, env: str, label: str, settings: dict[str, Any]) -> Any:
    """A server that submits and is gone: exit status, and the run id if it got so far."""
    code = (
        "import json, sys; from engine.runs import lifecycle; "
        "from engine.runs.submit.requests import TrainRequest; "
        "from engine.home.run_dir import Home\n"
        "asked = json.loads(sys.argv[1])\n"
        "print(lifecycle.submit(Home.locate(), TrainRequest(**asked))['run_id'], flush=True)"
    )
    asked = {"env_id": env, "algorithm": "grpo", "settings": settings, "request_id": "r-1"}
    return subprocess.run(
        [sys.executable, "-P", "-c", code, json.dumps(asked)],
        env={**os.environ, **crash_points.variables(label)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def again(home: Home, env: str, settings: dict[str, Any]) -> RunDir:
    """The same request, as a client that got no answer makes it."""
    said = lifecycle.submit(
        home, TrainRequest(env_id=env, algorithm="grpo", settings=settings, request_id="r-1")
    )
    return home.run(said["run_id"])


def finished(run: RunDir) -> Any:
    """The row when nothing of the run lives; whoever looks continues what died."""

    def over() -> bool:
        launcher.reap(run.home)
        with Store(run.home) as store:
            state = store.get_run(run.id).state
        return state in TERMINAL and not launcher.is_alive(run)

    until(over, f"{run.id} is over", 120)
    with Store(run.home) as store:
        return store.get_run(run.id)


def test_every_label_is_one_that_is_passed_here():
    trained = {label.partition(":")[0] for _, label in TRAINER} | {"train.rewound"}
    assert {*CONTROL, *SUPERVISOR, *trained} == set(crash_points.POINTS)


@pytest.mark.parametrize("label", CONTROL)
def test_f1_f25_a_server_killed_at_any_point_of_a_submit_leaves_one_run(home, steady, label):
    done = submit_in_a_process(home, steady, label, STEADY)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert f"crash point {label}" in done.stderr
    witness = Witness(home)
    witness.look()
    run = again(home, steady, STEADY)
    witness.acked["r-1"] = run.id
    row = finished(run)
    assert row.state == "done"
    # A device that was leased and never used, or a lock that nobody gives back, would end it here.
    assert row.attempt == (2 if label == "lease.leased" else 1)
    assert_same_curve(curve(run), expected(STEADY["steps"]))
    witness.over()


@pytest.mark.parametrize("label", SUPERVISOR)
def test_f4_a_supervisor_killed_at_any_point_leaves_a_run_that_is_finished(home, steady, label):
    done = submit_in_a_process(home, steady, label, STEADY)
    assert done.returncode == 0, done.stderr
    run = home.run(done.stdout.strip())
    witness = Witness(home)
    witness.acked["r-1"] = run.id
    until(lambda: not launcher.is_alive(run), "the supervisor is gone")
    assert f"crash point {label}" in run.supervisor_log.read_text()
    witness.settled(run)
    row = finished(run)
    assert row.state == "done"
    assert row.attempt == (1 if label in ("supervise.recorded", "supervise.applied") else 2)
    assert_same_curve(curve(run), expected(STEADY["steps"]))
    witness.over()


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The curve of an uninterrupted run of either algorithm."""
    home = Home.locate(tmp_path_factory.mktemp("reference"))
    env, made = add_env(home, "sums"), {}

    def of(algorithm: str) -> list[dict[str, Any]]:
        if algorithm not in made:
            run = submit_torch(home, env, algorithm)
            assert finished(run).state == "done"
            made[algorithm] = curve(run)
        return made[algorithm]

    return of


def submit_torch(home: Home, env: str, algorithm: str) -> RunDir:
    said = lifecycle.submit(
        home, TrainRequest(env_id=env, algorithm=algorithm, settings=TORCH[algorithm])
    )
    return home.run(said["run_id"])


def die_at(patch: pytest.MonkeyPatch, at: str) -> None:
    """Processes that are started from now on die at the point."""
    for name, value in crash_points.variables(at).items():
        patch.setenv(name, value)


def resume(run: RunDir) -> None:
    lifecycle.submit(run.home, TrainRequest(resume=run.id))


def killed_at(run: RunDir, label: str) -> None:
    """The trainer has died at the label and its supervisor has said so."""
    row = finished(run)
    assert f"crash point {label}" in run.log(row.attempt).read_text()
    assert (row.state, row.reason_kind) == ("failed", "killed") and "signal 9" in row.reason


@pytest.mark.parametrize(("algorithm", "at"), TRAINER)
def test_f3_a_trainer_killed_at_any_point_resumes_to_the_same_curve(
    home, env, reference, monkeypatch, algorithm, at
):
    witness = Witness(home)
    with monkeypatch.context() as patch:
        die_at(patch, at)
        run = submit_torch(home, env, algorithm)
        killed_at(run, at.partition(":")[0])
    witness.settled(run)
    resume(run)
    row = finished(run)
    assert (row.state, row.attempt) == ("done", 2), row
    assert_same_curve(curve(run), reference(algorithm))
    witness.settled(run)
    left = sorted(path.name for path in run.checkpoints.iterdir())
    assert [name for name in left if name.startswith(".")] == []
    best = run.resolve_checkpoint("best")
    assert best is not None and (best / "MANIFEST.json").exists()


def test_f3_a_trainer_killed_while_it_resumes_resumes_again(home, env, reference, monkeypatch):
    with monkeypatch.context() as patch:
        die_at(patch, "step.logged:3")
        run = submit_torch(home, env, "sft")
        killed_at(run, "step.logged")
        die_at(patch, "train.rewound:1")
        witness = Witness(home)
        witness.settled(run)
        resume(run)
        killed_at(run, "train.rewound")
        witness.settled(run)
    resume(run)
    assert (finished(run).state, finished(run).attempt) == ("done", 3)
    assert_same_curve(curve(run), reference("sft"))
    witness.settled(run)
