"""Deployments on GPUs: served lengths, and memory that sleeping samplers take back."""

from types import SimpleNamespace
from typing import Any

import pytest
from run_configs import train_config

from engine.core import hardware
from engine.core.errors import UserError
from engine.core.files import write_json
from engine.core.hardware import Device, Hardware, driver_version
from engine.dry_run.gpu_plans import MODELS
from engine.home.rows import NewRun
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.machine.fast_paths.results import DeviceResults, PathResult, keep_results
from engine.machine.install import vllm_env
from engine.serving import placement

GIB = 1 << 30


def gpus(monkeypatch: pytest.MonkeyPatch, *sizes: tuple[int, int]) -> None:
    """A machine with GPUs of (memory, free memory) in GiB, where vLLM is set up."""
    found = tuple(
        Device(f"cuda:{i}", "GPU", "cuda", total * GIB, free * GIB, f"GPU-{i}", bf16=True)
        for i, (total, free) in enumerate(sizes)
    )
    machine = Hardware(found, 16, 256 * GIB, 200 * GIB, 999 * GIB)
    monkeypatch.setattr(hardware, "detect", lambda disk=None: machine)
    monkeypatch.setattr(vllm_env, "find_python", lambda home: "/vllm/python")


def model(name: str, context: int = 262_144) -> Any:
    facts = MODELS[name]
    return SimpleNamespace(facts=facts.__class__(**{**vars_of(facts), "max_positions": context}))


def vars_of(facts: Any) -> dict[str, Any]:
    return {name: getattr(facts, name) for name in facts.__dataclass_fields__}


def test_a_long_context_is_served_up_to_the_length_that_fits_its_share(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    gpus(monkeypatch, (80, 79))
    ref = model("Qwen3-4B")
    assert placement.served_length(home, ref) == 16_384
    usual = placement.choose(home, ref, "it")
    # The weights once, and at least a whole sequence of keys and values.
    assert usual.memory_bytes > 2 * ref.facts.params + 16_384 * 2 * 36 * 8 * 128 * 2
    home.config_file.write_text("served_length = 65536")
    assert placement.served_length(home, ref) == 65_536
    assert placement.choose(home, ref, "it").memory_bytes > usual.memory_bytes
    home.config_file.write_text("served_length = 0")
    assert placement.served_length(home, ref) == 262_144


def test_a_sequence_that_does_not_fit_is_refused(home: Home, monkeypatch: pytest.MonkeyPatch):
    gpus(monkeypatch, (24, 23))
    home.config_file.write_text("served_length = 0")
    with pytest.raises(UserError) as caught:
        placement.choose(home, model("Qwen3-4B"), "it")
    assert caught.value.code == "DOES_NOT_FIT"
    home.config_file.write_text("served_length = 8192")
    assert placement.choose(home, model("Qwen3-4B"), "it").device.id == "cuda:0"


def test_memory_that_a_sleeping_sampler_takes_back_is_not_free(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    """The first GPU has most memory free only because its run's sampler sleeps."""
    gpus(monkeypatch, (80, 60), (80, 40))
    with Store(home) as store:
        row = store.insert_run(NewRun("sums", "train", "sft", "e@1", "pebble"), lambda _: None)
        store.lease_next(["cuda:0"])
    config = train_config("sft")
    config["estimate"]["peak_memory"] = config["estimate"]["peak_memory"] | {"total": 70 * GIB}
    run = home.run(row.run_id)
    run.create()
    write_json(run.config, config)
    assert placement.choose(home, model("Qwen3-4B"), "it").device.id == "cuda:1"


def test_vllm_that_was_tried_in_vain_serves_only_where_the_owner_asks_for_it(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    gpus(monkeypatch, (80, 79))
    gpu = hardware.detect().device
    assert placement.engine_for(home, gpu) == "vllm"
    off = PathResult(name="vllm", state="off", reason="it does not wake up")
    known = {"device": gpu.name, "driver": driver_version(), "vllm": vllm_env.version_in(home)}
    keep_results(home, DeviceResults(identity=known, time=1.0, paths=(off,)))
    assert placement.engine_for(home, gpu) == "torch"
    home.config_file.write_text('serve_with = "vllm"')
    assert placement.engine_for(home, gpu) == "vllm"
