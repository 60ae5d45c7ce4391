"""F17: a damaged checkpoint is set aside, named, and the one before it is used."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from loops import curve, go, make_run, push, weights

from engine.core.files import read_json, write_json
from engine.home.run_dir import Home, RunDir
from engine.worker.core.failures import WorkerFailure

SETTINGS: dict[str, Any] = {
    "steps": 6,
    "batch_size": 4,
    "eval_every": 3,
    "eval_rows": 4,
    "save_every": 2,
    "keep_checkpoints": 3,
    "learning_rate": 1e-3,
    "lora_rank": 4,
    "seed": 3,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Home, str, RunDir]:
    """A finished run: its curve is the reference, its folder what is damaged copies of."""
    home = Home.locate(tmp_path_factory.mktemp("whole") / "home")
    env_id = push(home, tmp_path_factory.mktemp("sums"))
    run = make_run(home, env_id, "sft", SETTINGS, run_id="whole-1")
    go(run)
    return home, env_id, run


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))


DAMAGES = {
    "a flipped bit": (lambda f: flip(f / "adapter_model.safetensors"), "does not match"),
    "a missing shard": (lambda f: (f / "optimizer.safetensors").unlink(), "is missing"),
    "half a file": (
        lambda f: (f / "adapter_model.safetensors").write_bytes(
            (f / "adapter_model.safetensors").read_bytes()[:5000]
        ),
        "does not match",
    ),
    "half a manifest": (lambda f: (f / "MANIFEST.json").write_text('{"run": "x"'), "be read"),
}


def as_of_step_four(whole: RunDir, run_id: str) -> RunDir:
    """A copy of the run as a kill after step 4 left it: checkpoints of 2 and 4."""
    run = whole.home.run(run_id)
    shutil.rmtree(run.path, ignore_errors=True)
    shutil.copytree(whole.path, run.path, symlinks=True)
    shutil.rmtree(run.checkpoint(6))
    run.result.unlink(missing_ok=True)
    lines = run.metrics.read_text().splitlines(keepends=True)
    run.metrics.write_text("".join(lines[:5]))
    config = read_json(run.config)
    write_json(run.config, config | {"run_id": run_id})
    return run


@pytest.mark.parametrize("how", DAMAGES)
def test_f17_a_run_resumes_from_the_newest_sound_checkpoint_and_says_which_was_not(whole, how):
    _, _, reference = whole
    run = as_of_step_four(reference, "damaged-1")
    harm, said = DAMAGES[how]
    harm(run.checkpoint(4))
    go(run)
    events = [json.loads(line) for line in run.events.read_text().splitlines()]
    told = [event for event in events if event["event"] == "checkpoint_damaged"]
    assert [event["checkpoint"] for event in told] == ["step_000004"]
    assert said in told[0]["message"] and "damaged_step_000004" in told[0]["message"]
    assert [e["step"] for e in events if e["event"] == "resumed"][-1] < 4
    assert curve(run) == curve(reference) and weights(run) == weights(reference)
    assert (run.checkpoints / "damaged_step_000004").is_dir()


def test_f17_a_checkpoint_of_another_base_is_refused(whole):
    run = as_of_step_four(whole[2], "foreign-1")
    path = run.checkpoint(4) / "MANIFEST.json"
    manifest = read_json(path)
    assert manifest["base_weights"]
    other = dict.fromkeys(manifest["base_weights"], "0" * 64)
    write_json(path, manifest | {"base_weights": other})
    with pytest.raises(WorkerFailure) as caught:
        go(run)
    assert caught.value.kind == "config" and "other weights" in caught.value.message
