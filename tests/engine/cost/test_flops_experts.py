"""A mixture of experts computes with the experts a token chooses and holds all of them."""

from dataclasses import replace

import pytest

from engine.cost.flops import update_operations
from engine.models.families import LayerFacts, Projection
from engine.models.model_files import ModelFacts
from engine.models.sizing.layers import LoadedModel

# 1,000 parameters outside the layers; in them 600 of attention and 8 experts of 100 each, of which
# a token runs through two. One of the four layers keeps no keys and values.
DENSE = ModelFacts("X", 8, 4, 2, 1, 4, 16, 32, True, 2400, 64, "bfloat16", 4800)
MIXTURE = replace(
    DENSE,
    inside=LayerFacts(
        (Projection("q_proj", ((8, 8),) * 3),),
        active_params=600 + 2 * 100,
        linear_params=600,
        attention_layers=3,
        layers=4,
    ),
)


def loaded(quantization: str) -> LoadedModel:
    return LoadedModel(MIXTURE, "bfloat16", quantization, lora_rank=2, lora_targets=["q_proj"])


def test_a_token_computes_with_the_experts_it_chooses():
    operations = update_operations(MIXTURE, 0, tokens=10, pairs=0, scored=0)
    assert operations == 10 * 4 * 800


def test_layers_without_attention_attend_to_nothing_and_keep_nothing():
    assert update_operations(MIXTURE, 0, tokens=0, pairs=5, scored=0) == 12 * 5 * 3 * 2 * 4
    assert MIXTURE.cached_numbers == 2 * 3 * 1 * 4


def test_all_experts_are_held():
    assert loaded("none").weights == 2 * 2400
    # Four bits hold linear layers; experts lie in tensors of their own.
    assert loaded("nf4").weights == pytest.approx(0.55 * 600 + 2 * 1800)


def test_an_adapter_counts_where_its_projection_is():
    assert loaded("none").adapter == 3 * 2 * (8 + 8)
