"""Settings as a worker gets them, from the few that a test is about; ranges are not checked."""

from collections.abc import Mapping
from typing import Any

from engine.records.settings import GRPOSettings, SFTSettings

COMMON: dict[str, Any] = {
    "learning_rate": 1e-3,
    "lr_schedule": "constant",
    "warmup_ratio": 0.0,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "lora_rank": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "lora_targets": ["all-linear"],
    "max_length": 128,
    "seed": 5,
    "eval_every": 2,
    "eval_rows": 8,
    "save_every": 2,
    "keep_checkpoints": 3,
    "max_examples": None,
    "accept_reward_risk": False,
    "gradient_checkpointing": False,
    "precision": "auto",
    "quantization": "none",
    "stop_early": "none",
}
SFT: dict[str, Any] = {
    "epochs": None,
    "steps": 4,
    "batch_size": 4,
    "packing": True,
    "loss_on": "assistant",
}
GRPO: dict[str, Any] = {
    "steps": 4,
    "prompts_per_step": 4,
    "group_size": 4,
    "max_tokens": 16,
    "temperature": 1.0,
    "top_p": 1.0,
    "stop": [],
    "loss": "dapo",
    "advantage": "group_norm",
    "clip_low": 0.2,
    "clip_high": 0.28,
    "kl_coef": 0.0,
    "tis_cap": 2.0,
    "updates_per_batch": 1,
    "resample_uniform": 0,
    "async_sampling": False,
    "thinking": False,
    "thinking_length_penalty": 0.0,
    "max_turns": 1,
    "max_reward_errors": 0.2,
    "sampler": "torch",
}


def sft_settings(given: Mapping[str, Any]) -> SFTSettings:
    return SFTSettings.model_construct(**COMMON, **SFT).model_copy(update=_listed(given))


def grpo_settings(given: Mapping[str, Any]) -> GRPOSettings:
    return GRPOSettings.model_construct(**COMMON, **GRPO).model_copy(update=_listed(given))


def _listed(given: Mapping[str, Any]) -> dict[str, Any]:
    targets = given.get("lora_targets")
    return dict(given) | ({"lora_targets": [targets]} if isinstance(targets, str) else {})
