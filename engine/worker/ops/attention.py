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
from engine.worker.ops.packing import BranchBucket, Bucket, Layout, branch_buckets, trunk_buckets


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
            self.trunks, self.branches = _plan(layout, device)

    def __call__(self, qkv: torch.Tensor) -> torch.Tensor:
        """[N, (heads + 2 kv) * dim] rotated queries, keys and values to [N, heads * dim]."""
        shaped = qkv.view(qkv.shape[0], self.heads + 2 * self.kv, -1)
        if self.lengths is not None:
            return self._varlen(shaped, self.lengths)
        parts = [self._within(shaped, bucket) for bucket in self.trunks]
        parts += [self._from_branches(shaped, bucket) for bucket in self.branches]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _varlen(self, qkv: torch.Tensor, plan: "VarlenPlan") -> torch.Tensor:
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
            window_size=(-1, 0),  # causal, aligned at the end: a branch sees its whole trunk
            enable_gqa=self.grouped,
        )
        assert isinstance(out, torch.Tensor)
        return out.reshape(out.shape[0], -1)

    def _within(self, qkv: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        padded = _padded(qkv[bucket.start : bucket.stop], bucket)  # [rows, length, heads, dim]
        if causal.applies(padded, bucket.length):
            flat = causal.CausalAttention.apply(padded, self.kv)
            return flat if bucket.places is None else flat.index_select(0, bucket.places)
        q, k, v = padded.transpose(1, 2).split([self.heads, self.kv, self.kv], dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return _packed(out, bucket)

    def _from_branches(self, qkv: torch.Tensor, bucket: BranchBucket) -> torch.Tensor:
        own = bucket.own
        padded = _padded(qkv[own.start : own.stop], own)
        q, k, v = padded.split([self.heads, self.kv, self.kv], dim=2)
        shared = qkv[:, self.heads :].index_select(0, bucket.trunk_rows)
        if bucket.trunk_places is not None:
            size = bucket.trunks * bucket.trunk_length
            shared = Spread.apply(shared, bucket.trunk_places, size)
        shared = shared.view(bucket.trunks, bucket.trunk_length, 2 * self.kv, -1)
        shared = shared.index_select(0, bucket.owner)
        both = torch.cat([shared, torch.cat([k, v], 2)], 1).transpose(1, 2)
        keys, values = both.split([self.kv, self.kv], dim=1)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), keys, values, attn_mask=bucket.mask, enable_gqa=self.grouped
        )
        return _packed(out, own)


@lru_cache(maxsize=8)
def _plan(layout: Layout, device: torch.device) -> tuple[list[Bucket], list[BranchBucket]]:
    return (
        [b.to(device) for b in trunk_buckets(layout)],
        [b.to(device) for b in branch_buckets(layout)],
    )


def _padded(x: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    if bucket.places is not None:
        x = Spread.apply(x, bucket.places, bucket.rows * bucket.length)
    return x.view(bucket.rows, bucket.length, *x.shape[1:])


def _packed(out: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """[rows, heads, length, dim] to [tokens, heads * dim]."""
    flat = out.transpose(1, 2).reshape(bucket.rows * bucket.length, -1)
    return flat if bucket.places is None else flat.index_select(0, bucket.places)


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
        trunks, branches = list(layout.trunks), [n for n in layout.branches if n]
        if not branches:
            return cls(None, trunks, trunks, device)
        starts, at = [], 0
        for n in trunks:
            starts.append(at)
            at += n
        keys = [torch.arange(at)]
        key_lengths = list(trunks)
        for n, owner in zip(layout.branches, layout.owners, strict=True):
            if n:
                keys.append(torch.arange(starts[owner], starts[owner] + trunks[owner]))
                keys.append(torch.arange(at, at + n))
                key_lengths.append(trunks[owner] + n)
            at += n
        return cls(torch.cat(keys), trunks + branches, key_lengths, device)


def _cumulative(lengths: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
