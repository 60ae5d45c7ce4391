"""How fast a GPU copies, for every side of a benchmark."""

import time

import torch


def copy_bandwidth() -> float:
    """Bytes per second that a copy on the GPU moves, read and write counted."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(20):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return 2 * source.numel() / best
