"""Attention over packed sequences (packing.py).

On a CPU, sequences of similar length are padded on the right to one length. Keys come before their
queries, so causal attention never sees that padding. On a GPU one variable-length kernel takes all
sequences without padding.
"""

# once_differentiable hides the parameters of a backward from the type checker.
# pyright: reportIncompatibleMethodOverride=false

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from inspect import signature
from itertools import chain, islice
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from engine.worker.core import switched_off
from engine.worker.core.transfer import to_device
from engine.worker.ops import causal
from engine.worker.ops.kernels import Spread
from engine.worker.ops.packing import (
    Bucket,
    Continuation,
    Layout,
    SuffixBucket,
    continuations,
    prefix_buckets,
    start_offsets,
    suffix_buckets,
)


def varlen_attn(*arguments: Any, grouped: bool, **options: Any) -> Any:
    """Call torch's variable-length attention kernel (torch.nn.attention.varlen.varlen_attn) with
    these `arguments` and `options`; it is imported at the first call.

    Args:
        grouped: whether there are fewer key heads than query heads. It is passed on as
            `enable_gqa` where the kernel has that argument.
    """
    kernel, asks_for_groups = _varlen_kernel()
    if asks_for_groups:
        options["enable_gqa"] = grouped
    return kernel(*arguments, **options)


@lru_cache(maxsize=1)
def _varlen_kernel() -> tuple[Callable[..., Any], bool]:
    """Return (torch's variable-length attention kernel, whether it has the argument `enable_gqa`).

    That argument tells the kernel that there are fewer key heads than query heads. The kernel of
    torch 2.11 lacks it, and finds out by itself.
    """
    # Imported late, because it imports torch's compiler: 75 MB that no CPU run needs.
    from torch.nn.attention.varlen import varlen_attn as kernel  # noqa: PLC0415

    return kernel, "enable_gqa" in signature(kernel).parameters


VARLEN_DTYPES = (torch.bfloat16, torch.float16)  # those that the variable-length kernel takes


