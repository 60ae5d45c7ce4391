"""The statistics behind a verdict, paired by task.

Rates get Wilson intervals. Two models on the same tasks are compared pair by pair: by McNemar's
mid-p test and Tango's score interval if every value is 0 or 1, else by a bootstrap over tasks. If
tasks have groups, groups are counted instead of tasks. `paired_verdict` turns the test into one
word. Standard library only; held against scipy and simulation in its test.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from engine.core.format import whole_percent
from engine.evidence.stats.basics.clusters import Clusters
from engine.evidence.stats.basics.distributions import binomial_cdf, log_binomial, normal_quantile
from engine.evidence.stats.bootstrap import RESAMPLES, deviation_of_changes, paired_bootstrap

ALPHA = 0.05
POWER = 0.8
MARGIN = 0.05  # a difference this small (5 points, or 5 % of the rewards' span) is no difference
MAX_ERROR_SHARE = 0.05  # of failed scorings; above it the scorer is measured, not the model
NEGLIGIBLE = 1e-9  # a number this near to 0 is a rounding error
FEWEST_TASKS = 10  # for a bootstrap; an interval of fewer means nothing

Word = Literal["better", "worse", "no_difference", "inconclusive", "unknown"]
VERDICTS: tuple[Word, ...] = ("better", "worse", "no_difference", "inconclusive", "unknown")


@dataclass(frozen=True)
class Interval:
    """A confidence interval from `low` to `high`."""

    low: float
    high: float

    def within(self, margin: float) -> bool:
        """Whether the whole interval lies between -margin and margin."""
        return -margin <= self.low and self.high <= margin

    @property
    def excludes_zero(self) -> bool:
        """Whether 0 lies outside the interval; an end within `NEGLIGIBLE` of 0 counts as 0."""
        return self.low > NEGLIGIBLE or self.high < -NEGLIGIBLE

    def with_zero(self) -> "Interval":
        """The interval, extended if necessary so that it contains 0."""
        return Interval(min(self.low, 0.0), max(self.high, 0.0))


def wilson(successes: float, trials: float, confidence: float = 0.95) -> Interval:
    """Wilson's (1927) score interval for a rate of successes in trials. Returns (0, 1) for no
    trials.

    `confidence` is its coverage, 0.95 for a 95 % interval. Counts may be fractions: those of tasks
    in groups are divided by the design effect of the groups.
    """
    if trials <= 0:
        return Interval(0.0, 1.0)
    z_score = normal_quantile(0.5 + confidence / 2.0)
    rate = successes / trials
    z_squared = z_score * z_score
    # The interval is (centre ± spread) / scale.
    centre = rate + z_squared / (2.0 * trials)
    variance = rate * (1.0 - rate) / trials + z_squared / (4.0 * trials * trials)
    spread = z_score * math.sqrt(variance)
    scale = 1.0 + z_squared / trials
    # At the rates 0 and 1 the end is exact; computing it would leave a rounding error.
    low = 0.0 if successes == 0 else (centre - spread) / scale
    high = 1.0 if successes == trials else (centre + spread) / scale
    return Interval(max(0.0, low), min(1.0, high))


def mcnemar_midp(gained: int, lost: int) -> float:
    """The two-sided mid-p value of McNemar's test, from 0 to 1. Returns 1 if no pair changed.

    `gained` and `lost` are the numbers of pairs that changed in the one and in the other direction.
    The mid-p is the exact p with only half of the probability of the observed outcome, which makes
    it less strict at small counts (Fagerland, Lydersen and Laake 2013).
    """
    changed = gained + lost
    fewer = min(gained, lost)
    if changed == 0:
        return 1.0
    # Without a difference, a changed pair changes in either direction with probability 0.5.
    chance_of_this = math.exp(log_binomial(fewer, changed, 0.5))
    exact_p = 2.0 * binomial_cdf(fewer, changed, 0.5)
    # The exact p counts the outcome in both tails; half of it is taken off in each.
    return min(1.0, exact_p - chance_of_this)


def tango_interval(gained: float, lost: float, tasks: float, confidence: float = 0.95) -> Interval:
    """Tango's (1998) score interval for the paired difference (gained - lost) / tasks of two rates.

    Unlike Wald's interval it has a width even if no task changed, and stays inside [-1, 1]. It
    excludes 0 exactly if McNemar's test without correction is significant. Returns (-1, 1) without
    tasks. `confidence` is its coverage. Counts may be fractions, as in `wilson`.
    """
    if tasks <= 0:
        return Interval(-1.0, 1.0)
    z_score = normal_quantile(0.5 + confidence / 2.0)
    observed_difference = (gained - lost) / tasks
    # The lower bound is the difference whose score is z, the upper one that whose score is -z. If
    # all tasks were lost (or gained) that bound is the end of the scale and need not be searched.
    low, high = -1.0, 1.0
    if lost != tasks:
        low = _score_bound(gained, lost, tasks, z_score, low=-1.0, high=observed_difference)
    if gained != tasks:
        high = _score_bound(gained, lost, tasks, -z_score, low=observed_difference, high=1.0)
    return Interval(low, high)


def _tango_score(gained: float, lost: float, tasks: float, delta: float) -> float:
    """Tango's score (a z value) for the hypothesis that the true difference is `delta`.

    `gained` of the `tasks` were gained, `lost` were lost.
    """
    lost_rate = _likeliest_lost_rate(gained, lost, tasks, delta)
    variance = tasks * (2.0 * lost_rate + delta * (1.0 - delta))
    gap = gained - lost - tasks * delta  # observed minus expected
    if variance <= 0.0:  # under the hypothesis one result is certain: this one (gap 0) or another
        return 0.0 if gap == 0.0 else math.copysign(math.inf, gap)
    return gap / math.sqrt(variance)


def _likeliest_lost_rate(gained: float, lost: float, tasks: float, delta: float) -> float:
    """The maximum likelihood estimate of the share of lost tasks if the true difference is `delta`.

    `gained` of the `tasks` were gained, `lost` were lost. The share x is the root of the quadratic
    equation 2 tasks x^2 + linear x + constant = 0 (Tango 1998).
    """
    linear = -(gained + lost) + (2 * tasks - gained + lost) * delta
    constant = -lost * delta * (1.0 - delta)
    root = math.sqrt(max(0.0, linear * linear - 8.0 * tasks * constant))
    return max(0.0, (root - linear) / (4.0 * tasks))


def _score_bound(
    gained: float, lost: float, tasks: float, z_score: float, *, low: float, high: float
) -> float:
    """The difference in [low, high] at which Tango's score is `z_score`, found by bisection.

    The score falls as the difference grows. `gained` of the `tasks` were gained, `lost` were lost.
    """
    for _ in range(60):  # halves the interval down to the precision of a float
        middle = 0.5 * (low + high)
        if _tango_score(gained, lost, tasks, middle) > z_score:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


def smallest_detectable_gap(
    tasks: float, discordant: float, *, alpha: float = ALPHA, power: float = POWER
) -> float:
    """The smallest difference of two paired rates that a test on this many `tasks` would show; at
    most 1.

    Miettinen's sample size formula (1968; Connor 1987) is solved for the gap by bisection.

    Args:
        discordant: how many of the tasks came out differently on the two sides. One more is added,
            so that a sample without any does not claim to detect every difference.
        alpha: level of the test.
        power: the probability of a significant result if the difference exists.
    """
    if tasks <= 0:
        return 1.0
    discordant_share = (discordant + 1) / (tasks + 1)
    # k tasks gained and none lost have a mid-p value of 0.5**k; this is the first k within alpha.
    fewest_gained = math.ceil(math.log(alpha) / math.log(0.5))
    least_gap = fewest_gained / tasks
    low, high = 0.0, 1.0
    for _ in range(60):  # halves the interval down to the precision of a float
        middle = 0.5 * (low + high)
        # A gap of `middle` means that at least this share of the tasks comes out differently.
        if _tasks_for_power(middle, max(discordant_share, middle), alpha, power) > tasks:
            low = middle
        else:
            high = middle
    smallest_gap = max(high, least_gap)
    return min(1.0, smallest_gap)


def tasks_needed(
    gap: float, discordant_share: float, *, alpha: float = ALPHA, power: float = POWER
) -> int:
    """The number of tasks at which a difference of two paired rates is found with probability
    `power`.

    Args:
        gap: the difference, above 0 and at most 1.
        discordant_share: share of tasks that come out differently on the two sides; at least `gap`
            is assumed.
        alpha: level of the test.

    Raises ValueError if the gap is 0 or less.
    """
    if gap <= 0.0:
        raise ValueError("no number of tasks shows a gap of 0")
    tasks = _tasks_for_power(gap, max(discordant_share, gap), alpha, power)
    # 1e-9 is subtracted so that a rounding error does not raise a whole number to the next one.
    return math.ceil(tasks - 1e-9)


def _tasks_for_power(gap: float, discordant_share: float, alpha: float, power: float) -> float:
    """Miettinen's sample size for a paired difference `gap`, not rounded; inf for a gap of 0.

    `discordant_share` is the share of tasks that come out differently, at least `gap`. A test at
    the level `alpha` then shows the gap with the probability `power`.
    """
    if gap <= 0.0:
        return math.inf
    z_alpha, z_power = normal_quantile(1.0 - alpha / 2.0), normal_quantile(power)
    spread = math.sqrt(max(0.0, discordant_share - gap * gap))
    return ((z_alpha * math.sqrt(discordant_share) + z_power * spread) / gap) ** 2


def smallest_detectable_mean(
    n: int, sd: float, *, alpha: float = ALPHA, power: float = POWER
) -> float:
    """The smallest mean paired difference that a test on `n` tasks would show. Returns inf for
    fewer than two tasks.

    Args:
        sd: standard deviation of the differences over tasks.
        alpha: level of the test.
        power: the probability of a significant result if the difference exists.
    """
    if n <= 1:
        return math.inf
    z_alpha, z_power = normal_quantile(1.0 - alpha / 2.0), normal_quantile(power)
    return (z_alpha + z_power) * sd / math.sqrt(n)


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct the p values of several tests for their number, by Holm (1979). The order is kept."""
    test_count = len(p_values)
    ascending_order = sorted(range(test_count), key=lambda index: p_values[index])
    adjusted_p_values = [0.0] * test_count
    largest = 0.0  # so far: an adjusted p is never below that of a smaller p
    for rank, index in enumerate(ascending_order):
        # The smallest p is multiplied by the number of tests, the next one by one less, and so on.
        largest = max(largest, (test_count - rank) * p_values[index])
        adjusted_p_values[index] = min(1.0, largest)
    return adjusted_p_values


