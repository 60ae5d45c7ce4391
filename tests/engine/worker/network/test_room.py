"""Estimate, worker and vLLM count the same rows and tokens for one run on one GPU."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.core import hardware
from engine.core.hardware import Hardware
from engine.dry_run.gpu_plans import CHANGES, MODELS, TASKS, machine, plan_task
from engine.machine.install import vllm_env
from engine.machine.processes.vllm_process import Plan
from engine.records.run_config import GRPOConfig, SFTConfig
from engine.worker.core import switched_off
from engine.worker.network import room
from engine.worker.network.sampler import SamplerNeeds
from engine.worker.rollouts import samplers

GIB = 1 << 30
PAIRS = [
    ("Qwen3-0.6B", 12),
    ("Qwen3-4B", 16),
    ("Qwen3-4B", 80),
    ("Qwen3-8B", 24),
    ("Qwen3-8B", 140),
    ("Qwen3-32B", 80),
    ("Qwen3-32B", 180),
]


def base_of(model: str) -> Any:
    """A loaded base of our own forward on a GPU, as far as sizes ask."""
    facts = MODELS[model]
    shape = SimpleNamespace(context=facts.max_positions, vocab=facts.vocab)
    network = SimpleNamespace(
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        forward="own",
        shape=shape,
        capture_why="",
    )
    return SimpleNamespace(network=network, path=Path("/model"), vocab=facts.vocab)


def job_of(task: str, settings: Any) -> Any:
    kind = {"sft": SFTConfig, "grpo": GRPOConfig}[TASKS[task].algorithm]
    base = SimpleNamespace(path="/model", weights_sha256={})
    config = kind.model_construct(settings=settings, base=base, algorithm=TASKS[task].algorithm)
    return SimpleNamespace(config=config, run=SimpleNamespace(home=None))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("model", "memory"), PAIRS)
def test_rows_and_tokens_of_the_estimate_are_those_of_worker_and_vllm(
    model: str, memory: int, task: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(room, "read_facts", lambda path: MODELS[model])
    monkeypatch.setattr(room, "env_facts", lambda *args, **options: TASKS[task].env)
    cell = plan_task(TASKS[task], MODELS[model], machine(memory), CHANGES[1])
    settings, base = cell.plan.settings, base_of(model)
    job = job_of(task, settings)
    size = room.size_of_run(job, base, SimpleNamespace(), memory * GIB)  # pyright: ignore
    assert size.sampler_rows == cell.plan.job.sampler_rows == cell.plan.sampling.rows_at_once
    assert size.microbatch_tokens == cell.plan.job.microbatch_tokens
    assert size.has_server == cell.plan.job.has_server
    if not size.has_server:
        return
    monkeypatch.setattr(vllm_env, "require_python", lambda home: Path("/vllm/python"))
    free = memory * GIB - 10**9
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, memory * GIB))
    needs = SamplerNeeds(0, [1], lambda ids: "", max_rows=size.sampler_rows)
    plan = samplers.run_plan(job, base, needs, size)  # pyright: ignore
    assert plan.rows == cell.plan.job.sampler_rows
    assert plan.memory * memory * GIB == pytest.approx(min(size.server.bytes, free - 3e9))


def test_a_server_beside_training_has_its_gpus_to_itself(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(samplers, "visible_devices", lambda ids: ids.replace("cuda:", "GPU-"))
    cell = plan_task(TASKS["GRPO, 16 x 8, 512 + 512"], MODELS["Qwen3-4B"], machine(80), {})
    shared = Plan(Path("python"), Path("m"), "cuda", "bfloat16", 2048, sleeps=True, memory=0.4)
    size = replace(cell.plan.job, sampling_gpus=2)
    alone = samplers.plan_beside(shared, size, ["cuda:1", "cuda:3"])
    assert alone.visible == "GPU-1,GPU-3" and not alone.sleeps and alone.memory == 0.9
    assert (alone.tensor_parallel, alone.data_parallel) == (1, 2)


def test_a_server_without_room_is_replaced_by_our_own_sampler_with_the_reason():
    cell = plan_task(TASKS["GRPO, 16 x 8, 512 + 512"], MODELS["Qwen3-4B"], machine(80), {})
    settings = cell.plan.settings
    assert settings.sampler == "vllm"  # pyright: ignore
    size = replace(cell.plan.job, memory=20 * GIB)  # others came to hold the rest
    events: list[tuple[Any, ...]] = []
    config = GRPOConfig.model_construct(settings=settings)
    job = SimpleNamespace(config=config, event=lambda *told, **more: events.append(told))
    base = base_of("Qwen3-4B")
    base.network.sampler = lambda needs: "our own"
    assert samplers.make_sampler(job, base, None, size) == "our own"  # pyright: ignore
    ((name, why),) = events
    assert name == "sampler" and "once more" in why
    with switched_off.everything_on():
        switched_off.switch_off({"vllm": "it does not wake up"})
        job.config = GRPOConfig.model_construct(settings=settings)
        assert samplers.make_sampler(job, base, None, cell.plan.job) == "our own"  # pyright: ignore
    assert "switched off on this device: it does not wake up" in events[-1][1]


def test_steps_that_cannot_be_captured_are_told_with_the_reason():
    events: list[tuple[Any, ...]] = []
    config = SFTConfig.model_construct(settings=None)
    job = SimpleNamespace(config=config, event=lambda *told, **more: events.append(told))
    base = base_of("Qwen3-4B")
    base.network.sampler = lambda needs: "our own"
    base.network.capture_why = "a step needs aten.nonzero, for which the host waits"
    assert samplers.make_sampler(job, base, None, None) == "our own"  # pyright: ignore
    ((name, why),) = events
    assert name == "sampler" and why.endswith("not captured: " + base.network.capture_why)


def machine_with(total: int, free: int) -> Hardware:
    found = machine(total)
    return replace(found, devices=(replace(found.device, memory_free=free * GIB),))


def test_what_others_hold_of_a_gpu_is_not_planned_with(monkeypatch: pytest.MonkeyPatch):
    cuda = torch.device("cuda")
    monkeypatch.setattr(room, "detect", lambda: machine_with(80, 30))
    assert room.usable_bytes(cuda) == 30 * GIB
    monkeypatch.setattr(room, "detect", lambda: machine_with(80, 79))
    assert room.usable_bytes(cuda) == 80 * GIB  # a desktop changes no batch of a resumed run
    assert room.usable_bytes(torch.device("cpu")) == machine_with(80, 79).ram_total


def test_a_cpu_counts_the_memory_of_the_machine():
    assert room.usable_bytes(torch.device("cpu")) == hardware.detect().ram_total
