"""Real trainers killed in the middle go on as if nothing had happened."""

import os
import signal
import time
from typing import Any

import pytest

from engine.core.files import last_line, read_json, read_lines
from engine.home.rows import TERMINAL
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.machine.processes import launcher
from engine.runs import lifecycle
from engine.runs.submit.requests import TrainRequest

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]

SETTINGS: dict[str, dict[str, Any]] = {
    "sft": {
        "steps": 12,
        "batch_size": 4,
        "eval_rows": 8,
        "skill_rows": 4,
        "eval_every": 4,
        "save_every": 3,
    },
    "grpo": {
        "steps": 6,
        "prompts_per_step": 2,
        "group_size": 4,
        "max_tokens": 12,
        "eval_rows": 4,
        "skill_rows": 4,
        "eval_every": 3,
        "save_every": 2,
        "temperature": 1.5,
    },
}
CLOCKS = {
    "time",
    "tokens_per_s",
    "sample_s",
    "reward_s",
    "export_s",
    "train_s",
    "mfu",
    "peak_memory",
}


def submit(home: Home, env: str, algorithm: str) -> RunDir:
    settings = SETTINGS[algorithm] | {"learning_rate": 1e-3, "lora_rank": 4}
    said = lifecycle.submit(home, TrainRequest(env_id=env, algorithm=algorithm, settings=settings))
    return home.run(said["run_id"])


def until(holds, what: str, seconds: float = 50.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        if time.monotonic() > deadline:
            pytest.fail(f"waited {seconds} s until {what}")
        time.sleep(0.01)
    return found


def row_of(run: RunDir):
    with Store(run.home) as store:
        return store.get_run(run.id)


def finished(run: RunDir):
    until(lambda: row_of(run).state in TERMINAL and not launcher.is_alive(run), f"{run.id} is over")
    return row_of(run)


def curve(run: RunDir) -> list[dict[str, Any]]:
    """Every metric of every step but the clocks."""
    return [
        {name: value for name, value in row.items() if name not in CLOCKS}
        for row in read_lines(run.metrics)[0]
    ]


def kill_after_step(run: RunDir, step: int, *names: str) -> None:
    """SIGKILL to the processes named in `started.json` once `step` is done."""
    until(lambda: ((last_line(run.metrics) or {}).get("step") or 0) >= step, f"step {step}")
    record = read_json(run.started_record)
    for name in names:
        os.kill(record[name], signal.SIGKILL)
    until(lambda: not launcher.is_alive(run), "nothing of the run lives")


def assert_same_curve(run: RunDir, reference: RunDir) -> None:
    ours, wanted = curve(run), curve(reference)
    assert [row["step"] for row in ours] == [row["step"] for row in wanted]
    for mine, other in zip(ours, wanted, strict=True):
        numbers = {name: value for name, value in other.items() if value is not None}
        assert {k: v for k, v in mine.items() if v is not None} == pytest.approx(
            numbers, rel=1e-5, abs=1e-7
        )


@pytest.fixture(scope="module")
def reference(tmp_path_factory, env_maker):
    """An uninterrupted run of either algorithm, made once when first asked for."""
    home = Home.locate(tmp_path_factory.mktemp("reference"))
    env, made = env_maker(home, "sums"), {}

    def make(algorithm: str) -> RunDir:
        if algorithm not in made:
            made[algorithm] = submit(home, env, algorithm)
            assert finished(made[algorithm]).state == "done", row_of(made[algorithm])
        return made[algorithm]

    return make


@pytest.mark.long  # the other test kills the trainer too
@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_a_killed_trainer_is_resumed_to_the_same_curve(home, env, reference, algorithm):
    steps = SETTINGS[algorithm]["steps"]
    run = submit(home, env, algorithm)
    kill_after_step(run, steps // 2, "trainer_pid")
    row = finished(run)
    assert (row.state, row.reason_kind) == ("failed", "killed")
    assert "signal 9" in row.reason
    saved = run.latest_checkpoint()
    assert saved is not None and saved.name in row.reason
    assert launcher.reap(home) == []  # a killed trainer is not continued by itself
    again = lifecycle.submit(home, TrainRequest(resume=run.id))
    assert again["resumed_from"] == saved.name
    assert (finished(run).state, row_of(run).attempt) == ("done", 2)
    assert_same_curve(run, reference(algorithm))


def test_supervisor_and_trainer_killed_are_continued_to_the_same_curve(home, env, reference):
    run = submit(home, env, "grpo")
    kill_after_step(run, 3, "supervisor_pid", "trainer_pid")
    assert row_of(run).state == "running"  # nobody has touched the home since
    assert launcher.reap(home) == [run.id]
    assert finished(run).state == "done"
    assert (row_of(run).attempt, row_of(run).continuations) == (2, 1)
    assert_same_curve(run, reference("grpo"))
