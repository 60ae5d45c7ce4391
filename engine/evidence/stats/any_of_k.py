"""pass@k: the chance that at least one of k sampled answers to a task is right, for one model and
as the paired change between two.

The estimator is that of Chen et al. 2021 (arXiv 2107.03374), averaged over tasks. Its intervals are
over tasks, because attempts at one task are no new tasks. They come from a bootstrap; if every task
is certain to be solved or certain not to be, they are Wilson's (for a change, Tango's).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engine.evidence.stats.basics.clusters import Clusters
from engine.evidence.stats.basics.distributions import pass_at_k
from engine.evidence.stats.bootstrap import paired_bootstrap
from engine.evidence.stats.inference import Interval, Side, tango_interval, wilson


@dataclass(frozen=True)
class PassAtK:
    """The chance that at least one of `k` attempts is right, or a change of this chance, with the
    ends of its 95 % interval."""

    k: int
    value: float
    low: float
    high: float

    def to_json(self) -> dict[str, object]:
        """The numbers with four digits, as a JSON object."""
        return {
            "k": self.k,
            "value": round(self.value, 4),
            "interval": [round(self.low, 4), round(self.high, 4)],
        }


def pass_at_each_k(results: Side) -> list[PassAtK]:
    """pass@k of one model for k = 2, 4, 8, ... and for the number of attempts itself.

    Every value of `results` is a success, 0 or 1. The number of attempts is the smallest number of
    scored attempts that any task has, so that each k is computed on the same tasks. Returns [] if
    it is below 2.
    """
    pass_rates = []
    for k in _ks_to_report(_fewest_attempts(results)):
        chances = {task: _pass_at_k_of_task(values, k) for task, values in results.values.items()}
        pass_rates.append(_mean_over_tasks(k, chances, results.groups, _interval_of_chances))
    return pass_rates


def change_of_pass_at_k(before: Side, after: Side) -> PassAtK | None:
    """pass@k of `after` minus pass@k of `before`, on the tasks that both have.

    `k` is the smallest number of scored attempts that one of those tasks has on either side.
    Returns None if that is below 2, or if no task is on both sides.
    """
    shared_tasks = before.values.keys() & after.values.keys()
    attempts_of_tasks = [
        min(len(before.values[task]), len(after.values[task])) for task in shared_tasks
    ]
    k = min(attempts_of_tasks, default=0)
    if k < 2:
        return None
    changes: dict[str, float] = {}
    for task in shared_tasks:
        chance_before = _pass_at_k_of_task(before.values[task], k)
        chance_after = _pass_at_k_of_task(after.values[task], k)
        changes[task] = chance_after - chance_before
    groups = {**after.groups, **before.groups}
    return _mean_over_tasks(k, changes, groups, _interval_of_changes)


def _fewest_attempts(results: Side) -> int:
    """The smallest number of scored attempts that any task has; 0 without tasks."""
    return min((len(values) for values in results.values.values()), default=0)


def _ks_to_report(attempts: int) -> list[int]:
    """The values of k to report: the powers of two 2, 4, 8, ... up to `attempts`, and `attempts`
    itself. Returns [] if there are fewer than 2 attempts."""
    if attempts < 2:
        return []
    powers_of_two = {2**exponent for exponent in range(1, attempts.bit_length())}
    return sorted(powers_of_two | {attempts})


def _pass_at_k_of_task(successes: Sequence[float], k: int) -> float:
    """pass@k of one task, the chance that one of `k` attempts is right, from the success (0 or 1)
    of each of its attempts."""
    correct = round(math.fsum(successes))
    return pass_at_k(len(successes), correct, k)


def _mean_over_tasks(
    k: int,
    value_of_task: Mapping[str, float],
    groups: Mapping[str, str],
    interval_of_certain: Callable[[Sequence[float], float], Interval],
) -> PassAtK:
    """The mean of pass@k, or of its change, over tasks, with its interval.

    Args:
        value_of_task: task id -> its pass@k, or the change of its pass@k.
        groups: task id -> the group of tasks that it belongs to, for tasks in a group.
        interval_of_certain: computes the interval of values for which a bootstrap does not work:
            whole numbers (it would draw only values that were seen) and equal numbers (it would
            draw the same again and again). Called with the values and the design effect of the
            groups.
    """
    values = list(value_of_task.values())
    mean = math.fsum(values) / len(values)
    clusters = Clusters.from_groups(value_of_task, groups)
    are_equal = min(values) == max(values)
    are_whole = set(values) <= {-1.0, 0.0, 1.0}
    if are_equal or are_whole:
        effect = clusters.design_effect(value_of_task) if clusters else 1.0
        interval = interval_of_certain(values, effect)
    else:
        values_of_task = {task: [value] for task, value in value_of_task.items()}
        drawn = paired_bootstrap(values_of_task, clusters=clusters)
        interval = Interval(drawn.low, drawn.high)
    return PassAtK(k, mean, interval.low, interval.high)


def _interval_of_chances(chances: Sequence[float], effect: float) -> Interval:
    """Wilson's interval of the mean pass@k; the sum of the chances, rounded, counts as solved
    tasks.

    `effect` is the design effect of groups: how many tasks carry as much information as one
    independent task. Both counts are divided by it.
    """
    return wilson(round(math.fsum(chances)) / effect, len(chances) / effect)


def _interval_of_changes(changes: Sequence[float], effect: float) -> Interval:
    """Tango's interval of the mean change of pass@k; the summed gains and losses, rounded, count as
    tasks.

    `effect` is the design effect of groups: how many tasks carry as much information as one
    independent task. All counts are divided by it.
    """
    gained = round(math.fsum(change for change in changes if change > 0))
    lost = round(-math.fsum(change for change in changes if change < 0))
    return tango_interval(gained / effect, lost / effect, len(changes) / effect)
