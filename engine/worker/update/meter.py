"""How well a run uses its machine: operations done, seconds, the most memory held.

The operations of a model are counted where the estimate counts them (engine/cost/flops.py), for the
tokens that really run: a prompt that a group shares once, padding never, recomputation not (model
FLOPs utilisation of arXiv 2204.02311). The rate they are held against is that of one large matrix
product on this machine, measured when the worker starts, or of a step that was faster than it.
"""

import resource
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from engine.core.files import read_lines
from engine.cost import flops
from engine.home.run_dir import RunDir
from engine.models.model_files import read_facts
from engine.worker.core.batch import Row
from engine.worker.core.job import Result
from engine.worker.network.policy import Policy
from engine.worker.ops import matmul

PROBE_S = 0.05
SIZE = {"cpu": 512, "cuda": 8192}  # rows and columns of the matrices multiplied


class Meter:
    """Counts the operations of the steps of one run."""

    def __init__(self, policy: Policy) -> None:
        network = policy.base.network
        self.device = network.device
        self.shares = network.forward == "own"  # prompts of a group run once
        self.model = read_facts(policy.base.path)
        self.adapter = sum(p.numel() for p in policy.parameters())
        self.matrix_flops = matrix_rate(network.device, network.dtype)
        self._operations = 0.0

    def ran(self, rows: Sequence[Row]) -> None:
        """A microbatch of these rows went forward and backward."""
        tokens, pairs, scored = sizes(rows, shared=self.shares)
        self._operations += flops.update_operations(
            self.model, self.adapter, tokens=tokens, pairs=pairs, scored=scored
        )

    def step(self, train_s: float) -> dict[str, float]:
        """Metrics of what ran since the last call, which took `train_s` seconds."""
        done, self._operations = self._operations, 0.0
        rate = done / train_s if train_s > 0 else 0.0
        # A machine that was busy when it was measured is faster than that: what a step reached is.
        self.matrix_flops = max(self.matrix_flops, rate)
        return {"mfu": rate / self.matrix_flops, "peak_memory": peak_memory(self.device)}


def sizes(rows: Sequence[Row], *, shared: bool) -> tuple[int, int, int]:
    """What one forward pass of the rows computes: (tokens through the layers, pairs of a token and
    one it sees, tokens whose log-probability is taken).

    The last token of a row predicts nothing and is not run. `shared`: a prompt that several rows
    have in common runs once.
    """
    tokens = pairs = 0
    known: set[tuple[int, ...]] = set()
    for row in rows:
        length = len(row.ids) - 1
        prompt = tuple(row.ids[: row.prefix_len])
        before = row.prefix_len if shared and prompt in known else 0
        if row.prefix_len:
            known.add(prompt)
        tokens += length - before
        pairs += (length * (length + 1) - before * (before + 1)) // 2
    return tokens, pairs, sum(sum(row.loss_mask) for row in rows)


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of one large matrix product: the best of some 50 ms of them."""
    size = SIZE[device.type]
    chance = torch.Generator().manual_seed(0)
    left, right = (torch.randn(size, size, generator=chance).to(device, dtype) for _ in range(2))
    best, spent, rounds = float("inf"), 0.0, 0
    while spent < PROBE_S or rounds < 3:
        _wait(device)
        began = time.perf_counter()
        matmul.linear(left, right)
        _wait(device)
        took = time.perf_counter() - began
        spent, rounds = spent + took, rounds + 1
        best = min(best, took) if rounds > 1 else best  # the first one warms up
    return 2.0 * size**3 / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(device: torch.device) -> int:
    """The most bytes held so far: of the GPU's memory by torch, on a CPU by this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would count what the parent held before this process began
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def totals(run: RunDir) -> Result:
    """The measurements of all steps of a run, whichever attempt did them: seconds by phase, the
    median rate, utilisation weighted by time, the most memory."""
    lines = [
        line
        for line in read_lines(run.metrics, max_bytes=run.metrics.stat().st_size)[0]
        if line.get("train_s") is not None
    ]
    seconds = {
        name: round(sum(line[name] for line in lines), 3)
        for name in ("sample_s", "reward_s", "train_s")
        if all(name in line for line in lines)
    }
    if not lines:
        return {}
    trained = sum(line["train_s"] for line in lines)
    measured: Result = {
        "seconds": seconds,
        "tokens_per_s": statistics.median(line["tokens_per_s"] for line in lines),
        "mfu": sum(line["mfu"] * line["train_s"] for line in lines) / max(trained, 1e-9),
        "peak_memory": max(line["peak_memory"] for line in lines),
    }
    effective = [line["groups_effective"] for line in lines if "groups_effective" in line]
    if effective:
        measured["effective_share"] = round(statistics.fmean(effective), 4)
    return measured
