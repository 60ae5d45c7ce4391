"""Tries sums over the GPUs of this machine, as the ranks (processes) of a run make them: through
NCCL, and through the machine's memory (gloo). One process for each GPU adds up the same vectors in
both ways."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.machine.fast_paths.examine import ALL_GPUS
from engine.machine.fast_paths.results import PathResult
from engine.machine.processes import programs
from engine.worker.fast_paths.trial import SLOWER

NAME = "collectives"
SUM_S = 110.0  # seconds in which the processes must start, connect and add up

Report = Callable[[str], None]


@dataclass(frozen=True)
class Member:
    """The report of one rank's process about its sums.

    Attributes:
        wrong: how many numbers are wrong in the sum whose right value is known exactly.
        digest: hash of the sum of numbers that are rounded; must be the same on every rank.
        seconds: of the fastest sum.
    """

    wrong: int
    digest: str
    seconds: float


class RanksFailed(Exception):
    """The ranks could not make the sums, or got wrong ones; the message says why."""


def try_collectives(device: torch.device, report_part: Report) -> PathResult:
    """Try to add up vectors over all GPUs of the machine, with NCCL and with gloo. Returns the
    result: "on" if NCCL's sums are right and not slower, else "off"; "skipped" if there are fewer
    than two GPUs. Raises nothing.

    Args:
        device: the device that the paths are tried on.
        report_part: called before each part of the trial, with what is done next.
    """
    visible = [gpu for gpu in os.environ.get(ALL_GPUS, "").split(",") if gpu]
    if device.type != "cuda" or len(visible) < 2:
        reason = "there is one GPU" if device.type == "cuda" else "there is no GPU"
        return PathResult(name=NAME, state="skipped", reason=reason)
    return compare(visible, "nccl", "gloo", report_part)


def compare(visible: Sequence[str], fast: str, plain: str, report_part: Report) -> PathResult:
    """Make the sums with the backend `fast`, check them, and compare their time with the backend
    `plain`. Returns "on" if the sums are right and not slower, else "off" with the reason.

    Args:
        visible: the CUDA_VISIBLE_DEVICES of each rank; "" for a rank on the CPU.
        fast, plain: names of torch's backends, such as "nccl" and "gloo".
        report_part: called before each part of the trial, with what is done next.
    """
    try:
        report_part(f"add up through {fast}")
        members = sums(visible, fast)
        _require_right(members)
    except RanksFailed as error:
        return PathResult(name=NAME, state="off", reason=str(error))
    seconds = max(member.seconds for member in members)
    result = PathResult(name=NAME, state="on", difference=0.0, allowed=0.0, seconds=seconds)
    try:
        report_part(f"add up through {plain}")
        plain_seconds = max(member.seconds for member in sums(visible, plain))
    except RanksFailed:
        return result  # `plain` failed, so there is no time to compare with
    result = result.model_copy(update={"plain_seconds": plain_seconds})
    if seconds <= SLOWER * plain_seconds:
        return result
    reason = f"slower: {1000 * seconds:.3g} ms, {plain} {1000 * plain_seconds:.3g} ms"
    return result.model_copy(update={"state": "off", "reason": reason})


def _require_right(members: Sequence[Member]) -> None:
    """Raise RanksFailed if a rank got a wrong sum, or a sum that differs from rank 0's. `members`
    are the reports of the ranks, in their order."""
    for rank, member in enumerate(members):
        if member.wrong:
            raise RanksFailed(
                f"rank {rank} got a wrong sum: {member.wrong} numbers of it are not exact"
            )
    digests = [member.digest for member in members]
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise RanksFailed(f"rank {rank} got another sum than rank 0, by rounding")


def sums(visible: Sequence[str], backend: str) -> list[Member]:
    """Start a process for each rank, let them add up through `backend` ("nccl" or "gloo"), and
    return each one's report. All processes are ended.

    `visible` holds the CUDA_VISIBLE_DEVICES of each rank, "" for a rank on the CPU. Raises
    RanksFailed if a process fails or takes longer than SUM_S seconds.
    """
    with tempfile.TemporaryDirectory(prefix="honesmith-ranks-") as folder:
        store = Path(folder) / "store"
        processes = [
            _start(rank, len(visible), gpu, backend, store) for rank, gpu in enumerate(visible)
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
    """Start the process of rank number `rank` of `count`, which adds up through `backend`.
    `visible` is its CUDA_VISIBLE_DEVICES, "" for the CPU; `store` is the file through which the
    ranks find each other."""
    return subprocess.Popen(
        [
            *(sys.executable, "-P", *programs.command("summing")),
            # The arguments of `main` in summing.py.
            *(str(store), str(rank), str(count), backend, "cuda" if visible else "cpu"),
        ],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": visible, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def _read_member(rank: int, process: "subprocess.Popen[bytes]") -> Member:
    """Wait for the process of a rank and return the report that it wrote at its end. Raises
    RanksFailed if the process fails or takes longer than SUM_S seconds."""
    try:
        out, errors = process.communicate(timeout=SUM_S)
    except subprocess.TimeoutExpired:
        raise RanksFailed(f"rank {rank} was not done after {SUM_S:.0f} s") from None
    if process.returncode:
        lines = errors.decode("utf-8", "replace").strip().splitlines() or ["no output"]
        raise RanksFailed(f"rank {rank} ended with status {process.returncode}: {lines[-1][:200]}")
    return Member(**json.loads(out))
