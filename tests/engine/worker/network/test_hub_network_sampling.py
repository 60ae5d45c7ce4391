"""Sampling through transformers: places are refilled, and a model that samples otherwise than it is
trained is refused before it trains."""

from typing import Any

import pytest
import torch
from cached_families import CACHES, answers_of, cached
from tiny_decoders import VOCAB, tiny
from transformers import AutoConfig, AutoModelForCausalLM

from engine.worker.core.failures import WorkerFailure
from engine.worker.network.hub_network import HubNetwork
from engine.worker.network.sampler import Ending, SamplerNeeds, SamplingParams

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]

NEEDS = SamplerNeeds(0, [], lambda ids: "")


def count_passes(network: HubNetwork, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Keeps (rows, columns) of each pass of the model from now on."""
    passes: list[tuple[int, int]] = []
    forward = network.model.forward

    def counted(*given: Any, **more: Any) -> Any:
        passes.append(tuple(more["attention_mask"].shape))
        return forward(*given, **more)

    monkeypatch.setattr(network.model, "forward", counted)
    return passes


@pytest.mark.parametrize("name", CACHES)
def test_an_answer_is_the_same_whoever_joins_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts join rows that are far along."""
    network = HubNetwork(cached(name), VOCAB, "asked for")
    lengths = [40, 3, 17, 1, 28, 5, 9, 33, 2]
    prompts = [[3 + (7 * n + i) % 30 for i in range(2 + 5 * n % 11)] for n in range(9)]
    sampler = network.sampler(SamplerNeeds(0, [], lambda ids: "", max_rows=3))
    monkeypatch.setattr(Ending, "append_token", answers_of(lengths))
    ended: list[int] = []
    params = SamplingParams(max(lengths), 1.0, seed=2)
    groups = sampler.generate(prompts, 1, params, lambda prompt, *_: ended.append(prompt))
    assert ended.index(8) < ended.index(0), "the first is the longest"
    for prompt, (answer,), length in zip(prompts, groups, lengths, strict=True):
        assert len(answer.ids) == length
        logits = network.logits([*prompt, *answer.ids], None)[len(prompt) - 1 : -1, :VOCAB]
        read = logits.log_softmax(-1).gather(1, torch.tensor(answer.ids)[:, None])[:, 0]
        torch.testing.assert_close(read, torch.tensor(answer.logprobs), rtol=0, atol=1e-4)


def test_a_long_answer_does_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 60 tokens, 24 of 5, in four places. While the long one is written, all others are."""
    network = HubNetwork(cached("gemma3-text"), VOCAB, "asked for")
    sampler = network.sampler(SamplerNeeds(0, [], lambda ids: "", max_rows=4))
    passes = count_passes(network, monkeypatch)
    monkeypatch.setattr(Ending, "append_token", answers_of([60] + [5] * 24))
    groups = sampler.generate([[5, 6, 7]] * 25, 1, SamplingParams(60, 1.0, seed=2))
    assert [len(answer.ids) for (answer,) in groups] == [60, *[5] * 24]
    # 59 steps of the long one, and eight times three prompts that are read.
    assert len(passes) == 59 + 8
    assert max(rows for rows, _ in passes) == 4


def test_columns_that_nobody_sees_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that follow each other without a pause would else stand ever further to the right."""
    network = HubNetwork(cached("gemma3-text"), VOCAB, "asked for")
    sampler = network.sampler(SamplerNeeds(0, [], lambda ids: "", max_rows=2))
    passes = count_passes(network, monkeypatch)
    monkeypatch.setattr(Ending, "append_token", answers_of([12 + n % 2 for n in range(40)]))
    sampler.generate([[5, 6, 7]] * 40, 1, SamplingParams(13, 1.0, seed=2))
    assert len(passes) > 200
    assert max(columns for _, columns in passes) <= 2 * (3 + 13)


def recurrent() -> Any:
    """A model whose recurrent layers keep their state in themselves."""
    torch.manual_seed(4)
    config = AutoConfig.for_model(
        "recurrent_gemma",
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        lru_width=32,
        block_types=["recurrent", "attention"],
        initializer_range=0.3,
    )
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


def test_a_model_that_keeps_its_own_state_is_refused() -> None:
    network = HubNetwork(recurrent(), VOCAB, "asked for")
    with pytest.raises(WorkerFailure) as caught:
        network.sampler(NEEDS)
    assert caught.value.kind == "config"
    assert caught.value.evidence


def test_a_cache_that_forgets_is_refused_with_the_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = HubNetwork(tiny("qwen3"), VOCAB, "asked for")
    forward = network.model.forward

    def forgetful(*ids: Any, **given: Any) -> Any:
        return forward(*ids, **given | {"past_key_values": None, "attention_mask": None})

    monkeypatch.setattr(network.model, "forward", forgetful)
    with pytest.raises(WorkerFailure, match="does not sample") as caught:
        network.sampler(NEEDS)
    assert caught.value.evidence.startswith("log-probabilities differ by ")


def test_a_right_model_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    network = HubNetwork(tiny("qwen3"), VOCAB, "asked for")
    network.sampler(NEEDS)
    monkeypatch.setattr(network, "_check_sampling", None)
    network.sampler(NEEDS)
