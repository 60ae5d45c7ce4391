"""Small random decoders of every family the engine's own forward knows, and adapters for them."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from typed_settings import grpo_settings

from engine.worker.network.adapter import LoraSpec
from engine.worker.network.decoder import Decoder
from engine.worker.network.network import DecoderNetwork
from engine.worker.network.policy import Base, Policy

torch.set_num_threads(1)  # on models this small two threads mostly wait for each other

VOCAB = 61
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
    "rope_theta": 500.0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None, "head_dim": 8},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"head_dim": 16, "use_sliding_window": False},
    "smollm3": {"no_rope_layers": [1, 0], "pad_token_id": 0},
    "granite": {
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
        "logits_scaling": 3.0,
    },
    "phi3": {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "olmo2": {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 2, "head_dim": 16},
}
EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LORA: dict[str, Any] = {
    "seed": 5,
    "lora_rank": 3,
    "lora_alpha": 7,
    "lora_dropout": 0.0,
    "lora_targets": "all-linear",
    "gradient_checkpointing": False,
}


def tiny(family: str, *, seed: int = 1, **changes: Any) -> PreTrainedModel:
    """A model of transformers with random weights, norms and biases included."""
    facts = SHAPE | FAMILIES.get(family, {}) | changes
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **facts))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms start at 1 and biases at 0, which hides mistakes
                parameter.add_(0.3 * torch.randn(parameter.shape))
    return model.eval().requires_grad_(False)


def own(model: PreTrainedModel, vocab: int = VOCAB) -> Base:
    """The engine's own forward over `model`, which it consumes; nothing is read from disk."""
    network = DecoderNetwork(Decoder.from_transformers(model), vocab)
    return Base(network, None, [0], Path())  # pyright: ignore[reportArgumentType]


def spec(*targets: str, rank: int = 3, alpha: float = 7, dropout: float = 0.0) -> LoraSpec:
    return LoraSpec(rank, alpha, dropout, targets or ("all-linear",))


def stir(adapter: Any, seed: int = 2, size: float = 0.1) -> Any:
    """Give an adapter weights that matter: B is zero at the start."""
    chance = torch.Generator().manual_seed(seed)
    state = adapter.state()
    adapter.load(
        {name: t + size * torch.randn(t.shape, generator=chance) for name, t in state.items()}
    )
    return adapter


def policy_on(base: Base, *, seed: int = 2, size: float = 0.03, **changes: Any) -> Policy:
    """A policy whose adapter really changes the base."""
    policy = Policy(base, grpo_settings(LORA | changes))
    stir(policy.adapter, seed, size)
    return policy
