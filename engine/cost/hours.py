"""The time of a run, corrected by finished runs: hours as low, likely and high.

With three or more finished runs of the algorithm, low and high are a 90 % prediction interval from
their ratios of actual to corrected time; with fewer, fixed factors.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.cost.calibration import CALIBRATE_FROM, Experience
from engine.cost.flops import Plan
from engine.cost.lowering import phases_of
from engine.cost.throughput import Speed
from engine.records.settings import STOP_EARLY_PATIENCE
from engine.sizing import ranks

LEVELS = ("low", "likely", "high")
# Without enough finished runs: factors for low and high, with speeds from the table ("model") or as
# measured on this machine.
SPREAD = {"model": (0.35, 2.5), "measured": (0.65, 1.6)}
_CALIBRATION_FLOOR = 0.08  # least standard deviation of the logarithm of a run's time
# The usual standard deviation of that logarithm, which counts as much as so many finished runs.
_USUAL_SPREAD, _USUAL_RUNS = 0.25, 6
_NORMAL_90 = 1.645  # standard deviations on each side of a 90 % interval
DOWNLOAD_RATE = 2e7  # bytes per second


@dataclass(frozen=True)
class PredictedTime:
    """The time of a run, corrected by finished runs.

    Attributes:
        likely_seconds: by phase.
        hours: of the whole run, by level ("low", "likely", "high").
        basis: "measured" (by finished runs, or the machine's speed) or "model" (a table of speeds).
        runs: number of finished runs that corrected the hours.
    """

    likely_seconds: Mapping[str, float]
    hours: Mapping[str, float]
    basis: str
    runs: int


def predicted_time(
    plan: Plan,
    speed: Speed,
    past_runs: Experience,
    algorithm: str,
    *,
    download_bytes: int,
    load: float = 0.0,
) -> PredictedTime:
    """Predict the time of a run of `algorithm`, from its plan and the machine's speed, corrected by
    the finished runs of the home.

    Args:
        download_bytes: what is downloaded before the run starts.
        load: how busy others keep the machine, as engine/core/hardware.py measures it.
    """
    phases = _corrected_phases(plan, speed, past_runs.factors(algorithm), download_bytes)
    corrected_hours = {level: sum(phases[level].values()) / 3600 for level in LEVELS}
    log_ratios = past_runs.log_time_ratios(algorithm)
    hours, basis, runs = hours_by_level(log_ratios, corrected_hours, speed.measured)
    # Only the low estimate counts on the earliest end that is possible.
    earliest_end = _earliest_end(plan, phases["low"])
    hours |= {"low": hours["low"] * earliest_end}
    if plan.device.kind == "cpu":
        hours |= _slowed_hours(hours, basis, load)
    return PredictedTime(phases["likely"], hours, basis, runs)


def _slowed_hours(hours: Mapping[str, float], basis: str, load: float) -> dict[str, float]:
    """The hours on a CPU that others keep busy, for the levels at which they count, by level. The
    high estimate counts on as much more time as the others take; so does the likely one where the
    speed is from a table (`basis` "model"), since a measured speed holds their share already."""
    slowed_levels = ("likely", "high") if basis == "model" else ("high",)
    return {level: hours[level] * (1.0 + load) for level in slowed_levels}


def _earliest_end(plan: Plan, seconds: Mapping[str, float]) -> float:
    """The share of the whole run's time after which it may end early, at the earliest; 1 unless
    `stop_early` is "heldout", which needs one evaluation more than its patience to end a run.

    `seconds` are those of the whole run, by phase; the start is not shortened.
    """
    settings = plan.settings
    total = sum(seconds.values())
    if settings.stop_early != "heldout" or total <= 0:
        return 1.0
    steps = min(settings.steps, (STOP_EARLY_PATIENCE + 1) * settings.eval_every)
    startup = seconds["startup"]
    return (startup + (total - startup) * steps / settings.steps) / total


def _corrected_phases(
    plan: Plan, speed: Speed, factors: Mapping[str, float], download_bytes: int
) -> dict[str, dict[str, float]]:
    """Seconds by level ("low", "likely", "high") and phase, corrected by `factors`.

    The start includes a download of `download_bytes`. A phase without a factor stays as it is. What
    several devices share takes less.
    """
    phases = {level: phases_of(plan, speed, level) for level in LEVELS}
    for seconds_by_phase in phases.values():
        seconds_by_phase["startup"] += download_bytes / DOWNLOAD_RATE
        for name in seconds_by_phase:
            seconds_by_phase[name] *= factors.get(name, 1.0)
    # Processes on one CPU take each other's cores.
    gpus = plan.settings.gpus if plan.device.kind != "cpu" else 1
    beside, sharded = plan.job.sampling_gpus > 0, plan.loaded.shards > 1
    return {
        level: ranks.seconds_on(seconds, gpus, beside=beside, sharded=sharded)
        for level, seconds in phases.items()
    }


def hours_by_level(
    log_ratios: Sequence[float], corrected_hours: dict[str, float], measured: bool
) -> tuple[dict[str, float], str, int]:
    """The range of a run's hours, from how far off the estimates of finished runs were.

    Returns the hours by level ("low", "likely", "high"); their basis, "measured" (by finished runs,
    or the machine's speed) or "model" (a table of speeds); and the number of finished runs.

    Args:
        log_ratios: for each finished run log(actual time / corrected time).
        corrected_hours: the predicted hours by level, corrected by what finished runs took.
        measured: whether the machine's speed was measured.
    """
    if len(log_ratios) >= CALIBRATE_FROM:
        return _interval_hours(log_ratios, corrected_hours["likely"]), "measured", len(log_ratios)
    basis = "measured" if measured else "model"
    low_factor, high_factor = SPREAD[basis]
    hours = {
        "low": corrected_hours["low"] * low_factor,
        "likely": corrected_hours["likely"],
        "high": corrected_hours["high"] * high_factor,
    }
    return hours, basis, len(log_ratios)


def _interval_hours(log_ratios: Sequence[float], likely: float) -> dict[str, float]:
    """The hours by level ("low", "likely", "high"): the `likely` hours times the middle and ends
    of a 90 % prediction interval; `log_ratios` are log(actual / corrected time) of past runs."""
    log_middle, half_width = _prediction_interval(log_ratios)
    return {
        "low": likely * math.exp(log_middle - half_width),
        "likely": likely * math.exp(log_middle),
        "high": likely * math.exp(log_middle + half_width),
    }


def _prediction_interval(log_ratios: Sequence[float]) -> tuple[float, float]:
    """The middle and half the width of a 90 % prediction interval for the log ratio (actual to
    corrected time) of the next run."""
    count = len(log_ratios)
    # The factor pulls the median towards 0, that is, towards the estimate as it is.
    middle = statistics.median(log_ratios) * count / (count + 1)
    # A few runs show little of the usual variation, so their standard deviation is mixed with
    # `_USUAL_SPREAD`, which counts as much as `_USUAL_RUNS` runs.
    squares = (count - 1) * statistics.variance(log_ratios)  # sum of squared deviations
    degrees_of_freedom = count - 1 + _USUAL_RUNS
    spread = math.sqrt((squares + _USUAL_RUNS * _USUAL_SPREAD**2) / degrees_of_freedom)
    # The last factor makes it an interval for a new run, not for the mean of the runs.
    half_width = _NORMAL_90 * max(spread, _CALIBRATION_FLOOR) * math.sqrt(1 + 1 / count)
    return middle, half_width
