"""Causal attention by blocks is the formula, values and gradients."""

import math

import pytest
import torch

from engine.worker.ops import causal
from engine.worker.ops.attention import Attention
from engine.worker.ops.packing import Layout


def formula(qkv: torch.Tensor, kv: int) -> torch.Tensor:
    """[rows * length, heads * dim] in the dtype of qkv, one softmax over a full square."""
    rows, length, both, dim = qkv.shape
    heads = both - 2 * kv
    q, k, v = qkv.transpose(1, 2).split([heads, kv, kv], 1)
    k, v = (x.repeat_interleave(heads // kv, 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(dim)
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    out = scores.masked_fill(later, -math.inf).softmax(-1) @ v
    return out.transpose(1, 2).reshape(rows * length, heads * dim)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 150])
@pytest.mark.parametrize("group", [1, 2, 3])
def test_it_is_the_formula_with_its_gradients(group: int, length: int) -> None:
    torch.manual_seed(length)
    kv, dim = 2, 8
    qkv = torch.randn(3, length, (group + 2) * kv, dim, requires_grad=True)
    direction = torch.randn(3 * length, group * kv * dim)
    exact = qkv.detach().double().requires_grad_()
    ours = causal.CausalAttention.apply(qkv, kv)
    wanted = formula(exact, kv)
    torch.testing.assert_close(ours.double(), wanted, rtol=1e-5, atol=1e-6)
    (gradient,) = torch.autograd.grad(ours, qkv, direction)
    (right,) = torch.autograd.grad(wanted, exact, direction.double())
    torch.testing.assert_close(gradient.double(), right, rtol=1e-4, atol=1e-5)


def test_no_token_is_moved_by_a_later_one() -> None:
    qkv = torch.randn(1, 130, 4, 8)
    changed = qkv.clone()
    changed[:, 100:] += 1.0
    before, after = (causal.CausalAttention.apply(x, 1) for x in (qkv, changed))
    assert torch.equal(before[:100], after[:100])
    assert not torch.equal(before[100], after[100])


def test_only_short_float32_sequences_on_a_cpu_go_this_way() -> None:
    assert causal.applies(torch.zeros(1), causal.LONGEST)
    assert not causal.applies(torch.zeros(1), causal.LONGEST + 1)
    assert not causal.applies(torch.zeros(1, dtype=torch.bfloat16), 8)
    assert not causal.applies(torch.zeros(1, device="meta"), 8)


def test_longer_sequences_take_torchs_kernel_and_see_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    heads, kv, dim = 4, 2, 8
    layout = Layout((5, 9, 70, 70), (), ())
    attention = Attention(layout, heads, kv, torch.device("cpu"), torch.float32)
    qkv = torch.randn(sum(layout.prefixes), (heads + 2 * kv) * dim)
    by_blocks = attention(qkv)
    monkeypatch.setattr(causal, "LONGEST", 0)
    torch.testing.assert_close(attention(qkv), by_blocks, rtol=1e-5, atol=1e-6)