@dataclass(frozen=True)
class Side:
    """One model's results on a set of tasks.

    Attributes:
        values: task id -> one value per attempt whose scoring worked.
        attempts: the number of all attempts, also those whose scoring failed.
        errors: the number of attempts whose scoring failed.
        groups: task id -> its group, for tasks that have one.
    """

    values: Mapping[str, Sequence[float]]
    attempts: int
    errors: int = 0
    groups: Mapping[str, str] = field(default_factory=dict)

    @property
    def error_share(self) -> float:
        """The share of attempts whose scoring failed; 0 without attempts."""
        return self.errors / self.attempts if self.attempts else 0.0


@dataclass(frozen=True)
class PairedVerdict:
    """The result of a paired comparison, with the numbers behind it. Numbers are None if nothing
    was compared.

    Attributes:
        verdict: one word, see `paired_verdict`.
        reason: why there is no verdict, or why it is weaker than its numbers; else "".
        before, after: the means over the paired tasks.
        diff: after - before; `low` and `high` are the ends of its interval.
        p: the p value of the test that there is no difference.
        n: how many tasks were paired; `unpaired` tasks had values on one side only.
        groups: how many groups the tasks form; 0 if all tasks are independent.
        detectable: the smallest difference that this many tasks would show.
        method: the test and the interval that were used, in words.
        margin: a difference smaller than this counts as none.
        errors: failed scorings before and after.
        gained, lost: ids of the tasks that became better or worse, the largest change first.
    """

    verdict: Word
    reason: str
    before: float | None = None
    after: float | None = None
    diff: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    n: int = 0
    detectable: float | None = None
    method: str = ""
    margin: float = MARGIN
    unpaired: int = 0
    groups: int = 0
    errors: tuple[int, int] = (0, 0)
    gained: tuple[str, ...] = field(default=(), repr=False)
    lost: tuple[str, ...] = field(default=(), repr=False)


