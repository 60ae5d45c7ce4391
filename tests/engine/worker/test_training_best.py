"""Which checkpoint a run names its best where training made the model worse."""

import json
from pathlib import Path
from typing import Any

import pytest
from loops import ENVIRONMENT, go, make_run, push
from safetensors.torch import load_file

from engine.evidence.verdict.verdict import run_verdict
from engine.home.run_dir import Home
from engine.models.catalog import resolve_model

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]

# Every one-digit sum is right that is said at all, and all of them are asked.
LENIENT = ENVIRONMENT.replace("completion == task.answer", "task.answer in completion")
# A rate at which four steps leave nothing of what pebble knows.
RUINOUS: dict[str, Any] = {
    "steps": 4,
    "prompts_per_step": 6,
    "group_size": 4,
    "max_tokens": 20,
    "eval_every": 2,
    "eval_rows": 40,
    "save_every": 2,
    "learning_rate": 0.1,
    "lora_alpha": 256,
    "seed": 3,
}


def test_a_run_that_makes_the_model_worse_has_its_start_as_its_best(
    home: Home, tmp_path: Path
) -> None:
    assert LENIENT != ENVIRONMENT
    env = push(home, tmp_path / "lenient", LENIENT, "lenient")
    run = make_run(home, env, "grpo", RUINOUS)
    result = go(run)
    assert result["verdict"] == "worse" and result["best_step"] in (2, 4)
    best = run.resolve_checkpoint("best")
    assert best == run.checkpoint(0)
    weights = load_file(best / "adapter_model.safetensors")
    assert all(not tensor.any() for name, tensor in weights.items() if "lora_B" in name)
    model = resolve_model(home, f"{run.id}@best")
    assert model.adapter == best
    # The verdict stays that of what was trained, and says with which model to go on.
    again = run_verdict(run).to_json()
    assert again["verdict"] == "worse" and again["go_on_with"] == "pebble"
    events = [json.loads(line) for line in run.events.read_text().splitlines()]
    assert [event["event"] for event in events].count("best_is_start") == 1
    newest = run.latest_checkpoint()
    assert newest is not None and newest == run.checkpoint(4)
