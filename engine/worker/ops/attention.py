"""Attention over packed sequences (packing.py).

On a CPU sequences of like length stand in padded rectangles: keys come before their queries, so
padding on the right is never seen. On a GPU one variable-length kernel takes all of them.
"""

from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional as F

from engine.worker.ops import causal
from engine.worker.ops.kernels import Spread
from engine.worker.ops.packing import Bucket, Layout, SuffixBucket, prefix_buckets, suffix_buckets


def varlen_attn(*arguments: Any, **options: Any) -> Any:
    """torch.nn.attention.varlen.varlen_attn."""
    # Late: importing it brings in the compiler, 75 MB that no CPU run needs.
    from torch.nn.attention.varlen import varlen_attn as kernel  # noqa: PLC0415

    return kernel(*arguments, **options)


HALF = (torch.bfloat16, torch.float16)


class Attention:
    """Who sees whom of one microbatch, made ready for one device; the layers share it.

    Args:
        layout: of the packed sequences.
        heads, kv: query and key/value heads (grouped queries, arXiv 2305.13245).
        device: where the tensors are.
        dtype: of queries, keys and values.
        varlen: whether to use the variable-length kernel; by default on a GPU, in the two formats
            the kernel knows.
    """

    def __init__(
        self,
        layout: Layout,
        heads: int,
        kv: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        varlen: bool | None = None,
    ) -> None:
        self.heads, self.kv = heads, kv
        self.grouped = heads != kv
        self.device = device
        if varlen is None:
            varlen = device.type == "cuda" and dtype in HALF
        if varlen:
            self.lengths = VarlenPlan.of(layout, device)
        else:
            self.lengths = None
            self.prefixes, self.suffixes = _plan(layout, device)

    def __call__(self, qkv: torch.Tensor) -> torch.Tensor:
        """[N, (heads + 2 kv) * dim] rotated queries, keys and values to [N, heads * dim]."""
        shaped = qkv.view(qkv.shape[0], self.heads + 2 * self.kv, -1)
        if self.lengths is not None:
            return self._varlen(shaped, self.lengths)
        parts = [self._within(shaped, bucket) for bucket in self.prefixes]
        parts += [self._from_suffixes(shaped, bucket) for bucket in self.suffixes]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _varlen(self, qkv: torch.Tensor, plan: "VarlenPlan") -> torch.Tensor:
        """All rows in one kernel over packed tokens of varying length."""
        q, k, v = qkv.split([self.heads, self.kv, self.kv], dim=1)
        if plan.keys is not None:
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
            enable_gqa=self.grouped,
        )
        assert isinstance(out, torch.Tensor)
        return out.reshape(out.shape[0], -1)

    def _within(self, qkv: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        padded = _padded(qkv[bucket.start : bucket.stop], bucket)  # [rows, length, heads, dim]
        if causal.applies(padded, bucket.length):
            flat = causal.CausalAttention.apply(padded, self.kv)
            return _tokens_of(flat, bucket)
        q, k, v = padded.transpose(1, 2).split([self.heads, self.kv, self.kv], dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return _packed(out, bucket)

    def _from_suffixes(self, qkv: torch.Tensor, bucket: SuffixBucket) -> torch.Tensor:
        """Attention of suffixes: each sees its whole prefix, and itself causally."""
        own = bucket.own
        padded = _padded(qkv[own.start : own.stop], own)
        q, k, v = padded.split([self.heads, self.kv, self.kv], dim=2)
        shared = qkv[:, self.heads :].index_select(0, bucket.prefix_rows)
        if bucket.prefix_scatter_index is not None:
            size = bucket.prefixes * bucket.prefix_length
            shared = Spread.apply(shared, bucket.prefix_scatter_index, size)
        shared = shared.view(bucket.prefixes, bucket.prefix_length, 2 * self.kv, -1)
        shared = shared.index_select(0, bucket.owner)
        both = torch.cat([shared, torch.cat([k, v], 2)], 1).transpose(1, 2)
        keys, values = both.split([self.kv, self.kv], dim=1)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), keys, values, attn_mask=bucket.mask, enable_gqa=self.grouped
        )
        return _packed(out, own)


@lru_cache(maxsize=8)
def _plan(layout: Layout, device: torch.device) -> tuple[list[Bucket], list[SuffixBucket]]:
    return (
        [b.to(device) for b in prefix_buckets(layout)],
        [b.to(device) for b in suffix_buckets(layout)],
    )


def _padded(x: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    if bucket.scatter_index is not None:
        x = Spread.apply(x, bucket.scatter_index, bucket.rows * bucket.length)
    return x.view(bucket.rows, bucket.length, *x.shape[1:])


def _packed(out: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """[rows, heads, length, dim] to [tokens, heads * dim]."""
    flat = out.transpose(1, 2).reshape(bucket.rows * bucket.length, -1)
    return _tokens_of(flat, bucket)


def _tokens_of(flat: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """The rows of a padded bucket that are tokens."""
    index = bucket.scatter_index
    return flat if index is None else flat.index_select(0, index)


class VarlenPlan:
    """Lengths and gathers for a variable-length kernel.

    Attributes:
        keys: [K] int64 or None: the packed row of every key; None where keys are the queries.
        query_starts, key_starts: [sequences + 1] int32, cumulative lengths.
        longest_query, longest_key: the largest of each.
    """

    def __init__(
        self,
        keys: torch.Tensor | None,
        query_lengths: list[int],
        key_lengths: list[int],
        device: torch.device,
    ) -> None:
        self.keys = keys.to(device) if keys is not None else None
        self.query_starts = _cumulative(query_lengths, device)
        self.key_starts = _cumulative(key_lengths, device)
        self.longest_query = max(query_lengths)
        self.longest_key = max(key_lengths)

    @classmethod
    def of(cls, layout: Layout, device: torch.device) -> "VarlenPlan":
        """Where the queries and keys of each row lie; a suffix has the keys of its prefix before
        its own."""
        prefixes, suffixes = list(layout.prefixes), [n for n in layout.suffixes if n]
        if not suffixes:
            return cls(None, prefixes, prefixes, device)
        starts, offset = [], 0
        for n in prefixes:
            starts.append(offset)
            offset += n
        keys = [torch.arange(offset)]
        key_lengths = list(prefixes)
        for n, owner in zip(layout.suffixes, layout.owners, strict=True):
            if n:
                keys.append(torch.arange(starts[owner], starts[owner] + prefixes[owner]))
                keys.append(torch.arange(offset, offset + n))
                key_lengths.append(prefixes[owner] + n)
            offset += n
        return cls(torch.cat(keys), prefixes + suffixes, key_lengths, device)


def _cumulative(lengths: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