class Attention:
    """Attention over one packed microbatch: each token sees its own sequence up to itself. The plan
    is made once for a device, and all layers use it."""

    def __init__(
        self,
        layout: Layout,
        heads: int,
        kv_heads: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        varlen: bool | None = None,
    ) -> None:
        """Plan what all layers share. There are three ways to compute: by the variable-length
        kernel (on a GPU), by blocks of queries (on a CPU, if all rows are short), or by torch's
        kernel over buckets of sequences padded to one length.

        Args:
            layout: the lengths of the packed sequences, and which prefix each suffix continues.
            heads, kv_heads: numbers of query heads, and of key and value heads (grouped queries,
                arXiv 2305.13245).
            dtype: of queries, keys and values.
            varlen: whether to use the variable-length kernel. None: it is used on a GPU, for the
                two number formats that it takes, unless it is switched off.
        """
        self.heads, self.kv_heads = heads, kv_heads
        self.grouped = heads != kv_heads
        self.device = device
        if varlen is None:
            varlen = _takes_varlen(device, dtype)
        self.varlen_plan = None  # set if the variable-length kernel is used
        self.takes_blocks = not switched_off.is_off("block_attention")
        self.by_blocks = not varlen and self.takes_blocks and _fits_blocks(layout, device, dtype)
        if varlen:
            self.varlen_plan = VarlenPlan.for_layout(layout, device)
        elif self.by_blocks:
            self.prefixes, self.continuations = _block_plan(layout)
        else:
            self.prefixes, self.suffixes = _buckets(layout, device)

    def __call__(self, qkv: torch.Tensor) -> torch.Tensor:
        """Compute the attention's output [N, heads * dim] for N packed tokens in the order of
        the layout. qkv [N, (heads + 2 kv_heads) * dim] holds rotated queries, rotated keys, and
        values."""
        shaped = qkv.view(qkv.shape[0], self.heads + 2 * self.kv_heads, -1)
        if self.varlen_plan is not None:
            return self._attend_varlen(shaped, self.varlen_plan)
        if self.by_blocks:
            return BlockAttention.apply(shaped, self.prefixes, self.continuations, self.kv_heads)
        outputs = [self._attended_prefixes(shaped, bucket) for bucket in self.prefixes]
        outputs += [self._attended_suffixes(shaped, bucket) for bucket in self.suffixes]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend_varlen(self, qkv: torch.Tensor, plan: "VarlenPlan") -> torch.Tensor:
        """Compute the attention of all sequences by one call of the variable-length kernel. qkv is
        [N, heads + 2 kv_heads, dim]; returns [N, heads * dim]."""
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        if plan.keys is not None:  # keys of a shared prefix are repeated for each suffix
            k, v = k.index_select(0, plan.keys), v.index_select(0, plan.keys)
        out = varlen_attn(
            q,
            k,
            v,
            plan.query_starts,
            plan.key_starts,
            plan.longest_query,
            plan.longest_key,
            window_size=(-1, 0),  # causal, aligned at the end: a suffix sees its whole prefix
            grouped=self.grouped,
        )
        assert isinstance(out, torch.Tensor)  # the kernel returns a tuple only if asked to
        return out.reshape(out.shape[0], -1)

    def _attended_prefixes(self, qkv: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        """Compute the attention's output for a bucket of prefixes (sequences of similar length,
        which are padded to one length here): [tokens of the bucket, heads * dim]. Each token sees
        its own sequence up to itself. qkv is [N, heads + 2 kv_heads, dim]."""
        padded = _take_padded(qkv, bucket)  # [rows, length, heads + 2 kv_heads, dim]
        if self.takes_blocks and causal.applies(padded.dtype, padded.device, bucket.length):
            out = causal.CausalAttention.apply(padded, self.kv_heads)
            return _without_padding(out, bucket)
        by_head = padded.transpose(1, 2)
        q, k, v = by_head.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return _pack_output(out, bucket)

    def _attended_suffixes(self, qkv: torch.Tensor, bucket: SuffixBucket) -> torch.Tensor:
        """Compute the attention's output for a bucket of suffixes (sequences of similar length,
        which are padded to one length here): [tokens of the bucket, heads * dim]. Each token sees
        the whole prefix of its suffix, and the suffix up to itself. qkv is [N, heads + 2 kv_heads,
        dim]."""
        # Queries, keys and values of the suffixes: each [suffixes, length, heads or kv_heads, dim].
        suffixes = bucket.suffixes
        padded = _take_padded(qkv, suffixes)
        q, k, v = padded.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        prefix_keys_and_values = self._prefix_keys_and_values(qkv, bucket)
        own_keys_and_values = torch.cat([k, v], 2)
        # For each suffix the keys and values of its prefix, then its own:
        # [suffixes, 2 kv_heads, tokens, dim].
        keys_and_values = torch.cat([prefix_keys_and_values, own_keys_and_values], 1)
        keys_and_values = keys_and_values.transpose(1, 2)
        keys, values = keys_and_values.split([self.kv_heads, self.kv_heads], dim=1)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), keys, values, attn_mask=bucket.mask, enable_gqa=self.grouped
        )
        return _pack_output(out, suffixes)

    def _prefix_keys_and_values(self, qkv: torch.Tensor, bucket: SuffixBucket) -> torch.Tensor:
        """Gather for each suffix of a bucket the keys and values of its prefix, all prefixes padded
        to one length at their end: [suffixes, prefix_length, 2 kv_heads, dim]. qkv is [N, heads + 2
        kv_heads, dim]."""
        shared = qkv[:, self.heads :].index_select(0, bucket.prefix_rows)
        if bucket.prefix_scatter_index is not None:  # None: all prefixes are equally long
            size = bucket.prefix_count * bucket.prefix_length
            shared = Spread.apply(shared, bucket.prefix_scatter_index, size)
        shared = shared.view(bucket.prefix_count, bucket.prefix_length, 2 * self.kv_heads, -1)
        # A prefix is repeated for each of its suffixes.
        shared = shared.index_select(0, bucket.owner)
        return shared