def paired_verdict(
    before: Side,
    after: Side,
    *,
    higher_is_better: bool = True,
    margin: float | None = None,
    alpha: float = ALPHA,
    seed: int = 0,
) -> PairedVerdict:
    """Compare two sides task by task.

    The verdict is one of:
        better, worse: the test is significant and the interval excludes 0.
        no_difference: the whole interval lies within the margin.
        inconclusive: neither of these, or too few tasks for a bootstrap.
        unknown: no task has values on both sides, or more than 5 % of the scorings failed.

    Args:
        higher_is_better: False for losses.
        margin: a difference smaller than this counts as none; None for 5 % of the span of the
            values (5 points for rates).
        alpha: level of the test; the interval has confidence 1 - alpha.
        seed: of the bootstrap.
    """
    shared_tasks = _shared_tasks(before, after)
    counts = _Counts.from_sides(before, after, shared_tasks)
    refusal = _reason_for_no_verdict(before, after, counts)
    if refusal:
        return counts.unknown_verdict(refusal)
    means_before = {task: _mean(before.values[task]) for task in shared_tasks}
    means_after = {task: _mean(after.values[task]) for task in shared_tasks}
    clusters = Clusters.from_groups(shared_tasks, {**after.groups, **before.groups})
    test = _test_of_means(means_before, means_after, alpha, seed, clusters)
    sign = 1.0 if higher_is_better else -1.0
    used_margin = test.span * MARGIN if margin is None else margin
    word, reason = _word_of_test(test, sign, used_margin, counts.n, alpha, clusters)
    group_count = clusters.count if clusters else 0
    verdict = replace(
        counts.unknown_verdict(reason), verdict=word, margin=used_margin, groups=group_count
    )
    return test.with_statistics(_with_means(verdict, means_before, means_after, sign))


