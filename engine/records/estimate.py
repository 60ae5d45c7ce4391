"""The estimate of a run: computed before the run is queued, and kept in its config.json."""

from typing import Literal

from engine.records.record import Record


class Range(Record):
    """An estimate as three numbers: low, likely and high."""

    low: float
    likely: float
    high: float


class PeakMemory(Record):
    """The peak of a run's memory on the device, in bytes by item.

    `total` is the larger of the peaks of training and sampling. `server` is a vLLM server that
    samples, without its key-value cache.
    """

    weights: int
    adapter_and_optimizer: int
    activations: int
    logits: int
    kv_cache: int
    server: int = 0
    overhead: int
    total: int


class TokenCounts(Record):
    """The likely numbers of tokens: `trained` on, and `generated` for training and evaluation."""

    trained: int
    generated: int


class Workload(Record):
    """The predicted work of a run, with which later estimates compare what was measured.

    Attributes:
        works: "training", "evaluation", "saving" -> the values of the fields of
            engine.cost.flops.Work, in their order.
        score_s: seconds in which one answer is scored.
        layers, weight_bytes: number of layers, and bytes of weights, of the model.
        first: whether the home had no finished run of the same base model before.
        memory: predicted peak bytes, before they are corrected by finished runs.
    """

    works: dict[str, list[int | float]]
    score_s: float
    layers: int
    weight_bytes: int
    first: bool
    memory: int


class EarlierWorkload(Record):
    """What versions up to 0.1.0 stored instead of a `Workload`. It does not correct estimates."""

    seconds: dict[str, float]
    memory: int


class Estimate(Record):
    """Time, money, memory and disk of a run.

    Attributes:
        steps: number of optimizer steps.
        hours: hours of the whole run.
        gpu_hours: hours of all of its devices together; their number is `gpus`.
        money: the price of `gpu_hours` at `gpu_hour_price`.
        seconds: phase -> likely seconds.
        least_memory: bytes of the device that the run needs with the fewest rows and the smallest
            microbatches; 0 in older files.
        memory_available, memory_free: all bytes of the device, and those that are free.
        fits, fit: whether and how well the memory of the run fits into the device.
        lower_this: the setting to lower if the run is too large or slow; "" if none helps.
        judge_calls, judge_cost: likely requests to judges (models that score), and their price.
        basis: what the time rests on: "measured", or "model" for a table of machines.
        calibrated_on_runs: how many finished runs corrected the estimate.
        uncalibrated: the predictions before that correction.
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