class BlockAttention(torch.autograd.Function):
    """Attention over packed sequences, all of them short, by the functions of causal.py.

    Args of `apply`:
        qkv: [N, heads + 2 kv_heads, dim] float32: rotated queries and keys, and values.
        prefixes, suffixes: the places of the sequences among the N tokens, in buckets.
        kv_heads: number of key heads.

    Returns:
        [N, heads * dim].
    """

    @staticmethod
    def forward(
        ctx: Any,
        qkv: torch.Tensor,
        prefixes: Sequence[Bucket],
        suffixes: Sequence[Continuation],
        kv_heads: int,
    ) -> torch.Tensor:
        """Compute the attention's output [N, heads * dim] for qkv [N, heads + 2 kv_heads, dim],
        bucket by bucket. The tensors that the backward pass needs of each bucket are saved in one
        list; `ctx.counts` says how many of them belong to each bucket."""
        heads = qkv.shape[1] - 2 * kv_heads
        out = qkv.new_empty((qkv.shape[0], heads * qkv.shape[2]))
        saved_by_bucket: list[list[torch.Tensor]] = []
        for bucket, attended, saved in _attended_by_bucket(qkv, prefixes, suffixes, kv_heads):
            _write_unpadded(attended, bucket, out)
            saved_by_bucket.append(saved)
        ctx.save_for_backward(*chain.from_iterable(saved_by_bucket))
        ctx.counts = [len(saved) for saved in saved_by_bucket]
        ctx.shape, ctx.heads = qkv.shape, heads
        ctx.prefixes, ctx.suffixes = prefixes, suffixes
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        """Compute the gradient of qkv from the gradient `dout` of the output; the other arguments
        get None. Every token belongs to one bucket, which writes its gradient. Then the suffixes of
        a prompt add to the gradients of the prompt's keys and values."""
        saved_by_bucket = _split_by_counts(ctx.saved_tensors, ctx.counts)
        dqkv = dout.new_empty(ctx.shape)
        for bucket in ctx.prefixes:
            dpadded = causal.causal_attention_gradient(
                next(saved_by_bucket), _take_padded(dout, bucket), _qkv_shape(bucket, dqkv)
            )
            _write_unpadded(dpadded.flatten(0, 1), bucket, dqkv)
        for continuation in ctx.suffixes:
            bucket = continuation.suffixes
            dprompt, dpadded = causal.continued_attention_gradient(
                next(saved_by_bucket), _take_padded(dout, bucket), _qkv_shape(bucket, dqkv)
            )
            _write_unpadded(dpadded.flatten(0, 1), bucket, dqkv)
            dqkv[continuation.start : continuation.stop, ctx.heads :] += dprompt
        return dqkv, None, None, None


def _attended_by_bucket(
    qkv: torch.Tensor,
    prefixes: Sequence[Bucket],
    suffixes: Sequence[Continuation],
    kv_heads: int,
) -> Iterator[tuple[Bucket, torch.Tensor, list[torch.Tensor]]]:
    """Compute the attention of each bucket of prefixes, then of the suffixes of each prompt. Yields
    for each: the bucket (sequences padded to one length); its output [rows * length, heads * dim],
    padding included; the tensors that its gradient needs. qkv is [N, heads + 2 kv_heads, dim]."""
    heads = qkv.shape[1] - 2 * kv_heads
    for bucket in prefixes:
        yield bucket, *causal.causal_attention(_take_padded(qkv, bucket), kv_heads)
    for continuation in suffixes:
        bucket = continuation.suffixes
        prompt = qkv[continuation.start : continuation.stop, heads:]  # its keys and values
        yield bucket, *causal.continued_attention(prompt, _take_padded(qkv, bucket), kv_heads)


def _qkv_shape(bucket: Bucket, qkv: torch.Tensor) -> torch.Size:
    """Return the shape of the bucket's part of qkv [N, heads + 2 kv_heads, dim] once its sequences
    are padded to one length: [rows, length, heads + 2 kv_heads, dim]."""
    return torch.Size((bucket.rows, bucket.length, *qkv.shape[1:]))


