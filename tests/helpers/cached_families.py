"""Tiny models of families that sample through transformers, with every kind of cache layer."""

from collections.abc import Sequence
from typing import Any

import tiny_families
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.worker.network.sampler import Ending, Row

# A kind of layer each: full, sliding (its window shorter than the answers), chunked attention;
# linear attention; a recurrence beside attention; convolutions; keys and values of low rank.
CACHES = ("qwen2", "gemma3-text", "llama4", "qwen3.5-text", "falcon-h1", "lfm2", "deepseek-v3")
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def cached(name: str) -> Any:
    family = tiny_families.FAMILIES[name]
    torch.manual_seed(4)
    facts = tiny_families.SHAPE | TOKENS | family.changes
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family.model_type, **facts))
    return model.eval().requires_grad_(False)


def answers_of(lengths: Sequence[int]) -> Any:
    """In place of `Ending.append_token`: how long the answer to each prompt is."""

    def take(_: Ending, row: Row, token: int, logprob: float) -> bool:
        row.ids.append(token)
        row.logprobs.append(logprob)
        return len(row.ids) == lengths[row.prompt]

    return take
