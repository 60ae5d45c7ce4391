"""Causal attention of short sequences by blocks of queries, for CPUs.

At these lengths torch's CPU kernel computes whole squares of scores, and repeats keys for grouped
queries. Here a block of queries meets only the keys up to its end, and all query heads that share a
key head are computed in one product. That is 1.3 to 1.6 times as fast on 60 to 500 tokens.
"""

# once_differentiable hides the parameters of a backward from the type checker.
# pyright: reportIncompatibleMethodOverride=false

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from engine.models.sizing.layers import ATTENTION_KEPT

BLOCK = 64  # tokens of a block of queries
# Longer sequences go through torch's kernel, because the functions here save probabilities for the
# backward pass, about length * length / 2 of them for each head.
LONGEST = ATTENTION_KEPT


def applies(dtype: torch.dtype, device: torch.device, length: int) -> bool:
    """Whether these functions are used for sequences of this length: in float32 on a CPU, up to
    LONGEST tokens."""
    return dtype == torch.float32 and device.type == "cpu" and length <= LONGEST


class CausalAttention(torch.autograd.Function):
    """softmax(q k^T / sqrt(dim) + causal mask) v for every query head (arXiv 1706.03762), for rows
    of one length. Query heads come in groups that share a key head (arXiv 2305.13245).

    Args of `apply`:
        qkv: [rows, length, heads + 2 kv_heads, dim] float32: queries, keys, values.
        kv_heads: number of key heads; the number of query heads, `heads`, is a multiple of it.

    Returns:
        [rows * length, heads * dim].
    """

    @staticmethod
    def forward(ctx: Any, qkv: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """Compute the causal attention of each row: the output [rows * length, heads * dim] for qkv
        [rows, length, heads + 2 kv_heads, dim] float32, which holds queries, keys, values."""
        out, saved = causal_attention(qkv, kv_heads)
        ctx.save_for_backward(*saved)
        ctx.shape = qkv.shape
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        """Compute the gradient of `qkv` from the gradient `dout` [rows * length, heads * dim] of
        the output; `kv_heads` gets None."""
        return causal_attention_gradient(ctx.saved_tensors, dout, ctx.shape), None


class _Sizes(NamedTuple):
    """The sizes of a tensor of queries, keys and values. `group` query heads share each of the
    `kv_heads` key heads, and every head has `dim` numbers."""

    rows: int
    length: int
    kv_heads: int
    group: int
    dim: int

    @classmethod
    def from_shape(cls, shape: torch.Size, kv_heads: int) -> "_Sizes":
        """Read the sizes from the shape of qkv, [rows, length, heads + 2 kv_heads, dim]."""
        rows, length, all_heads, dim = shape
        group = all_heads // kv_heads - 2  # all_heads is kv_heads * (group + 2)
        return cls(rows, length, kv_heads, group, dim)

    @property
    def heads(self) -> int:
        """The number of query heads."""
        return self.kv_heads * self.group


def causal_attention(qkv: torch.Tensor, kv_heads: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Compute causal attention, softmax(q k^T / sqrt(dim) + mask) v, for rows of one length. qkv
    [rows, length, heads + 2 kv_heads, dim] holds queries, keys, values. Returns (the output [rows *
    length, heads * dim], what `causal_attention_gradient` needs: scaled queries, keys, values and
    the probabilities of each block)."""
    sizes = _Sizes.from_shape(qkv.shape, kv_heads)
    q, k, v = _rows_first(qkv, sizes)
    out, probabilities_by_block = _attention_by_blocks(q, k, v)
    by_token = _from_rows_first(out, sizes).reshape(sizes.rows * sizes.length, -1)
    return by_token, [q, k, v, *probabilities_by_block]


def _rows_first(
    qkv: torch.Tensor, sizes: _Sizes
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split qkv [rows, length, heads + 2 kv_heads, dim] into scaled queries [rows * kv_heads,
    length * group, dim], keys and values (both [rows * kv_heads, length, dim]). The query heads
    that share a key head (a group) stand side by side at each token."""
    rows, length, kv_heads, group, dim = sizes
    q = _scaled(_queries(qkv, sizes).transpose(1, 2))
    k, v = (
        part.transpose(1, 2).reshape(rows * kv_heads, length, dim)
        for part in _keys_and_values(qkv, sizes)
    )
    return q.view(rows * kv_heads, length * group, dim), k, v


def _attention_by_blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Compute causal attention block by block: each block of queries meets only the keys up to its
    end. Returns (the output, shaped like q; the probabilities of each block).

    Args:
        q: [n, length * group, dim], scaled; k, v: [n, length, dim]. n = rows * kv_heads.
    """
    group = q.shape[1] // k.shape[1]
    out = torch.empty_like(q)
    probabilities_by_block = []
    for queries, stop in _blocks(k.shape[1], group):
        probabilities = _block_probabilities(q[:, queries], k[:, :stop], group)
        out[:, queries] = torch.bmm(probabilities, v[:, :stop])
        probabilities_by_block.append(probabilities)
    return out, probabilities_by_block


def _blocks(length: int, group: int) -> list[tuple[slice, int]]:
    """Divide `length` tokens into blocks. Returns for each block (the slice of its queries among
    all queries, the number of tokens up to its end, whose keys the block may see). Each token has
    `group` queries side by side, one for each query head that shares the key head."""
    blocks = []
    for start in range(0, length, BLOCK):
        stop = min(start + BLOCK, length)
        blocks.append((slice(start * group, stop * group), stop))
    return blocks


def _block_probabilities(q: torch.Tensor, k: torch.Tensor, group: int) -> torch.Tensor:
    """Compute the attention probabilities of one block, [n, tokens * group, stop].

    Args:
        q: [n, tokens * group, dim], the block's scaled queries.
        k: [n, stop, dim], the keys up to the block's end.
        group: how many query heads share a key head.
    """
    scores = torch.bmm(q, k.transpose(1, 2))
    tokens = q.shape[1] // group
    # Only the last keys, those of the block itself, can come after a query.
    scores[:, :, -tokens:] += _future_mask(tokens, group)
    return torch.softmax(scores, -1)


def causal_attention_gradient(
    saved: Sequence[torch.Tensor], dout: torch.Tensor, shape: torch.Size
) -> torch.Tensor:
    """Compute the gradient of the argument `qkv` of `causal_attention`, from the gradient `dout` of
    its output. `saved` is the list that `causal_attention` returned, `shape` the shape of qkv."""
    q, k, v, *probabilities_by_block = saved
    sizes = _Sizes.from_shape(shape, kv_heads=k.shape[0] // shape[0])  # k: [rows * kv_heads, ...]
    rows, length, kv_heads, group, dim = sizes
    dout = dout.view(*sizes).transpose(1, 2).reshape(rows * kv_heads, length * group, dim)
    dq, dk, dv = _gradients_by_blocks(q, k, v, probabilities_by_block, dout)
    return _joint_gradient(*(_from_rows_first(x, sizes) for x in (dq, dk, dv)))


def _gradients_by_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    probabilities_by_block: Sequence[torch.Tensor],
    dout: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of q, k and v in `_attention_by_blocks`, each shaped like its tensor,
    from the gradient `dout` of the output, shaped like q.

    The blocks are taken from the last to the first. The last one meets all keys, so it creates the
    gradients of keys and values, and the other blocks add to them.
    """
    length = k.shape[1]
    dq = torch.empty_like(q)
    dk = dv = torch.empty(0)  # replaced by the last block, which comes first
    blocks = list(zip(_blocks(length, q.shape[1] // length), probabilities_by_block, strict=True))
    for (queries, stop), probabilities in reversed(blocks):
        dq[:, queries], block_dk, block_dv = _block_gradients(
            q[:, queries], k[:, :stop], v[:, :stop], probabilities, dout[:, queries]
        )
        if stop == length:  # the last block
            dk, dv = block_dk, block_dv
        else:
            dk[:, :stop] += block_dk
            dv[:, :stop] += block_dv
    return dq, dk, dv


def _block_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    probabilities: torch.Tensor,
    dout: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of a block's queries, and of the keys and values that they see, from
    the gradient `dout` of the block's output. Returns (dq, dk, dv).

    Args:
        q, dout: [n, tokens * group, dim].
        k, v: [n, stop, dim].
        probabilities: [n, tokens * group, stop], the block's.
    """
    dprobabilities = torch.bmm(dout, v.transpose(1, 2))
    dscores = _softmax_gradient(dprobabilities, probabilities)
    dq = torch.bmm(dscores, k)
    dv = torch.bmm(probabilities.transpose(1, 2), dout)
    dk = torch.bmm(dscores.transpose(1, 2), q)
    return dq, dk, dv


def continued_attention(
    prompt: torch.Tensor, qkv: torch.Tensor, kv_heads: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Compute the attention of rows that continue one prompt: each token sees the whole prompt, and
    its own row up to itself. The queries of all rows meet the prompt's keys in one product.

    Args:
        prompt: [prompt length, 2 kv_heads, dim] float32: the prompt's keys and values.
        qkv: [rows, length, heads + 2 kv_heads, dim]: queries, keys, values of the rows.

    Returns (the output [rows * length, heads * dim], what `continued_attention_gradient` needs).
    """
    sizes = _Sizes.from_shape(qkv.shape, kv_heads)
    # Each [kv_heads, prompt length, dim].
    prompt_k, prompt_v = (
        part.transpose(0, 1).contiguous() for part in prompt.split([kv_heads, kv_heads], 1)
    )
    q, k, v = _heads_first(qkv, sizes)
    probabilities = _continued_probabilities(q, k, prompt_k, sizes.group)
    out = _weighted_sum(probabilities, v, prompt_v)
    by_token = _from_heads_first(out, sizes).reshape(sizes.rows * sizes.length, -1)
    saved = [prompt_k, prompt_v, q, k, v, probabilities]
    return by_token, saved


def _heads_first(
    qkv: torch.Tensor, sizes: _Sizes
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split qkv [rows, length, heads + 2 kv_heads, dim] into scaled queries [kv_heads, rows *
    length * group, dim], keys and values (both [kv_heads * rows, length, dim]). Key heads come
    before rows, so that the queries of all rows meet a prompt's keys in one product for each key
    head."""
    rows, length, kv_heads, group, dim = sizes
    q = _scaled(_queries(qkv, sizes).permute(2, 0, 1, 3, 4))
    k, v = (
        part.permute(2, 0, 1, 3).reshape(kv_heads * rows, length, dim)
        for part in _keys_and_values(qkv, sizes)
    )
    return q.view(kv_heads, rows * length * group, dim), k, v


def _continued_probabilities(
    q: torch.Tensor, k: torch.Tensor, prompt_k: torch.Tensor, group: int
) -> torch.Tensor:
    """Compute the attention probabilities of rows that continue one prompt, [kv_heads, rows *
    length * group, prompt length + length]: over the prompt's keys, then over the keys of the
    query's row.

    Args:
        q: [kv_heads, rows * length * group, dim], scaled.
        k: [kv_heads * rows, length, dim]; prompt_k: [kv_heads, prompt length, dim].
    """
    kv_heads, length = prompt_k.shape[0], k.shape[1]
    rows = k.shape[0] // kv_heads
    own_scores = torch.bmm(_by_row(q, rows), k.transpose(1, 2)) + _future_mask(length, group)
    scores = [torch.bmm(q, prompt_k.transpose(1, 2)), own_scores.view(kv_heads, -1, length)]
    return torch.softmax(torch.cat(scores, -1), -1)


def continued_attention_gradient(
    saved: Sequence[torch.Tensor], dout: torch.Tensor, shape: torch.Size
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the gradients of the arguments `prompt` and `qkv` of `continued_attention`, from the
    gradient `dout` of its output. `saved` is the list that `continued_attention` returned, `shape`
    the shape of qkv."""
    prompt_k = saved[0]  # [kv_heads, prompt length, dim]
    kv_heads = prompt_k.shape[0]
    sizes = _Sizes.from_shape(shape, kv_heads)
    # From [rows, length, kv_heads, group, dim], as `_heads_first` orders the queries.
    by_head = dout.view(*sizes).permute(2, 0, 1, 3, 4)
    # With one query head per key head, `reshape` returns a view that is not contiguous.
    dout = by_head.reshape(kv_heads, -1, sizes.dim).contiguous()
    dprompt, *gradients = _gradients_heads_first(saved, dout, sizes.rows)
    return dprompt, _joint_gradient(*(_from_heads_first(x, sizes) for x in gradients))


def _gradients_heads_first(
    saved: Sequence[torch.Tensor], dout: torch.Tensor, rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute four gradients from the gradient `dout` [kv_heads, rows * length * group, dim] of the
    output of `continued_attention`: that of `prompt`, and those of the scaled queries, keys and
    values that `_heads_first` made there, each in its own shape. `saved` is what
    `continued_attention` saved."""
    prompt_k, prompt_v, q, k, v, probabilities = saved  # in the order of `continued_attention`
    dscores = _continued_score_gradient(probabilities, v, prompt_v, dout)
    dq = _weighted_sum(dscores, k, prompt_k)
    dprompt_k, dk = _sums_by_key(dscores, q, prompt_k.shape[1], rows)
    dprompt_v, dv = _sums_by_key(probabilities, dout, prompt_k.shape[1], rows)
    dprompt = torch.cat([dprompt_k.transpose(0, 1), dprompt_v.transpose(0, 1)], 1)
    return dprompt, dq, dk, dv


def _continued_score_gradient(
    probabilities: torch.Tensor, v: torch.Tensor, prompt_v: torch.Tensor, dout: torch.Tensor
) -> torch.Tensor:
    """Compute the gradient of the scores whose softmax is `probabilities` (see
    `_continued_probabilities`), in the same shape, from the gradient `dout` of the output.

    Args:
        v: [kv_heads * rows, length, dim]; prompt_v: [kv_heads, prompt length, dim].
        dout: [kv_heads, rows * length * group, dim].
    """
    kv_heads, length = prompt_v.shape[0], v.shape[1]
    rows = v.shape[0] // kv_heads
    # The gradients of the probabilities of the row's own keys, and of the prompt's keys.
    drow = torch.bmm(_by_row(dout, rows), v.transpose(1, 2))
    dprompt = torch.bmm(dout, prompt_v.transpose(1, 2))
    dprobabilities = torch.cat([dprompt, drow.view(kv_heads, -1, length)], -1)
    return _softmax_gradient(dprobabilities, probabilities)


def _weighted_sum(
    weights: torch.Tensor, row_vectors: torch.Tensor, prompt_vectors: torch.Tensor
) -> torch.Tensor:
    """Compute for each query the weighted sum of one vector per token, over the prompt's tokens and
    its own row's tokens. The vectors are values, or keys in the backward pass.

    Args:
        weights: [kv_heads, rows * length * group, prompt length + length], where `group` query
            heads share a key head.
        row_vectors: those of each row's tokens after the prompt, [kv_heads * rows, length, dim].
        prompt_vectors: those of the prompt's tokens, [kv_heads, prompt length, dim].

    Returns:
        [kv_heads, rows * length * group, dim].
    """
    rows = row_vectors.shape[0] // prompt_vectors.shape[0]
    prompt_weights, row_weights = _split_columns(weights, prompt_vectors.shape[1], rows)
    total = torch.bmm(prompt_weights, prompt_vectors)
    _by_row(total, rows).baddbmm_(row_weights, row_vectors)  # a view, so this adds to `total`
    return total


def _sums_by_key(
    weights: torch.Tensor, x: torch.Tensor, prompt_length: int, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute for each key the sum of x over the queries, each weighted by its weight for this key.
    Returns (sums for the prompt's keys [kv_heads, prompt length, dim], sums for the rows' own keys
    [kv_heads * rows, length, dim]).

    Args:
        weights: [kv_heads, rows * length * group, prompt length + length], of each query for each
            key: the prompt's keys first, then those of the query's own row.
        x: [kv_heads, rows * length * group, dim], a vector for each query.
        rows: how many rows continue the prompt.
    """
    prompt_weights, row_weights = _split_columns(weights, prompt_length, rows)
    prompt_sums = torch.bmm(prompt_weights.transpose(1, 2), x)
    row_sums = torch.bmm(row_weights.transpose(1, 2), _by_row(x, rows))
    return prompt_sums, row_sums


def _joint_gradient(
    dq_by_token: torch.Tensor, dk_by_token: torch.Tensor, dv_by_token: torch.Tensor
) -> torch.Tensor:
    """Put the gradients of queries, keys and values together as the gradient of qkv, [rows, length,
    heads + 2 kv_heads, dim].

    Args:
        dq_by_token: [rows, length, kv_heads, group, dim], the gradient of the scaled queries.
        dk_by_token, dv_by_token: [rows, length, kv_heads, 1, dim].
    """
    sizes = _Sizes(*dq_by_token.shape)
    rows, length, kv_heads, _, dim = sizes
    dqkv = dq_by_token.new_empty((rows, length, sizes.heads + 2 * kv_heads, dim))
    # `_scaled` multiplied the queries by this factor, so their gradient gets it too.
    target = _queries(dqkv, sizes)
    torch.mul(dq_by_token, dim**-0.5, out=target)
    dk, dv = _keys_and_values(dqkv, sizes)
    dk.copy_(dk_by_token[:, :, :, 0])
    dv.copy_(dv_by_token[:, :, :, 0])
    return dqkv


def _queries(qkv: torch.Tensor, sizes: _Sizes) -> torch.Tensor:
    """The queries in qkv [rows, length, heads + 2 kv_heads, dim], as a view [rows, length,
    kv_heads, group, dim]."""
    return qkv[:, :, : sizes.heads].view(*sizes)


def _keys_and_values(qkv: torch.Tensor, sizes: _Sizes) -> Sequence[torch.Tensor]:
    """The keys and the values in qkv [rows, length, heads + 2 kv_heads, dim], as two views [rows,
    length, kv_heads, dim]."""
    return qkv[:, :, sizes.heads :].split(sizes.kv_heads, 2)


def _scaled(queries: torch.Tensor) -> torch.Tensor:
    """Divide the queries [..., dim] by sqrt(dim). The result is contiguous, whatever the strides of
    the input are."""
    out = queries.new_empty(queries.shape)
    return torch.mul(queries, queries.shape[-1] ** -0.5, out=out)


def _by_row(x: torch.Tensor, rows: int) -> torch.Tensor:
    """View x [kv_heads, rows * n, width] as [kv_heads * rows, n, width], so that a batched product
    treats each row by itself."""
    return x.view(x.shape[0] * rows, -1, x.shape[2])


def _split_columns(
    x: torch.Tensor, prompt_length: int, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Split the columns of x [kv_heads, rows * n, prompt length + length], one for each key, into
    two views. x has n queries per row.

    Returns (the columns of the prompt's keys, [kv_heads, rows * n, prompt length]; the columns of
    the rows' own keys, row by row, [kv_heads * rows, n, length]).
    """
    prompt_columns = x[:, :, :prompt_length]
    row_columns = _by_row(x, rows)[:, :, prompt_length:]
    return prompt_columns, row_columns


def _softmax_gradient(gradient: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    """Compute the gradient of scores from `gradient`, that of their softmax over the last
    dimension. `probabilities` is that softmax; all have the same shape."""
    return torch.ops.aten._softmax_backward_data(gradient, probabilities, -1, torch.float32)


def _from_rows_first(x: torch.Tensor, sizes: _Sizes) -> torch.Tensor:
    """View x [rows * kv_heads, length * n, dim] as [rows, length, kv_heads, n, dim]; n is `group`
    for queries and 1 for keys."""
    rows, length, kv_heads, _, dim = sizes
    return x.view(rows, kv_heads, length, -1, dim).transpose(1, 2)


def _from_heads_first(x: torch.Tensor, sizes: _Sizes) -> torch.Tensor:
    """View x, whose numbers stand in the order [kv_heads, rows, length, n, dim], as [rows, length,
    kv_heads, n, dim]; n is `group` for queries and 1 for keys."""
    rows, length, kv_heads, _, dim = sizes
    return x.view(kv_heads, rows, length, -1, dim).permute(1, 2, 0, 3, 4)


@lru_cache(maxsize=256)
def _future_mask(count: int, group: int) -> torch.Tensor:
    """Make the mask that is added to the attention scores within a block of `count` tokens, [count
    * group queries, count keys]: -inf where the key comes after the query, else 0. `group` query
    heads stand side by side at each token. Cached; must not be changed."""
    # The cached mask is also used in training, where torch refuses tensors made in inference mode.
    with torch.inference_mode(False):
        mask = torch.full((count, count), float("-inf")).triu_(1)
        return mask.repeat_interleave(group, 0)
