"""The time of a run, corrected by finished runs: hours as low, likely and high.

With three or more finished runs of the algorithm, low and high are a 90 % prediction interval from
their ratios of actual to corrected time; with fewer, fixed factors.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.core.hints import Call
from engine.cost import throughput
from engine.cost.calibration import CALIBRATE_FROM, Experience
from engine.cost.flops import Plan
from engine.cost.lowering import phases_of
from engine.cost.throughput import Speed
from engine.executors.admission import compute_of
from engine.home.rows import LOCAL
from engine.home.run_dir import Home
from engine.models.sizing import ranks
from engine.records.estimate import Estimate, Range
from engine.records.settings import STOP_EARLY_PATIENCE

LEVELS = ("low", "likely", "high")
# The factors for low and high if there are too few finished runs: with speeds from the table
# ("model"), and with speeds measured on this machine.
SPREAD = {"model": (0.35, 2.5), "measured": (0.65, 1.6)}
_CALIBRATION_FLOOR = 0.08  # least standard deviation of the logarithm of a run's time
# The usual standard deviation of that logarithm, and how many finished runs it weighs as much as.
_USUAL_SPREAD, _USUAL_RUNS = 0.25, 6
_NORMAL_90 = 1.645  # standard deviations on each side of a 90 % interval
DOWNLOAD_RATE = 2e7  # bytes per second
_WIDE = 10.0  # beyond this factor between low and high a range says little
# The arguments of a submit that estimate_cost and dry_run take too.
_ESTIMATE_ARGUMENTS = ("env_id", "model", "algorithm", "settings", "then", "vary")
# What a summary says of such a range.
WIDE_NOTE = "a wide range: the first call in next measures more"


def narrowing_call(
    home: Home, hours: Range, basis: str, arguments: Mapping[str, object]
) -> Call | None:
    """Make the call of a tool that narrows a wide range of hours; None if the range is not wide, or
    if the run goes to another machine, where nothing can be tried beforehand.

    While the machine is still being measured, that is the estimate once more; otherwise two real
    steps of the run, whose seconds the reply tells.

    Args:
        basis: "model" if the hours come from a table of speeds, "measured" if not.
        arguments: the arguments with which the run would be submitted.
    """
    settings = arguments.get("settings")
    is_here = not isinstance(settings, Mapping) or compute_of(settings) == LOCAL
    if not is_here or not is_wide(hours):
        return None
    estimate_arguments = {
        name: arguments[name] for name in _ESTIMATE_ARGUMENTS if name in arguments
    }
    if basis == "model" and throughput.is_being_measured(home):
        return Call("estimate_cost", estimate_arguments)
    return Call("dry_run", {**estimate_arguments, "smoke": True})


def is_wide(hours: Range) -> bool:
    """Tell whether a range of hours spans so much (a factor of more than ten) that it says
    little."""
    return hours.high > _WIDE * hours.low


def unmeasured_warning(home: Home, figures: Estimate) -> list[str]:
    """Return a warning if `figures` (an estimate) come from a table while the machine is measured.

    Returns [] if they rest on measurements, or if no measurement is under way.
    """
    if figures.basis != "model" or not throughput.is_being_measured(home):
        return []
    return [
        "this machine is still being measured (it is busy): the hours come from a table of "
        "machines, times what others take of it; estimate_cost in a minute has measured ones"
    ]


@dataclass(frozen=True)
class PredictedTime:
    """The time of a run, corrected by finished runs.

    Attributes:
        likely_seconds: phase -> likely seconds.
        hours: level ("low", "likely", "high") -> hours of the whole run.
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
    """Predict the time of a run from its plan and the machine's speed, corrected by finished runs.

    Args:
        plan: the run.
        speed: the speed of the machine.
        past_runs: the finished runs of the home.
        algorithm: the run's algorithm; finished runs of the same algorithm correct its training.
        download_bytes: bytes that are downloaded before the run starts.
        load: how busy other processes keep the machine, as engine/core/hardware.py measures it.
    """
    phases = _corrected_phases(plan, speed, past_runs.factors(algorithm), download_bytes)
    corrected_hours = {level: sum(phases[level].values()) / 3600 for level in LEVELS}
    log_ratios = past_runs.log_time_ratios(algorithm)
    hours, basis, runs = hours_by_level(log_ratios, corrected_hours, speed.measured)
    # Only the low estimate assumes that the run stops early, at the first possible moment.
    earliest_end = _earliest_end(plan, phases["low"])
    hours |= {"low": hours["low"] * earliest_end}
    if plan.device.kind == "cpu":
        hours |= _slowed_hours(hours, basis, load)
    return PredictedTime(phases["likely"], hours, basis, runs)


