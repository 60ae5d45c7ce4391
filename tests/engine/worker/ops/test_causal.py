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


@pytest.mark.parametrize("group", [1, 2])
def test_rows_behind_a_shared_prompt_are_the_formula_with_its_gradients(group: int) -> None:
    torch.manual_seed(group)
    kv, dim, rows, prompt_length, length = 2, 8, 3, 5, 4
    prompt = torch.randn(prompt_length, 2 * kv, dim)
    qkv = torch.randn(rows, length, (group + 2) * kv, dim)
    direction = torch.randn(rows * length, group * kv * dim)
    ours, saved = causal.continued_attention(prompt, qkv, kv)
    dprompt, dqkv = causal.continued_attention_gradient(saved, direction, qkv.shape)
    # The formula over each row's whole sequence; the prompt's own queries do not matter.
    exact_prompt, exact = (x.double().requires_grad_() for x in (prompt, qkv))
    queries = torch.zeros(prompt_length, group * kv, dim, dtype=torch.double)
    whole = torch.cat([queries, exact_prompt], 1).expand(rows, -1, -1, -1)
    wanted = formula(torch.cat([whole, exact], 1), kv).view(rows, prompt_length + length, -1)
    wanted = wanted[:, prompt_length:].reshape(rows * length, -1)
    torch.testing.assert_close(ours.double(), wanted, rtol=1e-5, atol=1e-6)
    right = torch.autograd.grad(wanted, (exact_prompt, exact), direction.double())
    for gradient, expected in zip((dprompt, dqkv), right, strict=True):
        torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-5)


def test_no_token_is_moved_by_a_later_one() -> None:
    qkv = torch.randn(1, 130, 4, 8)
    changed = qkv.clone()
    changed[:, 100:] += 1.0
    before, after = (causal.CausalAttention.apply(x, 1) for x in (qkv, changed))
    assert torch.equal(before[:100], after[:100])
    assert not torch.equal(before[100], after[100])


def test_only_short_float32_sequences_on_a_cpu_go_this_way() -> None:
    cpu, meta = torch.device("cpu"), torch.device("meta")
    assert causal.applies(torch.float32, cpu, causal.LONGEST)
    assert not causal.applies(torch.float32, cpu, causal.LONGEST + 1)
    assert not causal.applies(torch.bfloat16, cpu, 8)
    assert not causal.applies(torch.float32, meta, 8)


def test_longer_sequences_take_torchs_kernel_and_see_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    heads, kv, dim = 6, 2, 8
    # Prompts of one suffix, of several, of none; an empty suffix; equal and unequal lengths.
    layout = Layout((5, 9, 70, 70, 80), (4, 0, 3, 7, 66, 5, 5), (0, 1, 1, 1, 2, 4, 4))
    assert len(layout.owners) == len(layout.suffix_lengths)
    count = sum(layout.prefix_lengths) + sum(layout.suffix_lengths)
    qkv = torch.randn(count, (heads + 2 * kv) * dim, requires_grad=True)
    direction = torch.randn(count, heads * dim)

    def values_and_gradient() -> tuple[torch.Tensor, torch.Tensor]:
        attention = Attention(layout, heads, kv, torch.device("cpu"), torch.float32)
        values = attention(qkv)
        return values, torch.autograd.grad(values, qkv, direction)[0]

    by_blocks = values_and_gradient()
    monkeypatch.setattr(causal, "LONGEST", 0)
    by_torch = values_and_gradient()
    assert not torch.equal(by_blocks[1], by_torch[1]), "both took the same way"
    for ours, torchs in zip(by_blocks, by_torch, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-5)
