"""GRPO on vLLM, through the worker a user runs, ends where it ends with our own sampler."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from engine.environments import push
from engine.evidence.compare.compare import compare_runs
from engine.home.run_dir import Home
from engine.runs import lifecycle
from engine.runs.submit.requests import EvaluationRequest, TrainRequest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

# pebble can tell which number is larger and says so in one of several styles; the one asked for
# here is not the one it prefers, so there is something to select and a ceiling near 1.
ENVIRONMENT = '''
import random

from envs import Score, SingleTurnEnv, Task

class Larger(SingleTurnEnv):
    """Which of two numbers is larger, said in a sentence."""

    def tasks(self):
        pairs = [(a, b) for a in range(1, 100) for b in range(1, 100) if a != b]
        random.Random(5).shuffle(pairs)
        return [
            Task(f"{a}-{b}", f"Which is larger, {a} or {b}?", answer=f"The answer is {max(a, b)}.",
                 split="heldout" if index < 400 else "train")
            for index, (a, b) in enumerate(pairs[:1200])
        ]

    def score(self, task, completion):
        right = completion == task.answer
        return Score(float(right), success=right)

def load_environment():
    return Larger()
'''
SETTINGS: dict[str, Any] = {
    "steps": 24,
    "learning_rate": 1e-3,
    "eval_every": 12,
    "eval_rows": 400,
    "seed": 1,
}


def finished(home: Home, run_id: str) -> dict[str, Any]:
    deadline = time.monotonic() + 900
    while time.monotonic() < deadline:
        found = lifecycle.wait(home, run_id, timeout_s=45.0)
        if found["state"] in ("done", "failed", "cancelled"):
            assert found["state"] == "done", found
            return found
    pytest.fail(f"{run_id} did not end")


@pytest.fixture
def env(home: Home, tmp_path: Path) -> str:
    folder = tmp_path / "larger"
    folder.mkdir()
    (folder / "environment.py").write_text(ENVIRONMENT)
    return push.push_env(home, str(folder), roots=[tmp_path]).env_id


def metrics(home: Home, run_id: str) -> list[dict[str, Any]]:
    lines = home.run(run_id).metrics.read_text().splitlines()
    return [line for line in map(json.loads, lines) if "sampler_gap_mean" in line]


def test_both_samplers_train_pebble_to_the_same_held_out_success(home, env, vllm_python):
    ended: dict[str, dict[str, Any]] = {}
    for sampler in ("vllm", "torch"):
        asked = SETTINGS | {"sampler": sampler}
        run_id = lifecycle.submit(home, TrainRequest(env_id=env, settings=asked))["run_id"]
        ended[sampler] = finished(home, run_id)
        assert ended[sampler]["verdict"] == "better"
        lines = metrics(home, run_id)
        assert len(lines) > 12 and max(line["sampler_gap_mean"] for line in lines) < 1e-4
        config = json.loads(home.run(run_id).config.read_text())
        assert config["settings"]["sampler"] == sampler
    models = [f"{ended[sampler]['run_id']}@best" for sampler in ("torch", "vllm")]
    evaluation = lifecycle.submit_evaluation(
        home, EvaluationRequest(env_id=env, models=models, rows=400)
    )
    finished(home, evaluation["run_id"])
    compared = compare_runs(home, [evaluation["run_id"]])
    print(compared["summary"])
    assert compared["verdict"] == "no_difference", compared
    log = home.run(ended["vllm"]["run_id"]).vllm_log
    assert "version-24" in log.read_text()  # every step's adapter went there


def test_a_cancel_ends_the_run_and_its_vllm(home, env, vllm_python):
    run_id = lifecycle.submit(
        home, TrainRequest(env_id=env, settings=SETTINGS | {"sampler": "vllm"})
    )["run_id"]
    found = lifecycle.wait(home, run_id, until="first_step", timeout_s=50.0)
    lifecycle.cancel(home, run_id)
    while found["state"] not in ("cancelled", "failed", "done"):
        found = lifecycle.wait(home, run_id, timeout_s=50.0)
    assert found["state"] == "cancelled"
    assert not home.run(run_id).sampled_adapters.exists()
