"""Causal attention of short sequences by blocks of queries, for CPUs.

The kernel torch has for CPUs computes whole squares at these lengths and repeats keys for grouped
queries. Here a block of queries meets only the keys up to its end, and all query heads of a key
head stand in one product: 1.3 to 1.6 times as fast on 60 to 500 tokens.
"""

# once_differentiable hides the parameters of a backward from the type checker.
# pyright: reportIncompatibleMethodOverride=false

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from engine.cost.flops import ATTENTION_KEPT

BLOCK = 64  # tokens of a block of queries
# Longer sequences go through torch's kernel: here probabilities are saved for the backward pass,
# about length * length / 2 of them for each head.
LONGEST = ATTENTION_KEPT


def applies(dtype: torch.dtype, device: torch.device, length: int) -> bool:
    """Whether these functions are used for sequences of this length: in float32 on a CPU, up to
    LONGEST tokens."""
    return dtype == torch.float32 and device.type == "cpu" and length <= LONGEST


class CausalAttention(torch.autograd.Function):
    """softmax(q k^T / sqrt(dim) + causal mask) v for every query head (arXiv 1706.03762), query
    heads in groups that share a key head (arXiv 2305.13245), for rows of one length.

    Args of `apply`:
        qkv: [rows, length, heads + 2 kv_heads, dim] float32: queries, keys, values.
        kv_heads: number of key heads; that of query heads, `heads`, is a multiple of it.

    Returns:
        [rows * length, heads * dim].
    """

    @staticmethod
    def forward(ctx: Any, qkv: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """The attention's output [rows * length, heads * dim] for qkv [rows, length, heads + 2
        kv_heads, dim] float32."""
        out, saved = attended(qkv, kv_heads)
        ctx.save_for_backward(*saved)
        ctx.shape = qkv.shape
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        """The gradient of `qkv`, from the gradient `dout` of the output; None for `kv_heads`."""
        return attended_gradient(ctx.saved_tensors, dout, ctx.shape), None


def attended(qkv: torch.Tensor, kv_heads: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """What `CausalAttention` computes, block by block of queries. Each block is multiplied with the
    keys up to its end. Returns (the output, what `attended_gradient` needs: queries, keys, values
    and the probabilities of each block)."""
    rows, length, all_heads, dim = qkv.shape
    group = (all_heads - 2 * kv_heads) // kv_heads  # query heads for each key head
    heads = group * kv_heads
    # Queries, scaled: [rows * kv_heads, length * group, dim], the heads of a group side by side
    # at each token. Keys and values: [rows * kv_heads, length, dim].
    q = qkv.new_empty((rows, kv_heads, length, group, dim))
    queries = qkv[:, :, :heads].view(rows, length, kv_heads, group, dim)
    torch.mul(queries.transpose(1, 2), dim**-0.5, out=q)
    q = q.view(rows * kv_heads, length * group, dim)
    k, v = (
        part.transpose(1, 2).reshape(rows * kv_heads, length, dim)
        for part in qkv[:, :, heads:].split([kv_heads, kv_heads], 2)
    )
    out = torch.empty_like(q)
    probabilities_by_block = []
    for start in range(0, length, BLOCK):
        stop = min(start + BLOCK, length)
        block = slice(start * group, stop * group)
        scores = torch.bmm(q[:, block], k[:, :stop].transpose(1, 2))
        # Only keys within the block itself can come after a query.
        scores[:, :, start:] += _future_mask(stop - start, group)
        probabilities = torch.softmax(scores, -1)
        out[:, block] = torch.bmm(probabilities, v[:, :stop])
        probabilities_by_block.append(probabilities)
    sizes = rows, length, kv_heads, group, dim
    return _rows_by_token(out, sizes), [q, k, v, *probabilities_by_block]


def attended_gradient(
    saved: Sequence[torch.Tensor], dout: torch.Tensor, shape: torch.Size
) -> torch.Tensor:
    """The gradient of `qkv` in `attended`, which had this shape, from the gradient `dout` of the
    output.

    The blocks are taken from the last to the first. The last one meets all keys, so it makes
    the gradients of keys and values, and the other blocks add to them.
    """
    q, k, v, *probabilities_by_block = saved
    rows, length, all_heads, dim = shape
    kv_heads = k.shape[0] // rows
    group = all_heads // kv_heads - 2
    by_group = dout.view(rows, length, kv_heads, group, dim).transpose(1, 2)
    dout = by_group.reshape(rows * kv_heads, length * group, dim)
    dqkv = q.new_empty((rows, length, (group + 2) * kv_heads, dim))
    dq = torch.empty_like(q)
    dk = dv = torch.empty(0)  # replaced by the last block, which comes first
    for block_number in reversed(range(len(probabilities_by_block))):
        start = block_number * BLOCK
        stop = min(start + BLOCK, length)
        block = slice(start * group, stop * group)
        probabilities, grad = probabilities_by_block[block_number], dout[:, block]
        dprobabilities = torch.bmm(grad, v[:, :stop].transpose(1, 2))
        dscores = _softmax_gradient(dprobabilities, probabilities)
        dq[:, block] = torch.bmm(dscores, k[:, :stop])
        block_dv = torch.bmm(probabilities.transpose(1, 2), grad)
        block_dk = torch.bmm(dscores.transpose(1, 2), q[:, block])
        if stop == length:
            dk, dv = block_dk, block_dv
        else:
            dk[:, :stop] += block_dk
            dv[:, :stop] += block_dv
    # Queries were scaled, so their gradient is scaled too.
    heads = group * kv_heads
    target = dqkv[:, :, :heads].view(rows, length, kv_heads, group, dim)
    dq_by_token = dq.view(rows, kv_heads, length, group, dim).transpose(1, 2)
    torch.mul(dq_by_token, dim**-0.5, out=target)
    dqkv[:, :, heads : heads + kv_heads] = dk.view(rows, kv_heads, length, dim).transpose(1, 2)
    dqkv[:, :, heads + kv_heads :] = dv.view(rows, kv_heads, length, dim).transpose(1, 2)
    return dqkv


def continued(
    prompt: torch.Tensor, qkv: torch.Tensor, kv_heads: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Attention of rows that continue one prompt: each token sees the whole prompt, and its own row
    up to itself. The queries of all rows meet the prompt's keys in one product.

    Args:
        prompt: [prompt length, 2 kv_heads, dim] float32: its keys and values.
        qkv: [rows, length, heads + 2 kv_heads, dim]: queries, keys, values of the rows.

    Returns (the output [rows * length, heads * dim], what `continued_gradient` needs).
    """
    rows, length, all_heads, dim = qkv.shape
    group = all_heads // kv_heads - 2
    heads = group * kv_heads
    # The prompt's, each [kv_heads, prompt length, dim].
    prompt_k, prompt_v = (
        part.transpose(0, 1).contiguous() for part in prompt.split([kv_heads, kv_heads], 1)
    )
    q = qkv.new_empty((kv_heads, rows, length, group, dim))
    queries = qkv[:, :, :heads].view(rows, length, kv_heads, group, dim)
    torch.mul(queries.permute(2, 0, 1, 3, 4), dim**-0.5, out=q)
    q = q.view(kv_heads, rows * length * group, dim)
    # The rows' own, each [kv_heads * rows, length, dim].
    k, v = (
        part.permute(2, 0, 1, 3).reshape(kv_heads * rows, length, dim)
        for part in qkv[:, :, heads:].split([kv_heads, kv_heads], 2)
    )
    own_scores = torch.bmm(_by_row(q, rows), k.transpose(1, 2)) + _future_mask(length, group)
    scores = [torch.bmm(q, prompt_k.transpose(1, 2)), own_scores.view(kv_heads, -1, length)]
    probabilities = torch.softmax(torch.cat(scores, -1), -1)
    of_prompt, own = _parts(probabilities, prompt_k.shape[1], rows)
    out = torch.bmm(of_prompt, prompt_v)
    _by_row(out, rows).baddbmm_(own, v)
    by_token = out.view(kv_heads, rows, length, group, dim).permute(1, 2, 0, 3, 4)
    saved = [prompt_k, prompt_v, q, k, v, probabilities]
    return by_token.reshape(rows * length, heads * dim), saved


def continued_gradient(
    saved: Sequence[torch.Tensor], dout: torch.Tensor, shape: torch.Size
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of `prompt` and `qkv` in `continued`, of which qkv had this shape, from the
    gradient `dout` of the output."""
    prompt_k, prompt_v, q, k, v, probabilities = saved
    rows, length, all_heads, dim = shape
    kv_heads, prompt_length, _ = prompt_k.shape
    group = all_heads // kv_heads - 2
    heads = group * kv_heads
    by_head = dout.view(rows, length, kv_heads, group, dim).permute(2, 0, 1, 3, 4)
    dout = by_head.reshape(kv_heads, rows * length * group, dim)
    own_dprobabilities = torch.bmm(_by_row(dout, rows), v.transpose(1, 2))
    dprobabilities = torch.cat(
        [
            torch.bmm(dout, prompt_v.transpose(1, 2)),
            own_dprobabilities.view(kv_heads, -1, length),
        ],
        -1,
    )
    dscores = _softmax_gradient(dprobabilities, probabilities)
    of_prompt, own = _parts(probabilities, prompt_length, rows)
    dof_prompt, down = _parts(dscores, prompt_length, rows)
    dprompt = q.new_empty((prompt_length, 2 * kv_heads, dim))
    dprompt[:, :kv_heads] = torch.bmm(dof_prompt.transpose(1, 2), q).transpose(0, 1)
    dprompt[:, kv_heads:] = torch.bmm(of_prompt.transpose(1, 2), dout).transpose(0, 1)
    dq = torch.bmm(dof_prompt, prompt_k)
    _by_row(dq, rows).baddbmm_(down, k)
    dk = torch.bmm(down.transpose(1, 2), _by_row(q, rows))
    dv = torch.bmm(own.transpose(1, 2), _by_row(dout, rows))
    dqkv = q.new_empty((rows, length, all_heads, dim))
    target = dqkv[:, :, :heads].view(rows, length, kv_heads, group, dim)
    dq_by_token = dq.view(kv_heads, rows, length, group, dim).permute(1, 2, 0, 3, 4)
    torch.mul(dq_by_token, dim**-0.5, out=target)  # queries were scaled
    for first_head, gradient in ((heads, dk), (heads + kv_heads, dv)):
        by_token = gradient.view(kv_heads, rows, length, dim).permute(1, 2, 0, 3)
        dqkv[:, :, first_head : first_head + kv_heads] = by_token
    return dprompt, dqkv


def _by_row(x: torch.Tensor, rows: int) -> torch.Tensor:
    """x [kv_heads, rows * n, ...] as [kv_heads * rows, n, ...], a view."""
    return x.view(x.shape[0] * rows, -1, x.shape[2])


def _parts(x: torch.Tensor, prompt_length: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two views of x [kv_heads, rows * n, prompt length + length]: the part of the prompt, and that
    of each row, [kv_heads * rows, n, length]."""
    own = _by_row(x, rows)[:, :, prompt_length:]
    return x[:, :, :prompt_length], own


def _softmax_gradient(gradient: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    """The gradient of the scores, from that of their softmax over the last dimension."""
    return torch.ops.aten._softmax_backward_data(gradient, probabilities, -1, torch.float32)


def _rows_by_token(x: torch.Tensor, sizes: tuple[int, int, int, int, int]) -> torch.Tensor:
    """Rearrange x [rows * kv_heads, length * group, dim] to [rows * length, heads * dim], all heads
    of a token in one row. `sizes` is (rows, length, kv_heads, group, dim)."""
    rows, length, kv_heads, group, dim = sizes
    by_token = x.view(rows, kv_heads, length, group, dim).transpose(1, 2)
    return by_token.reshape(rows * length, kv_heads * group * dim)


@lru_cache(maxsize=256)
def _future_mask(count: int, group: int) -> torch.Tensor:
    """The mask that is added to the scores of a block of `count` tokens, [count * group, count]:
    -inf where the key comes after the query, else 0. `group` query heads stand side by side at each
    token."""
    # The cached mask is also used in training, which refuses tensors made in inference mode.
    with torch.inference_mode(False):
        mask = torch.full((count, count), float("-inf")).triu_(1)
        return mask.repeat_interleave(group, 0)