def _with_means(
    verdict: PairedVerdict, before: Mapping[str, float], after: Mapping[str, float], sign: float
) -> PairedVerdict:
    """The verdict, with the means of both sides and the tasks that became better or worse filled
    in.

    Both mappings are task id -> value, of the same tasks; `sign` is 1 if higher is better, else -1.
    """
    gained, lost = _changed_tasks(before, after, sign)
    return replace(
        verdict,
        before=_mean(list(before.values())),
        after=_mean(list(after.values())),
        gained=gained,
        lost=lost,
    )


@dataclass(frozen=True)
class _Counts:
    """How many tasks of two sides can be compared, and how many scorings failed."""

    n: int  # tasks with values on both sides
    unpaired: int  # tasks with values on one side only
    errors: tuple[int, int]  # failed scorings before and after

    @staticmethod
    def from_sides(before: Side, after: Side, shared_tasks: Sequence[str]) -> "_Counts":
        """Count the tasks and errors of two sides; `shared_tasks` have values on both."""
        tasks_of_either = before.values.keys() | after.values.keys()
        return _Counts(
            n=len(shared_tasks),
            unpaired=len(tasks_of_either) - len(shared_tasks),
            errors=(before.errors, after.errors),
        )

    def unknown_verdict(self, reason: str) -> PairedVerdict:
        """The verdict "unknown" with these counts; all statistics are None."""
        return PairedVerdict(
            "unknown", reason, n=self.n, unpaired=self.unpaired, errors=self.errors
        )


