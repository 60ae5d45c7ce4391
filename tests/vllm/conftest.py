"""Fixtures for tests that run vLLM itself (make vllm): its interpreter, pebble, adapters."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from loops import PEBBLE

from engine.machine.install import vllm_env
from engine.worker.network.adapter import Adapter, LoraSpec, save_adapter
from engine.worker.network.policy import Base, load_base


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    named = os.environ.get(vllm_env.OVERRIDE)
    if not named:
        pytest.fail(f"{vllm_env.OVERRIDE} names no interpreter; run these tests with make vllm")
    return Path(named)


@pytest.fixture(scope="session")
def pebble() -> Base:
    return load_base(PEBBLE, torch.device("cpu"), "float32")


@pytest.fixture(scope="session")
def fill() -> Callable[..., Adapter]:
    """Gives an adapter weights that change what the base says."""

    def filled(adapter: Adapter, seed: int, size: float = 0.05) -> Adapter:
        chance = torch.Generator().manual_seed(seed)
        state = adapter.state()
        for name, tensor in state.items():
            if "lora_B" in name:
                state[name] = size * torch.randn(tensor.shape, generator=chance)
        adapter.load(state)
        return adapter

    return filled


@pytest.fixture(scope="session")
def make_adapter(pebble: Base, fill: Callable[..., Adapter]) -> Callable[..., Adapter]:
    def make(
        seed: int,
        rank: int = 16,
        targets: tuple[str, ...] = ("all-linear",),
        size: float = 0.05,
    ) -> Adapter:
        spec = LoraSpec(rank, 2 * rank, 0.0, targets)
        return fill(pebble.network.new_adapter(spec, seed), seed, size)

    return make


@pytest.fixture(scope="session")
def offline() -> Callable[..., torch.nn.Module]:
    """pebble, or pebble with an adapter saved by us, as transformers and PEFT compute it."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    def load(adapter: Adapter | None = None, folder: Path | None = None) -> torch.nn.Module:
        model = AutoModelForCausalLM.from_pretrained(PEBBLE, dtype=torch.float32)
        if adapter is not None:
            assert folder is not None
            folder.mkdir()
            save_adapter(adapter, folder, "pebble")
            model = PeftModel.from_pretrained(model, str(folder))
        return model.eval()

    return load
