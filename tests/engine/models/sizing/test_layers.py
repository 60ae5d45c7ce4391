"""Bytes of a token: what our own forward keeps of it, held against torch itself at real sizes."""

import pytest
from meta_device import ALL_LINEAR, Kept, batch_of, config_of, network_of, owned_by, rows_of

from engine.models.model_files import ModelFacts
from engine.models.sizing import layers
from engine.models.sizing.layers import LoadedModel

GB = 10**9


def facts_of(size: str) -> ModelFacts:
    """The facts of Qwen3 of this size, as its files would give them."""
    config = config_of(size)
    attention = 2 * config.hidden_size * 128 * (config.num_attention_heads + 8)
    mlp = 3 * config.hidden_size * config.intermediate_size
    params = config.num_hidden_layers * (attention + mlp) + config.vocab_size * config.hidden_size
    return ModelFacts(
        architecture="Qwen3ForCausalLM",
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=8,
        head_dim=128,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        tied=True,
        params=params,
        max_positions=40960,
        dtype="bfloat16",
        weight_bytes=2 * params,
    )


def loaded(size: str) -> LoadedModel:
    facts = facts_of(size)
    return LoadedModel(facts, "bfloat16", "none", ALL_LINEAR.rank, facts.targets)


@pytest.mark.worker
@pytest.mark.timeout(60)
@pytest.mark.parametrize("recomputes", [False, True])
def test_bytes_per_token_are_those_that_torch_keeps(recomputes: bool):
    """4B, forward and backward through the variable-length kernel, on the meta device."""
    network, adapter = network_of("4B")
    batch = batch_of(network, rows_of(prompt=512, answer=513, groups=4, members=1))
    with Kept(owned_by(network, adapter)) as kept:
        logprobs, _ = network.logprobs(batch, adapter, training=True, checkpointing=recomputes)
    logprobs.sum().backward()
    model = facts_of("4B")
    per_layer = layers.kept_numbers_per_layer(model, "cuda", 1024)
    expected = model.layers * (2 * model.hidden if recomputes else per_layer)
    assert kept.bytes / batch.ids.numel() == pytest.approx(2 * expected, rel=0.1)


def test_a_token_takes_least_where_activations_are_computed_again():
    at_once, again = (
        layers.trained_token_bytes(loaded("4B"), "cuda", recomputes=value, length=1024)
        for value in (False, True)
    )
    assert again < at_once / 4
    assert layers.foreign_token_bytes(facts_of("4B"), recomputes=False) > 4 * at_once


def test_a_drawn_token_takes_more_on_a_gpu_whose_logits_are_cast():
    cache, logits = layers.sampled_row_bytes(loaded("4B"), "cuda", 1000)
    assert cache == pytest.approx(1000 * 2 * 36 * 8 * 128 * 2, rel=0.03)
    assert logits == 18 * 151936
    assert layers.sampled_row_bytes(loaded("4B"), "cpu", 1000)[1] == 12 * 151936