def _take_padded(packed: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """Take the tokens of a bucket out of the packed ones [N, ...], with its sequences padded to one
    length: [rows, length, ...]."""
    return _pad_tokens(packed[bucket.start : bucket.stop], bucket)


def _write_unpadded(padded: torch.Tensor, bucket: Bucket, packed: torch.Tensor) -> None:
    """Write the tokens of a bucket, given as `padded` [rows * length, ...], to their places in
    `packed` [N, ...]; the padding is dropped."""
    packed[bucket.start : bucket.stop].copy_(_without_padding(padded, bucket))


def _split_by_counts(
    saved: Sequence[torch.Tensor], counts: Sequence[int]
) -> Iterator[list[torch.Tensor]]:
    """Divide the tensors that the forward pass has saved in one list into lists for each bucket
    again: the first `counts[0]` tensors belong to the first bucket, and so on."""
    remaining = iter(saved)  # each `islice` takes the next `count` tensors
    return iter([list(islice(remaining, count)) for count in counts])


def _takes_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether to use torch's variable-length kernel: it takes this number format, the device is a
    GPU, and the kernel is not switched off."""
    is_on = not switched_off.is_off("varlen_attention")
    return is_on and device.type != "cpu" and dtype in VARLEN_DTYPES


def _fits_blocks(layout: Layout, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `BlockAttention` takes this layout: on a CPU in float32, if no row is longer than
    causal.LONGEST."""
    pairs = zip(layout.owners, layout.suffix_lengths, strict=True)
    whole_rows = [layout.prefix_lengths[owner] + length for owner, length in pairs]
    return causal.applies(dtype, device, max([*layout.prefix_lengths, *whole_rows]))


@lru_cache(maxsize=8)
def _block_plan(layout: Layout) -> tuple[list[Bucket], list[Continuation]]:
    """Divide the sequences of a layout as `BlockAttention` takes them: (buckets of prefixes, the
    suffixes of each prompt). Cached, because a microbatch may be run several times."""
    return prefix_buckets(layout), continuations(layout)


@lru_cache(maxsize=8)
def _buckets(layout: Layout, device: torch.device) -> tuple[list[Bucket], list[SuffixBucket]]:
    """Divide the sequences of a layout into (buckets of prefixes, buckets of suffixes), each of
    sequences that are padded to one length, with tensors on the device. Cached, because a
    microbatch may be run several times."""
    return (
        [bucket.to(device) for bucket in prefix_buckets(layout)],
        [bucket.to(device) for bucket in suffix_buckets(layout)],
    )


def _pad_tokens(x: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """Pad the packed tokens x [tokens, ...] of a bucket to [rows, length, ...]: one row per
    sequence, filled up with zeros at its end."""
    if bucket.scatter_index is not None:  # None: all are equally long
        x = Spread.apply(x, bucket.scatter_index, bucket.rows * bucket.length)
    return x.view(bucket.rows, bucket.length, *x.shape[1:])


def _pack_output(out: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """Turn the attention's output [rows, heads, length, dim] of a bucket into [tokens, heads *
    dim], without the padding."""
    by_token = out.transpose(1, 2).reshape(bucket.rows * bucket.length, -1)
    return _without_padding(by_token, bucket)


def _without_padding(x: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """Keep the rows of x [rows * length, ...] that are tokens of the bucket, and drop the
    padding."""
    index = bucket.scatter_index
    return x if index is None else x.index_select(0, index)


class VarlenPlan:
    """What the variable-length kernel has to know of a layout.

    Attributes:
        keys: [K] int64, the index of the packed token behind every key, sequence by sequence; None
            if each sequence has only the keys of its own tokens.
        query_starts, key_starts: [sequences + 1] int32, cumulative lengths from 0.
        longest_query, longest_key: the largest of those lengths.
    """

    def __init__(
        self,
        keys: torch.Tensor | None,
        query_lengths: list[int],
        key_lengths: list[int],
        device: torch.device,
    ) -> None:
        """Put a plan on the device.

        Args:
            keys: [K] int64, the index of the packed token behind every key, sequence by sequence;
                None if each sequence has only the keys of its own tokens.
            query_lengths, key_lengths: how many queries and keys each sequence has, in packed
                order.
        """
        self.keys = to_device(keys, device) if keys is not None else None
        self.query_starts = _cumulative_lengths(query_lengths, device)
        self.key_starts = _cumulative_lengths(key_lengths, device)
        self.longest_query = max(query_lengths)
        self.longest_key = max(key_lengths)

    @classmethod
    def for_layout(cls, layout: Layout, device: torch.device) -> "VarlenPlan":
        """Plan the attention of a layout: prefixes (prompts that rows share, or whole rows) first,
        then suffixes (what follows a shared prompt in each row). A suffix sees the keys of its
        prefix, then its own. An empty suffix is left out."""
        prefix_lengths = list(layout.prefix_lengths)
        suffix_lengths = [length for length in layout.suffix_lengths if length]
        if not suffix_lengths:  # each sequence has only the keys of its own tokens
            return cls(
                keys=None, query_lengths=prefix_lengths, key_lengths=prefix_lengths, device=device
            )
        pairs = zip(layout.owners, layout.suffix_lengths, strict=True)
        key_lengths = [
            *prefix_lengths,
            *(prefix_lengths[owner] + length for owner, length in pairs if length),
        ]
        query_lengths = prefix_lengths + suffix_lengths
        return cls(_key_rows(layout), query_lengths, key_lengths, device)


def _key_rows(layout: Layout) -> torch.Tensor:
    """Return the index of the packed token behind every key, [keys] int64: first the tokens of the
    prefixes. Then, for each suffix that has tokens, the tokens of its prefix and its own. So the
    tokens of a prefix that suffixes share occur several times."""
    prefix_starts = start_offsets(layout.prefix_lengths, offset=0)
    prefix_tokens = sum(layout.prefix_lengths)  # packed first, so their numbers begin at 0
    keys = [torch.arange(prefix_tokens)]
    suffix_start = prefix_tokens
    for length, owner in zip(layout.suffix_lengths, layout.owners, strict=True):
        if length:
            prefix_start = prefix_starts[owner]
            keys.append(torch.arange(prefix_start, prefix_start + layout.prefix_lengths[owner]))
            keys.append(torch.arange(suffix_start, suffix_start + length))
        suffix_start += length
    return torch.cat(keys)


def _cumulative_lengths(lengths: list[int], device: torch.device) -> torch.Tensor:
    """Return the cumulative lengths from 0, [lengths + 1] int32 on the device: for the lengths 3
    and 5 that is [0, 3, 8]."""
    return to_device(torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), device)
