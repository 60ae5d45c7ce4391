"""The mean of a difference over tasks, with interval and p value by resampling the tasks
(bootstrap).

Standard library only; held against simulation in tests/engine/evidence/stats/test_inference.py.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.evidence.stats.basics.clusters import Clusters
from engine.evidence.stats.basics.distributions import (
    normal_quantile,
    normal_tail,
    t_cdf,
    t_quantile,
)

RESAMPLES = 4000  # about a hundred of them lie beyond each end of a 95 % interval


@dataclass(frozen=True)
class Bootstrap:
    """A mean over tasks with its bootstrap interval and the two-sided p value for a mean of 0."""

    mean: float
    low: float
    high: float
    p: float


def paired_bootstrap(
    diffs_by_task: Mapping[str, Sequence[float]],
    seed: int = 0,
    *,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    clusters: Clusters | None = None,
) -> Bootstrap:
    """The mean paired difference over tasks, with interval and p value by a bootstrap over tasks.

    The attempts of a task are averaged first: more attempts make a task's own value more precise
    but are no new tasks. With `clusters`, whole groups of tasks are resampled instead of tasks.

    Args:
        diffs_by_task: task id -> one difference per attempt, at least one.
        seed: of the resampling. The same seed gives the same result for any order of the tasks.
        confidence: coverage of the interval, 0.95 for a 95 % interval.
        resamples: how many means are drawn.
        clusters: the tasks by group; None if all tasks are independent.

    Raises ValueError if there are no tasks.
    """
    means = _means_of_tasks(diffs_by_task)
    task_count = len(means)
    if task_count == 0:
        raise ValueError("paired_bootstrap needs at least one task")
    centre = math.fsum(means) / task_count
    if clusters is not None:
        mean_of_task = dict(zip(sorted(diffs_by_task), means, strict=True))
        return _over_groups(centre, mean_of_task, clusters, seed, confidence, resamples)
    if task_count == 1 or min(means) == max(means):
        return _without_spread(centre, task_count)
    return _expanded_percentile(
        centre, _drawn_means(means, seed, resamples), task_count, confidence
    )


def _over_groups(
    centre: float,
    mean_of_task: Mapping[str, float],
    clusters: Clusters,
    seed: int,
    confidence: float,
    resamples: int,
) -> Bootstrap:
    """The result of drawing whole groups of tasks, with replacement, `resamples` times. For a
    single group both ends of the interval are infinite.

    Args:
        centre: the mean over all tasks.
        mean_of_task: task id -> its mean.
        clusters: the tasks of each group.
        confidence: coverage of the interval, 0.95 for a 95 % one.
    """
    groups = [  # (sum of the means of its tasks, number of its tasks)
        (math.fsum(mean_of_task[task] for task in tasks), len(tasks)) for tasks in clusters.members
    ]
    if clusters.count < 2:
        return Bootstrap(centre, low=-math.inf, high=math.inf, p=1.0)
    all_means_are_equal = len({total / count for total, count in groups}) == 1
    if all_means_are_equal:
        return _without_spread(centre, clusters.count)
    rng = random.Random(seed)
    drawn_means = []
    for _ in range(resamples):
        drawn = rng.choices(groups, k=clusters.count)
        drawn_total = sum(total for total, _ in drawn)
        drawn_tasks = sum(count for _, count in drawn)
        drawn_means.append(drawn_total / drawn_tasks)
    return _expanded_percentile(centre, sorted(drawn_means), clusters.count, confidence)


def deviation_of_changes(changes: Sequence[float], mean: float, span: float) -> float:
    """The standard deviation of the tasks' changes around their mean.

    If all tasks changed by the same amount it would be 0, which would mean that any change can be
    detected. Then it is computed as if one more task had changed by `span` more than the others.
    """
    squared_deviations = math.fsum((change - mean) ** 2 for change in changes)
    variance = squared_deviations / max(1, len(changes) - 1)
    if variance == 0.0:
        return span / math.sqrt(len(changes) + 1)
    return math.sqrt(variance)


def _expanded_percentile(
    centre: float, drawn_means: Sequence[float], task_count: int, confidence: float
) -> Bootstrap:
    """The result of resampling, by the expanded percentile interval (Hesterberg 2015).

    The percentile interval is widened as much as Student's t requires at this number of tasks; p is
    computed on the same widened scale.

    Args:
        centre: the mean of the data.
        drawn_means: the resampled means, sorted.
        task_count: how many tasks (or groups) were resampled.
        confidence: coverage of the interval, 0.95 for a 95 % one.
    """
    df = task_count - 1
    widening = math.sqrt(task_count / df)
    # The share of resamples beyond each end of the widened interval.
    tail = normal_tail(t_quantile(0.5 + confidence / 2.0, df) * widening)
    low, high = _quantile(drawn_means, tail), _quantile(drawn_means, 1.0 - tail)
    # The z value of 0 among the drawn means, divided by the factor that widened the interval.
    t = normal_quantile(_share_below_zero(drawn_means)) / widening
    p = min(1.0, 2.0 * t_cdf(-abs(t), df))
    return Bootstrap(centre, low=low, high=high, p=p)


def _without_spread(difference: float, task_count: int) -> Bootstrap:
    """The result if all tasks differ by the same amount, so that resampling would show no spread.

    Both ends of the interval are that amount. p is 0, or 1 for a single task or an amount of 0.
    """
    shows_nothing = task_count == 1 or difference == 0.0
    p = 1.0 if shows_nothing else 0.0
    return Bootstrap(difference, low=difference, high=difference, p=p)


def _means_of_tasks(values_by_task: Mapping[str, Sequence[float]]) -> list[float]:
    """The mean of each task's values, in the alphabetical order of the task ids."""
    means = []
    for task in sorted(values_by_task):
        values = values_by_task[task]
        means.append(math.fsum(values) / len(values))
    return means


def _drawn_means(values: Sequence[float], seed: int, resamples: int) -> list[float]:
    """The sorted means of `resamples` samples, each drawn with replacement and as large as
    `values`.

    The same `seed` gives the same means.
    """
    count = len(values)
    draw = random.Random(seed).choices
    return sorted(sum(draw(values, k=count)) / count for _ in range(resamples))


def _share_below_zero(drawn_means: Sequence[float]) -> float:
    """The share of the resampled means that lie below 0; a mean of exactly 0 counts half.

    The result is never 0 or 1: at least half a resample is taken to lie on each side, because a
    finite number of resamples cannot show a p of 0.
    """
    resamples = len(drawn_means)
    negative_count = sum(mean < 0.0 for mean in drawn_means)
    zero_count = sum(mean == 0.0 for mean in drawn_means)
    below_zero = negative_count + 0.5 * zero_count
    return min(max(below_zero, 0.5), resamples - 0.5) / resamples


def _quantile(sorted_values: Sequence[float], share: float) -> float:
    """The quantile of sorted values at `share` (0 to 1), interpolated linearly between two
    values."""
    position = share * (len(sorted_values) - 1)  # such as 1.5: halfway between two values
    below = int(position)
    above = min(below + 1, len(sorted_values) - 1)
    step = sorted_values[above] - sorted_values[below]
    return sorted_values[below] + (position - below) * step
