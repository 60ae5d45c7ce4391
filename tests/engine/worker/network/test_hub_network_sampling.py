"""A model that samples otherwise than it is trained is refused before it trains."""

from typing import Any

import pytest
import torch
from tiny_decoders import VOCAB, tiny
from transformers import AutoConfig, AutoModelForCausalLM

from engine.worker.core.failures import WorkerFailure
from engine.worker.network.hub_network import HubNetwork
from engine.worker.network.sampler import SamplerNeeds

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]

NEEDS = SamplerNeeds(0, [], lambda ids: "")


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
