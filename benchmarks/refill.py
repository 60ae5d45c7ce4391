"""Tokens per processor second of the sampler for models that run through transformers, on answers
of very different lengths: with places refilled as rows end, and in waves, each of which waits for
its longest answer.

    .venv/bin/python -m benchmarks.refill

A random model of Gemma 3's layers (7 M parameters), 32 prompts of 20 to 49 tokens, 4 answers each:
an eighth of them of 384 tokens, the others of 16 to 39. One thread, both in turns.
"""

import time
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from engine.worker.network import hub_sampler
from engine.worker.network.sampler import Ending, Row, SamplerNeeds, SamplingParams

VOCAB, LONG, PROMPTS, ANSWERS, ROUNDS = 4096, 384, 32, 4, 2
NEVER = 2.0  # a share of free places that no batch has


class Uneven(Ending):
    """Ends each row at a length of its own."""

    def append_token(self, row: Row, token: int, logprob: float) -> bool:
        row.ids.append(token)
        row.logprobs.append(logprob)
        is_long = (7 * row.prompt + 3 * row.member) % 8 == 0
        return len(row.ids) >= (LONG if is_long else 16 + (5 * row.prompt + row.member) % 24)


@dataclass(frozen=True)
class Needs(SamplerNeeds):
    """Needs of a sampler whose rows end as `Uneven` says."""

    def ending(self, params: SamplingParams) -> Uneven:
        return Uneven(frozenset(), self.decode, params)


def model_like_gemma() -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gemma3_text",
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        query_pre_attn_scalar=64,
        sliding_window=64,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        max_position_embeddings=4096,
    )
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


def tokens_per_second(model: PreTrainedModel, max_rows: int, refill_share: float) -> float:
    vars(hub_sampler)["REFILL_SHARE"] = refill_share
    needs = Needs(0, [], lambda ids: "", max_rows)
    sampler = hub_sampler.HubSampler(model, needs, VOCAB, lambda adapter: nullcontext())
    prompts = [[1 + (31 * i + 7 * j) % 4000 for j in range(20 + i % 30)] for i in range(PROMPTS)]
    began = time.process_time()
    groups = sampler.generate(prompts, ANSWERS, SamplingParams(LONG, 1.0, seed=3))
    tokens = sum(len(answer.ids) for group in groups for answer in group)
    return tokens / (time.process_time() - began)


def main() -> None:
    torch.set_num_threads(1)
    model = model_like_gemma()
    shares: dict[str, Any] = {"refilled": hub_sampler.REFILL_SHARE, "waves": NEVER}
    for max_rows in (16, 32):
        rates: dict[str, list[float]] = {name: [] for name in shares}
        for _ in range(ROUNDS):
            for name, share in shares.items():
                rates[name].append(tokens_per_second(model, max_rows, share))
        refilled, waves = (median(rates[name]) for name in ("refilled", "waves"))
        print(
            f"{max_rows} rows: {refilled:.0f} tokens/CPU-s refilled, {waves:.0f} in waves, "
            f"ratio {refilled / waves:.2f}"
        )


if __name__ == "__main__":
    main()