@dataclass(frozen=True)
class DifferenceTest:
    """The result of a statistical test of the difference after - before.

    `detectable` is the smallest difference that the test would show.
    """

    diff: float
    interval: Interval
    p: float
    detectable: float

    def with_statistics(self, verdict: PairedVerdict) -> PairedVerdict:
        """The verdict with its numbers replaced by those of this test."""
        return replace(
            verdict,
            diff=self.diff,
            low=self.interval.low,
            high=self.interval.high,
            p=self.p,
            detectable=self.detectable,
        )


@dataclass(frozen=True)
class _Test(DifferenceTest):
    """A test of paired values; `span` is the highest value minus the lowest."""

    method: str
    span: float

    def with_statistics(self, verdict: PairedVerdict) -> PairedVerdict:
        """The verdict with its numbers and its method replaced by those of this test."""
        return replace(super().with_statistics(verdict), method=self.method)


def _shared_tasks(before: Side, after: Side) -> list[str]:
    """The ids of the tasks that have values on both sides, sorted."""
    # A side may list a task with an empty list of values.
    return sorted(task for task in before.values if before.values[task] and after.values.get(task))


def _test_of_means(
    before: Mapping[str, float],
    after: Mapping[str, float],
    alpha: float,
    seed: int,
    clusters: Clusters | None,
) -> _Test:
    """The test that suits the values (by group if `clusters` are given), and an interval that
    agrees.

    Both mappings are task id -> value, of the same tasks; `alpha` is the level of the test, `seed`
    that of a bootstrap. If the test is not significant but the interval (of confidence 1 - alpha)
    excludes 0, the interval is extended to 0.
    """
    is_binary = {*before.values(), *after.values()} <= {0.0, 1.0}
    if is_binary:
        test = _binary_test(before, after, alpha, clusters)
    else:
        test = _mean_test(before, after, alpha, seed, clusters)
    if test.p >= alpha and test.interval.excludes_zero:
        method = f"{test.method}, drawn to 0 with the test"
        return replace(test, interval=test.interval.with_zero(), method=method)
    return test


