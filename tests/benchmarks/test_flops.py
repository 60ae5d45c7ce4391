"""The formulas, by hand, on a model small enough to count on paper.

One layer of width 2, one head of 2, inner width 4, vocabulary 10. Linear weights: q, k, v, o have
2 x 2 each, gate, up, down 2 x 4 each: 4 x 4 + 3 x 8 = 40. A LoRA of rank 1 has 2 + 2 weights on
each of the four and 2 + 4 on each of the three: 16 + 18 = 34.
"""

import pytest

from benchmarks import flops
from benchmarks.cases import SHAPES, Shape

PAPER = Shape(hidden=2, layers=1, heads=1, kv_heads=1, head_dim=2, inner=4, vocab=10)


def test_weights_are_counted_as_on_paper():
    assert flops.linear_weights(PAPER) == 40
    assert flops.adapter_weights(PAPER, 1) == 34
    # embeddings 2 x 10, norms: two of width 2, two per head of 2, the last one of 2
    assert flops.model_weights(PAPER) == 40 + 20 + (4 + 4) + 2


def test_an_sft_step_is_four_n_plus_six_p_per_token_and_the_head_on_supervised_tokens_alone():
    # 3 tokens x (4 x 40 + 6 x 34) + attention 3 x 2 x 2 x 3^2 + head 4 x 2 x 10 x 2
    assert flops.sft_step(PAPER, 1, [3], supervised=2) == 3 * 364 + 108 + 160


def test_attention_grows_with_the_square_of_each_sequence_and_not_of_the_batch():
    assert flops.attention(PAPER, [3, 4], 1) == 2 * 2 * (9 + 16)


def test_a_rollout_reads_a_prompt_once_for_its_group():
    # tokens 3 + 2 x 4; 2 x 40 each; prompt attention 2 x 2 x 9; each of the 8 new tokens attends
    # to 3 + 2 on average, 4 x 2 each; head 2 x 2 x 10 for each of them
    expected = 2 * 40 * 11 + 36 + 4 * 2 * 8 * 5 + 40 * 8
    assert flops.grpo_rollout(PAPER, [3], group=2, new=4) == expected


def test_an_update_runs_a_prompt_once_for_its_group():
    expected = 11 * 364 + 3 * 36 + 3 * 4 * 2 * 8 * 5 + 80 * 8
    assert flops.grpo_update(PAPER, 1, [3], group=2, new=4) == expected


def test_the_decoding_floor_reads_the_weights_and_every_cache_once():
    assert flops.kv_bytes_per_token(PAPER, 2) == 8
    # 70 weights of 2 bytes, 3 rows x 5 tokens x 8 bytes
    assert flops.decode_floor_s(PAPER, rows=3, context=5, bandwidth=26.0) == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("name", "millions"),
    [("tiny", 1.05), ("small", 26.2), ("0.6b", 596), ("1.7b", 1720), ("4b", 4022)],
)
def test_the_shapes_have_the_sizes_they_are_called_by(name, millions):
    assert flops.model_weights(SHAPES[name]) / 1e6 == pytest.approx(millions, rel=0.005)
