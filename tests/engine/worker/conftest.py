"""A base model to test with: pebble itself, or its tokenizer over random weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import PEBBLE, save_random_model
from typed_settings import grpo_settings

from engine.worker.network.policy import Base, Policy, load_base

SETTINGS: dict[str, Any] = {
    "seed": 5,
    "lora_rank": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "lora_targets": "all-linear",
    "gradient_checkpointing": False,
}


@pytest.fixture
def pebble() -> Base:
    """The built-in model, float32 on CPU."""
    return load_base(PEBBLE, torch.device("cpu"), "float32")


@pytest.fixture
def random_model(tmp_path: Path) -> Path:
    """A folder with a random Qwen3 of another size than pebble, and pebble's tokenizer."""
    return save_random_model(tmp_path / "random-qwen3")


@pytest.fixture
def tuned() -> Callable[[Base], Policy]:
    """Wraps a base with an adapter that really changes it."""

    def make(base: Base, **changes: Any) -> Policy:
        policy = Policy(base, grpo_settings(SETTINGS | changes))
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        return policy

    return make