def _changed_tasks(
    before: Mapping[str, float], after: Mapping[str, float], sign: float
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The ids of the tasks that became better, and of those that became worse.

    The largest change comes first; equal changes are ordered by task id. Both mappings are task id
    -> value, of the same tasks; `sign` is 1 if higher is better, else -1.
    """
    rounding_error = 1e-12  # a change no larger than this is none
    improvements = {task: sign * (after[task] - before[task]) for task in before}
    largest_first = sorted(improvements, key=lambda task: (-abs(improvements[task]), task))
    gained = tuple(task for task in largest_first if improvements[task] > rounding_error)
    lost = tuple(task for task in largest_first if improvements[task] < -rounding_error)
    return gained, lost


def _reason_for_no_verdict(before: Side, after: Side, counts: _Counts) -> str:
    """Why two sides allow no verdict: too many failed scorings, or no shared task. "" if they allow
    one."""
    for name, side in (("before", before), ("after", after)):
        if side.error_share > MAX_ERROR_SHARE:
            return (
                f"scoring failed on {side.errors} of {side.attempts} attempts {name} (no verdict "
                f"above {whole_percent(MAX_ERROR_SHARE)})"
            )
    if counts.n == 0:
        return "no task was scored on both sides"
    return ""


def _binary_test(
    before: Mapping[str, float],
    after: Mapping[str, float],
    alpha: float,
    clusters: Clusters | None,
) -> _Test:
    """McNemar's test at the level `alpha`, for values that are 1 (solved) or 0 (not solved).

    Both mappings are task id -> value, of the same tasks. `clusters` are groups of tasks that tend
    to be solved or failed together: with them the counts are divided by the design effect (how many
    such tasks carry as much information as one independent task), and p is of the test for
    clustered pairs.
    """
    changes = {task: after[task] - before[task] for task in before}
    gained = float(sum(change > 0 for change in changes.values()))
    lost = float(sum(change < 0 for change in changes.values()))
    task_count = float(len(before))
    if clusters:
        effect = clusters.design_effect(changes, 1.0 - alpha)
        gained, lost, task_count = gained / effect, lost / effect, task_count / effect
        p = clusters.p_of_mean(changes)
        method = "by group: clustered McNemar mid-p, Tango score interval"
    else:
        p = mcnemar_midp(round(gained), round(lost))
        method = "McNemar mid-p, Tango score interval"
    return _Test(
        diff=math.fsum(changes.values()) / len(changes),
        interval=tango_interval(gained, lost, task_count, confidence=1.0 - alpha),
        p=p,
        detectable=smallest_detectable_gap(task_count, gained + lost, alpha=alpha),
        method=method,
        span=1.0,  # of the values, from 0 to 1
    )


def _mean_test(
    before: Mapping[str, float],
    after: Mapping[str, float],
    alpha: float,
    seed: int,
    clusters: Clusters | None,
) -> _Test:
    """The test at the level `alpha` for values other than 0 and 1: a bootstrap over tasks, or over
    groups of tasks if `clusters` are given. Both mappings are task id -> value, of the same
    tasks."""
    changes = {task: after[task] - before[task] for task in before}
    # The bootstrap expects a list per task, one change for each attempt; here there is one.
    change_lists = {task: [change] for task, change in changes.items()}
    bootstrap = paired_bootstrap(change_lists, seed, confidence=1.0 - alpha, clusters=clusters)
    values = [*before.values(), *after.values()]
    span = max(values) - min(values)
    sd = deviation_of_changes(list(changes.values()), bootstrap.mean, span)
    if clusters:  # tasks in groups carry less information, as if their changes were noisier
        sd *= math.sqrt(clusters.design_effect(changes, 1.0 - alpha))
    unit = "groups" if clusters else "tasks"
    return _Test(
        diff=bootstrap.mean,
        interval=Interval(bootstrap.low, bootstrap.high),
        p=bootstrap.p,
        detectable=smallest_detectable_mean(len(before), sd, alpha=alpha),
        method=f"bootstrap over {unit} ({RESAMPLES} resamples)",
        span=span,
    )


def _word_of_test(
    test: _Test,
    sign: float,
    margin: float,
    tasks: int,
    alpha: float,
    clusters: Clusters | None,
) -> tuple[Word, str]:
    """(the verdict that a test supports, the reason if there are too few tasks or groups for one,
    else "").

    `tasks` is the number of tasks, `clusters` are their groups; None if they are independent.
    Differences within `margin` count as none; `alpha` is the level of the test. `sign` is 1 if
    higher is better, else -1.
    """
    # McNemar's test holds for few tasks too; a bootstrap over few tasks or groups does not.
    if clusters and clusters.count < FEWEST_TASKS:
        too_few = f"{tasks} tasks are of {clusters.count} groups, too few to tell"
        return "inconclusive", f"{too_few} (at least {FEWEST_TASKS})"
    is_mcnemar = test.method.startswith("McNemar")
    if tasks < FEWEST_TASKS and not is_mcnemar:
        return "inconclusive", f"{tasks} tasks are too few to tell (at least {FEWEST_TASKS})"
    word: Word
    if test.p < alpha and test.interval.excludes_zero:
        word = "better" if sign * test.diff > 0 else "worse"
    else:
        word = "no_difference" if test.interval.within(margin) else "inconclusive"
    return word, ""


def _mean(values: Sequence[float]) -> float:
    """The mean of `values`, of which there must be at least one."""
    return math.fsum(values) / len(values)
