"""Sums over the GPUs of this machine, as the ranks of a run make them: through NCCL, and through
the machine's memory (gloo). A process for each GPU adds up the same vectors in both ways."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.fast_paths.examine import ALL_GPUS
from engine.fast_paths.results import PathResult
from engine.processes import programs
from engine.worker.fast_paths.trial import SLOWER

NAME = "collectives"
SUM_S = 110.0  # that the processes may take to start, connect and add up

Say = Callable[[str], None]


@dataclass(frozen=True)
class Member:
    """What the process of one rank says of the sums.

    Attributes:
        wrong: how many numbers of a sum that has one exact result are not that.
        digest: of the sum of numbers that are rounded; the same on every rank.
        seconds: of the fastest sum.
    """

    wrong: int
    digest: str
    seconds: float


class Failed(Exception):
    """The sums were not made; the message says why."""


def try_collectives(device: torch.device, say: Say) -> PathResult:
    """Add up vectors over all GPUs of the machine, with NCCL and with gloo. Nothing is raised."""
    visible = [each for each in os.environ.get(ALL_GPUS, "").split(",") if each]
    if device.type != "cuda" or len(visible) < 2:
        reason = "there is one GPU" if device.type == "cuda" else "there is no GPU"
        return PathResult(name=NAME, state="skipped", reason=reason)
    return compare(visible, "nccl", "gloo", say)


def compare(visible: Sequence[str], fast: str, plain: str, say: Say) -> PathResult:
    """Make the sums with the backend `fast`, and time them beside the backend `plain`.

    Args:
        visible: the CUDA_VISIBLE_DEVICES of each rank; "" for one on the CPU.
    """
    try:
        say(f"add up through {fast}")
        members = sums(visible, fast)
        _require_right(members)
    except Failed as error:
        return PathResult(name=NAME, state="off", reason=str(error))
    seconds = max(member.seconds for member in members)
    result = PathResult(name=NAME, state="on", difference=0.0, allowed=0.0, seconds=seconds)
    try:
        say(f"add up through {plain}")
        plain_seconds = max(member.seconds for member in sums(visible, plain))
    except Failed:
        return result  # nothing to be slower than
    result = result.model_copy(update={"plain_seconds": plain_seconds})
    if seconds <= SLOWER * plain_seconds:
        return result
    reason = f"slower: {1000 * seconds:.3g} ms, {plain} {1000 * plain_seconds:.3g} ms"
    return result.model_copy(update={"state": "off", "reason": reason})


def _require_right(members: Sequence[Member]) -> None:
    """Raise Failed where a rank got another sum than is right, or than another rank."""
    for rank, member in enumerate(members):
        if member.wrong:
            raise Failed(f"rank {rank} got a wrong sum: {member.wrong} numbers of it are not exact")
    digests = [member.digest for member in members]
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise Failed(f"rank {rank} got another sum than rank 0, by rounding")


def sums(visible: Sequence[str], backend: str) -> list[Member]:
    """Start a process for each rank and have them add up; what each says. Raises Failed where one
    fails, or they are not done in time; all are ended."""
    with tempfile.TemporaryDirectory(prefix="honesmith-ranks-") as folder:
        store = Path(folder) / "store"
        processes = [
            _start(rank, len(visible), each, backend, store) for rank, each in enumerate(visible)
        ]
        try:
            return [_read_member(rank, process) for rank, process in enumerate(processes)]
        finally:
            for process in processes:
                process.kill()
                process.wait()
                for pipe in (process.stdout, process.stderr):
                    if pipe is not None:
                        pipe.close()


def _start(
    rank: int, count: int, visible: str, backend: str, store: Path
) -> "subprocess.Popen[bytes]":
    """Start the process of a rank."""
    return subprocess.Popen(
        [
            *(sys.executable, "-P", *programs.command("summing")),
            *(str(store), str(rank), str(count), backend, "cuda" if visible else "cpu"),
        ],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": visible, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def _read_member(rank: int, process: "subprocess.Popen[bytes]") -> Member:
    """Wait for the process of a rank; return what it wrote at its end. Raises Failed where it
    fails or is not done in time."""
    try:
        out, errors = process.communicate(timeout=SUM_S)
    except subprocess.TimeoutExpired:
        raise Failed(f"rank {rank} was not done after {SUM_S:.0f} s") from None
    if process.returncode:
        lines = errors.decode("utf-8", "replace").strip().splitlines() or ["no output"]
        raise Failed(f"rank {rank} ended with status {process.returncode}: {lines[-1][:200]}")
    return Member(**json.loads(out))
