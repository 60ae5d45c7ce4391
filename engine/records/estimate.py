"""What a run was expected to take: computed before it is queued, kept in its config.json."""

from typing import Literal

from engine.records.record import Record


class Range(Record):
    """A figure as low, likely and high."""

    low: float
    likely: float
    high: float


class PeakMemory(Record):
    """Bytes on the device when most are held, by item; `total` counts training or sampling, and
    `server` those of a vLLM server that samples, without its cache."""

    weights: int
    adapter_and_optimizer: int
    activations: int
    logits: int
    kv_cache: int
    server: int = 0
    overhead: int
    total: int


class TokenCounts(Record):
    """Likely tokens: trained on, and generated for training and evaluation."""

    trained: int
    generated: int


class Workload(Record):
    """What a run computes, for the calibration of later estimates.

    Attributes:
        works: figures of each part of its course (engine.cost.flops.Work, in order).
        score_s: seconds of one score.
        first: whether the home had no run of its base model before.
        memory: predicted peak bytes, before correction.
    """

    works: dict[str, list[int | float]]
    score_s: float
    layers: int
    weight_bytes: int
    first: bool
    memory: int


class EarlierWorkload(Record):
    """What versions up to 0.1.0 stored instead of a Workload. It is not used for calibration."""

    seconds: dict[str, float]
    memory: int


class Estimate(Record):
    """Time, money, memory and disk of a run.

    Attributes:
        hours: of the whole run.
        gpu_hours: of all its devices together, of which there are `gpus`.
        money: gpu_hours at `gpu_hour_price`.
        seconds: the likely time by phase.
        least_memory: bytes of the device that the run needs with the fewest rows and the smallest
            microbatches; 0 in older files.
        memory_available, memory_free: bytes of the device.
        fit: of the peak memory into the device.
        lower_this: the setting whose lowering helps most, in words; "" where none does.
        judge_calls, judge_cost: likely requests to judges, and the money for them.
        basis: "measured" or "model" (a table of machines).
        calibrated_on_runs: finished runs that corrected it.
    """

    steps: int
    hours: Range
    gpu_hours: Range
    money: Range
    gpu_hour_price: float
    seconds: dict[str, float]
    tokens: TokenCounts
    peak_memory: PeakMemory
    least_memory: int = 0
    memory_available: int
    memory_free: int
    device: str
    gpus: int = 1
    fits: bool
    fit: Literal["fits", "tight", "too_big"]
    disk_bytes: int
    disk_fits: bool
    lower_this: str
    judge_calls: float = 0.0
    judge_cost: float = 0.0
    basis: str
    calibrated_on_runs: int
    uncalibrated: Workload | EarlierWorkload
