"""Measures how well a run uses its machine: operations done, seconds, the most memory held.

The operations of a model are counted by the same code as for the estimate (engine/cost/flops.py),
for the tokens that really run. A prompt that a group shares counts once; padding and recomputation
do not count (model FLOPs utilisation of arXiv 2204.02311). Their rate is compared with that of one
large matrix product on this machine, measured when the worker starts, or of the fastest step if
that was faster.
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
from engine.models.sizing.layers import OVERHEAD
from engine.worker.core.batch import Row
from engine.worker.core.job import Result
from engine.worker.network.policy import Policy
from engine.worker.ops import matmul
from engine.worker.update.telemetry import telemetry_of
from envs.json_types import JsonObject

PROBE_S = 0.05  # seconds for which matrix products are measured
# GPU memory of a process beside what torch reserves, as estimates count it.
CONTEXT_BYTES = int(OVERHEAD["cuda"][0])
SIZE = {"cpu": 512, "cuda": 8192}  # rows and columns of the matrices multiplied


class Meter:
    """Counts the operations of the steps of one run."""

    def __init__(self, policy: Policy, ranks: int = 1) -> None:
        """Count for the training of `policy`. First measures how fast this machine multiplies large
        matrices, which takes about `PROBE_S` seconds.

        `ranks` is the number of processes that share each batch; the work of one of them is
        counted.
        """
        self.ranks = ranks
        network = policy.base.network
        self.device = network.device
        self.shares_prompts = network.forward == "own"  # prompts of a group run once
        self.model_facts = read_facts(policy.base.path)  # its sizes
        self.adapter_parameters = sum(parameter.numel() for parameter in policy.parameters())
        self.matrix_flops = matrix_rate(network.device, network.dtype)
        self.telemetry = telemetry_of(network.device)
        self._counted_operations = 0.0

    def count_microbatch(self, rows: Sequence[Row]) -> None:
        """Count the operations of one pass forward and backward over a microbatch of these rows,
        for the next call of `step`."""
        tokens, attention_pairs, scored_tokens = sizes(rows, shared=self.shares_prompts)
        self._counted_operations += flops.update_operations(
            self.model_facts,
            self.adapter_parameters,
            tokens=tokens,
            pairs=attention_pairs,
            scored=scored_tokens,
        )

    def count_batch(self, rows: Sequence[Row]) -> None:
        """Count this rank's share of the operations of one pass over a whole batch of these rows,
        which all ranks (processes of the run) divide evenly."""
        before = self._counted_operations
        self.count_microbatch(rows)
        # The call has added the whole batch's operations; only this rank's share of them counts.
        self._counted_operations = before + (self._counted_operations - before) / self.ranks

    def step(self, train_s: float) -> dict[str, float]:
        """Return the metrics of the microbatches that were counted since the last call: `mfu`,
        their operations per second as a share of what the machine can do; `peak_memory`, in bytes,
        of the run so far; and the readings of a GPU's sensors.

        Args:
            train_s: the seconds that the microbatches took; with 0, `mfu` is 0.
        """
        flops_per_s = self._counted_operations / train_s if train_s > 0 else 0.0
        self._counted_operations = 0.0
        # The machine may have been busy when its rate was measured. A faster step shows that the
        # machine can do more.
        self.matrix_flops = max(self.matrix_flops, flops_per_s)
        metrics: dict[str, float] = {
            "mfu": flops_per_s / self.matrix_flops,
            "peak_memory": peak_memory(self.device),
        }
        if self.telemetry is not None:  # it is on a GPU alone
            metrics |= self.telemetry.step()
        return metrics


def sizes(rows: Sequence[Row], *, shared: bool) -> tuple[int, int, int]:
    """Count what one forward pass over the rows computes. Returns (tokens that run through the
    layers; pairs of a token and a token that it attends to, itself included; tokens whose
    log-probability is computed).

    The last token of a row predicts nothing and is not run. With `shared`, a prompt that several
    rows have in common runs only once.
    """
    tokens = attention_pairs = 0
    seen_prompts: set[tuple[int, ...]] = set()
    for row in rows:
        length = len(row.ids) - 1
        prompt = tuple(row.ids[: row.prefix_len])
        # The tokens of this row that were counted with an earlier row of the same prompt.
        shared_length = row.prefix_len if shared and prompt in seen_prompts else 0
        if row.prefix_len:
            seen_prompts.add(prompt)
        tokens += length - shared_length
        attention_pairs += _causal_pairs(length) - _causal_pairs(shared_length)
    scored_tokens = sum(sum(row.loss_mask) for row in rows)
    return tokens, attention_pairs, scored_tokens


def _causal_pairs(length: int) -> int:
    """Count the pairs of a token and a token that it attends to, among the first `length` tokens of
    a row. Token number k, from 1, attends to k tokens."""
    return length * (length + 1) // 2


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measure how fast the device computes a large matrix product in `dtype`. Returns floating
    point operations per second."""
    size = SIZE[device.type]
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(size, size, generator=generator).to(device, dtype) for _ in range(2))
    fastest_s = _fastest_product_s(left, right)
    return 2.0 * size**3 / fastest_s  # a multiplication and an addition for each term


