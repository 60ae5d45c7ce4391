"""The process of one rank in the trial of sums (collectives_trial.py): `python -P -m
engine.worker.fast_paths.summing STORE RANK COUNT BACKEND DEVICE`.

Writes one JSON object to stdout, the fields of `Member`.
"""

import hashlib
import json
import sys
import time

from engine.worker.core.runtime import prepare

prepare()

import torch
from torch import distributed

from engine.worker.ranks import collective
from envs.isolation import kernel

# Numbers in a vector; on a GPU as many as an adapter of a model of 4 billion parameters has.
SIZES = {"cpu": 1 << 16, "cuda": 1 << 25}
ROUNDS = 5  # each sum is timed so often; the fastest round counts


def exact_part(size: int, rank: int, device: torch.device) -> torch.Tensor:
    """Make a rank's vector of `size` small integers, as float32. Their sum over all ranks is exact,
    in whatever order they are added."""
    return ((torch.arange(size, device=device) * (rank + 1)) % 1009).to(torch.float32)


def rounded_part(size: int, rank: int, device: torch.device) -> torch.Tensor:
    """Make a rank's vector of `size` random numbers, seeded by the rank. Their sum over all ranks
    is rounded, so it shows whether all ranks round alike."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(size, generator=generator).to(device)


def add_up(vector: torch.Tensor) -> torch.Tensor:
    """Return the sum of all ranks' vectors, of which `vector` is this rank's; that stays as it is.
    All ranks must call this."""
    total = vector.clone()
    distributed.all_reduce(total)
    return total


def main(store: str, rank: int, count: int, backend: str, kind: str) -> None:
    """Connect to the other ranks, add up, and write the report to stdout.

    Args:
        store: the file through which the ranks find each other.
        rank, count: this process's number, and how many there are.
        backend: what torch adds up through, "nccl" or "gloo".
        kind: the kind of device, "cpu" or "cuda".
    """
    kernel.die_with_parent()
    device, size = torch.device(kind), SIZES[kind]
    meeting = collective.Meeting(store, count, training=count)
    collective.join(meeting, rank, device, backend=backend)
    expected = sum(exact_part(size, any_rank, device) for any_rank in range(count))
    wrong = int((add_up(exact_part(size, rank, device)) != expected).sum())
    rounded = add_up(rounded_part(size, rank, device))
    digest = hashlib.sha256(rounded.cpu().numpy().tobytes()).hexdigest()
    seconds = min(_seconds(rounded) for _ in range(ROUNDS))
    collective.leave()
    json.dump({"wrong": wrong, "digest": digest, "seconds": seconds}, sys.stdout)


def _seconds(vector: torch.Tensor) -> float:
    """Measure the seconds of one sum over all ranks, until its result is complete. Overwrites
    `vector`, this rank's part, with the sum. All ranks must call this."""
    if vector.is_cuda:
        torch.cuda.synchronize()
    began = time.perf_counter()
    distributed.all_reduce(vector)
    if vector.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
