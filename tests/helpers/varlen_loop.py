"""`torch.nn.attention.varlen.varlen_attn`, one sequence after another, for machines whose kernels
do not include it."""

import math
from typing import Any

import torch


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    **unknown: Any,
) -> torch.Tensor:
    """[T, heads, dim] with cumulative lengths; a window (-1, 0) is causal, aligned at the end."""
    assert not unknown and window_size in ((-1, -1), (-1, 0))
    assert enable_gqa or query.shape[1] == key.shape[1]
    copies = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    assert int(cu_seq_q[-1]) == len(query) and int(cu_seq_k[-1]) == len(key) == len(value)
    out = []
    for number in range(len(cu_seq_q) - 1):
        q = query[cu_seq_q[number] : cu_seq_q[number + 1]]
        k = key[cu_seq_k[number] : cu_seq_k[number + 1]]
        v = value[cu_seq_k[number] : cu_seq_k[number + 1]]
        assert len(q) <= max_q and len(k) <= max_k
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
        if window_size[1] == 0:
            last = torch.arange(len(q))[:, None] + len(k) - len(q)
            scores = scores.masked_fill(torch.arange(len(k)) > last, -math.inf)
        out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    return torch.cat(out)