def _fastest_product_s(left: torch.Tensor, right: torch.Tensor) -> float:
    """Return the seconds of the fastest product of the two matrices. The product is repeated for
    `PROBE_S` seconds, at least three times. The first time does not count, because it warms up."""
    durations_s: list[float] = []
    while sum(durations_s) < PROBE_S or len(durations_s) < 3:
        _synchronize(left.device)
        began = time.perf_counter()
        matmul.linear(left, right)
        _synchronize(left.device)
        durations_s.append(time.perf_counter() - began)
    return min(durations_s[1:])


def _synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished all work that was queued. A CPU has none queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that this process has held at once since it started. On a GPU that is
    what torch had reserved there, plus the context of this process; on a CPU its resident
    memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) + CONTEXT_BYTES
    status = Path("/proc/self/status")  # on Linux
    if status.exists():  # preferred, because getrusage also counts the parent's before the fork
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):  # the peak of resident memory, such as "VmHWM: 512 kB"
                _, kib, *_ = line.split()
                return 1024 * int(kib)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts bytes, others KiB.
    return resident if sys.platform == "darwin" else 1024 * resident


def totals(run: RunDir) -> Result:
    """Summarise the measurements of a run over the training steps of all its attempts. Returns {}
    if the run has done no step.

    Keys:
        seconds: by phase; see `_phase_seconds`.
        tokens_per_s: the median of the steps.
        mfu: the share of the machine's rate that was used, averaged over all seconds of training.
        peak_memory: in bytes.
        effective_share: the mean share of groups (answers to one task) whose rewards differ (GRPO).
    """
    steps = _training_steps(run)
    if not steps:
        return {}
    train_seconds = sum(step["train_s"] for step in steps)
    totals_of_run: Result = {
        "seconds": _phase_seconds(steps),
        "tokens_per_s": statistics.median(step["tokens_per_s"] for step in steps),
        # Each step counts by its seconds. 1e-9: against a division by 0.
        "mfu": sum(step["mfu"] * step["train_s"] for step in steps) / max(train_seconds, 1e-9),
        "peak_memory": max(step["peak_memory"] for step in steps),
    }
    effective_groups = [step["groups_effective"] for step in steps if "groups_effective" in step]
    if effective_groups:
        totals_of_run["effective_share"] = round(statistics.fmean(effective_groups), 4)
    return totals_of_run


def _training_steps(run: RunDir) -> list[JsonObject]:
    """Read the metrics of the run's training steps, one object for each line of its file. Lines
    without `train_s` are left out, because they come from evaluations outside a step, such as the
    one at step 0."""
    lines, _ = read_lines(run.metrics, max_bytes=run.metrics.stat().st_size)  # all of the file
    return [line for line in lines if line.get("train_s") is not None]


def _phase_seconds(steps: Sequence[JsonObject]) -> dict[str, float]:
    """Sum the seconds of all steps by phase: `sample_s`, `reward_s` and `train_s`. A phase that
    some step lacks is left out, such as `sample_s` in SFT. A teacher's seconds are added to
    `train_s`, as in estimates."""
    seconds: dict[str, float] = {}
    for name in ("sample_s", "reward_s", "train_s"):
        if all(name in step for step in steps):
            seconds[name] = round(sum(step[name] for step in steps), 3)
    if "train_s" in seconds:
        teacher_seconds = sum(step.get("teacher_s", 0.0) for step in steps)
        seconds["train_s"] = round(seconds["train_s"] + teacher_seconds, 3)
    return seconds
