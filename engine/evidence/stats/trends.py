"""What a series of values, one for each training step, shows: its recent mean, its trend,
whether a bad share lasts, and its spikes."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.evidence.stats import thresholds as limits


def recent_values(values: Sequence[float]) -> list[float]:
    """The values of the last ten steps (`RECENT_STEPS`); [] if there are fewer than five values."""
    return list(values[-limits.RECENT_STEPS :]) if len(values) >= limits.FEWEST_STEPS else []


def mean(values: Sequence[float]) -> float:
    """The mean of at least one value."""
    return math.fsum(values) / len(values)


def mean_or_none(values: Sequence[float]) -> float | None:
    """The mean; None if there are no values."""
    return mean(values) if values else None


def recent_mean(values: Sequence[float]) -> float | None:
    """The mean over the last ten steps; None if there are fewer than five values."""
    return mean_or_none(recent_values(values))


@dataclass(frozen=True)
class Trend:
    """How a series changed: the mean of its early part (`first`), that of its late part (`last`),
    and `z`, the change (last - first) in standard errors."""

    first: float
    last: float
    z: float

    @property
    def change(self) -> float:
        """The late mean minus the early one."""
        return self.last - self.first

    @property
    def rose(self) -> bool:
        """Whether the series rose by more than its noise."""
        return self.z >= limits.TREND_Z

    @property
    def fell(self) -> bool:
        """Whether the series fell by more than its noise."""
        return self.z <= -limits.TREND_Z


def trend(values: Sequence[float]) -> Trend | None:
    """The last third of a series compared with its first third; None if it has fewer than
    `FEWEST_TREND_STEPS` values."""
    if len(values) < limits.FEWEST_TREND_STEPS:
        return None
    third = len(values) // 3
    return change_between(values[:third], values[-third:])


def change_between(early: Sequence[float], late: Sequence[float]) -> Trend:
    """The change from early values to as many later ones, at least two of each.

    If neither the early nor the late values vary, z is infinite with the sign of the change, or 0
    if nothing changed.
    """
    change = mean(late) - mean(early)
    standard_error = math.sqrt(
        (statistics.variance(early) + statistics.variance(late)) / len(early)
    )
    if standard_error != 0.0:
        z_score = change / standard_error
    elif change:
        z_score = math.copysign(math.inf, change)
    else:
        z_score = 0.0
    return Trend(mean(early), mean(late), z_score)


def level_if_lasting(values: Sequence[float], limit: float) -> float | None:
    """The recent mean of a share of bad answers, if it is above `limit` and not falling by itself.

    `values` has one share for each step. Returns None if there are too few, if the mean is less
    than its standard error above `limit`, and if it clearly falls and is not so high
    (`URGENT_SHARE`) that waiting is too costly.
    """
    recent = recent_values(values)
    if not recent:
        return None
    level = mean(recent)
    # A run is tested after every step: a share at the limit would pass it by chance at some step.
    standard_error = statistics.stdev(recent) / math.sqrt(len(recent))
    if level - standard_error <= limit:
        return None
    if level <= limits.URGENT_SHARE and _clearly_falls(values, recent):
        return None
    return level


def _clearly_falls(values: Sequence[float], recent: Sequence[float]) -> bool:
    """Whether a share fell to `IMPROVED_PART` of its earlier mean: `recent` against the first steps
    of all `values`, or the second half of `recent` against its first half."""
    half = len(recent) // 2
    fell_over_run = mean(recent) <= limits.IMPROVED_PART * mean(values[: limits.RECENT_STEPS])
    falls_now = mean(recent[half:]) <= limits.IMPROVED_PART * mean(recent[:half])
    return fell_over_run or falls_now


class Spike(NamedTuple):
    """A point of a curve that is far above the usual value, the median of the steps before it."""

    step: int
    value: float
    usual_value: float


def spikes_of(points: Sequence[tuple[int, float]], floor: float) -> list[Spike]:
    """The points (step, value) of a curve that are far above the median of the steps before them.

    Values up to `floor` are no spikes, and neither are points with too few steps before them.
    """
    spikes: list[Spike] = []
    earlier_values: list[float] = []
    for step, value in points:
        # Step 0 is no training step, and 0 is no measured norm: skip both, as spikes and in the
        # median.
        if value <= 0.0 or step <= 0:
            continue
        recent_values = earlier_values[-limits.SPIKE_MEMORY_STEPS :]
        earlier_values.append(value)
        if len(recent_values) < limits.FEWEST_STEPS:
            continue
        usual_value = statistics.median(recent_values)
        if value > limits.SPIKE_FACTOR * usual_value and value > floor:
            spikes.append(Spike(step, value, usual_value))
    return spikes
