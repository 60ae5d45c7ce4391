"""Settings as a worker gets them, from the few that a test is about; ranges are not checked."""

from collections.abc import Mapping
from typing import Any

import run_configs

from engine.records.settings import DistillSettings, GRPOSettings, SFTSettings

# What tests of the worker want otherwise than tests that only read a config.
_SMALL: dict[str, Any] = {
    "lora_rank": 4,
    "lora_alpha": 8,
    "lora_targets": ["all-linear"],
    "max_length": 128,
    "seed": 5,
    "eval_rows": 8,
    "precision": "auto",
}
SFT: dict[str, Any] = run_configs.SFT | _SMALL | {"batch_size": 4}
GRPO: dict[str, Any] = run_configs.GRPO | _SMALL
DISTILL: dict[str, Any] = run_configs.DISTILL | _SMALL


def sft_settings(given: Mapping[str, Any]) -> SFTSettings:
    return SFTSettings.model_construct(**SFT).model_copy(update=_listed(given))


def distill_settings(given: Mapping[str, Any]) -> DistillSettings:
    return DistillSettings.model_construct(**DISTILL).model_copy(update=_listed(given))


def grpo_settings(given: Mapping[str, Any]) -> GRPOSettings:
    return GRPOSettings.model_construct(**GRPO).model_copy(update=_listed(given))


def _listed(given: Mapping[str, Any]) -> dict[str, Any]:
    targets = given.get("lora_targets")
    return dict(given) | ({"lora_targets": [targets]} if isinstance(targets, str) else {})