def _slowed_hours(hours: Mapping[str, float], basis: str, load: float) -> dict[str, float]:
    """Return level -> hours on a CPU that other processes keep busy, for the levels that change.

    The "high" hours grow by the share of the CPU that others take (`load`). The "likely" hours grow
    too if the speed comes from a table (`basis` is "model"): a measured speed was measured while
    the others were running, so it includes their share already.
    """
    slowed_levels = ("likely", "high") if basis == "model" else ("high",)
    return {level: hours[level] * (1.0 + load) for level in slowed_levels}


def _earliest_end(plan: Plan, seconds: Mapping[str, float]) -> float:
    """Return the share of the run's time after which it may end early, at the earliest.

    The share is 1 unless `stop_early` is "heldout". That setting ends a run after its patience (a
    number of evaluations without a gain) and one more evaluation. `seconds` maps each phase to the
    seconds of the whole run; the start is never shortened.
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
    """Return level ("low", "likely", "high") -> phase -> seconds, corrected by `factors`.

    The start includes a download of `download_bytes`. A phase without a factor is not corrected.
    Work that several GPUs share takes less time.
    """
    phases = {level: phases_of(plan, speed, level) for level in LEVELS}
    for seconds_by_phase in phases.values():
        seconds_by_phase["startup"] += download_bytes / DOWNLOAD_RATE
        for name in seconds_by_phase:
            seconds_by_phase[name] *= factors.get(name, 1.0)
    # On a CPU more processes save no time, because they take each other's cores.
    gpus = plan.settings.gpus if plan.device.kind != "cpu" else 1
    beside = plan.job.sampling_gpus > 0  # some GPUs sample beside those that train
    sharded = plan.loaded.shards > 1  # each GPU holds a part of the base model's layers
    return {
        level: ranks.seconds_on(seconds, gpus, beside=beside, sharded=sharded)
        for level, seconds in phases.items()
    }


def hours_by_level(
    log_ratios: Sequence[float], corrected_hours: dict[str, float], measured: bool
) -> tuple[dict[str, float], str, int]:
    """Return the range of a run's hours, from how far off the estimates of finished runs were.

    Returns (level -> hours, basis, number of finished runs). The levels are "low", "likely" and
    "high". The basis is "measured" if finished runs or a measured speed are behind the hours,
    "model" if they come from a table of speeds.

    Args:
        log_ratios: for each finished run log(actual time / corrected time).
        corrected_hours: level -> predicted hours, corrected by finished runs.
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
    """Return level ("low", "likely", "high") -> hours of a 90 % prediction interval.

    `likely` are the predicted hours. `log_ratios` holds log(actual / corrected time) of past runs.
    """
    log_middle, half_width = _prediction_interval(log_ratios)
    return {
        "low": likely * math.exp(log_middle - half_width),
        "likely": likely * math.exp(log_middle),
        "high": likely * math.exp(log_middle + half_width),
    }


def _prediction_interval(log_ratios: Sequence[float]) -> tuple[float, float]:
    """Return the middle and half the width of a 90 % prediction interval for the next run.

    The interval is one of log(actual / corrected time); `log_ratios` are those of past runs.
    """
    count = len(log_ratios)
    # The factor count / (count + 1) pulls the median towards 0, which is the estimate unchanged.
    middle = statistics.median(log_ratios) * count / (count + 1)
    # A few runs show little of the usual variation, so their standard deviation is mixed with
    # `_USUAL_SPREAD`, which counts as much as `_USUAL_RUNS` runs.
    squares = (count - 1) * statistics.variance(log_ratios)  # sum of squared deviations
    degrees_of_freedom = count - 1 + _USUAL_RUNS
    spread = math.sqrt((squares + _USUAL_RUNS * _USUAL_SPREAD**2) / degrees_of_freedom)
    # The last factor makes it an interval for a new run, not for the mean of the runs.
    half_width = _NORMAL_90 * max(spread, _CALIBRATION_FLOOR) * math.sqrt(1 + 1 / count)
    return middle, half_width
