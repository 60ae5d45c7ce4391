"""The statistics behind a verdict: paired by task, honest about what N can show.

Rates get Wilson intervals. Two models on the same tasks are compared pair by pair: McNemar's
mid-p test and Tango's score interval for one yes/no answer per task, a bootstrap over tasks for
everything else. `paired_verdict` turns that into one word. Standard library only; held against
scipy and against simulation in tests/engine/evidence/stats/test_inference.py.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from engine.evidence.stats.distributions import (
    binomial_cdf,
    log_binomial,
    normal_quantile,
    t_cdf,
    t_quantile,
)

ALPHA = 0.05
POWER = 0.8
MARGIN = 0.05  # a difference this small (5 points, or 5 % of the rewards' span) is no difference
MAX_ERROR_SHARE = 0.05  # above it the scorer is being measured, not the model
RESAMPLES = 4000
NEGLIGIBLE = 1e-9  # an end this near to 0 is rounding
FEWEST_TASKS = 10  # below it a bootstrap interval means nothing

Word = Literal["better", "worse", "no_difference", "inconclusive", "unknown"]
VERDICTS: tuple[Word, ...] = ("better", "worse", "no_difference", "inconclusive", "unknown")


@dataclass(frozen=True)
class Interval:
    """A confidence interval."""

    low: float
    high: float

    def within(self, margin: float) -> bool:
        return -margin <= self.low and self.high <= margin

    @property
    def excludes_zero(self) -> bool:
        return self.low > NEGLIGIBLE or self.high < -NEGLIGIBLE

    def with_zero(self) -> "Interval":
        return Interval(min(self.low, 0.0), max(self.high, 0.0))


@dataclass(frozen=True)
class Bootstrap:
    """A mean over tasks with its bootstrap interval and two-sided p for a mean of 0."""

    mean: float
    low: float
    high: float
    p: float


def wilson(k: int, n: int, confidence: float = 0.95) -> Interval:
    """The score interval for a rate of `k` out of `n` (Wilson 1927); (0, 1) when n is 0."""
    if n <= 0:
        return Interval(0.0, 1.0)
    z = normal_quantile(0.5 + confidence / 2.0)
    rate = k / n
    spread = z * math.sqrt(rate * (1.0 - rate) / n + z * z / (4.0 * n * n))
    scale = 1.0 + z * z / n
    centre = rate + z * z / (2.0 * n)
    low = 0.0 if k == 0 else (centre - spread) / scale
    high = 1.0 if k == n else (centre + spread) / scale
    return Interval(max(0.0, low), min(1.0, high))


def mcnemar_exact(b: int, c: int) -> float:
    """Two-sided exact p of McNemar's test: `b` pairs went one way, `c` the other."""
    return min(1.0, 2.0 * binomial_cdf(min(b, c), b + c, 0.5))


def mcnemar_midp(b: int, c: int) -> float:
    """Two-sided mid-p of McNemar's test: the exact p less half the observed outcome's weight.

    The exact test is needlessly strict at small counts; the mid-p keeps close to the nominal
    level (Fagerland, Lydersen and Laake 2013).
    """
    n, k = b + c, min(b, c)
    if n == 0:
        return 1.0
    return min(1.0, 2.0 * binomial_cdf(k, n, 0.5) - math.exp(log_binomial(k, n, 0.5)))


def tango_interval(b: int, c: int, n: int, confidence: float = 0.95) -> Interval:
    """Score interval for the paired difference (b - c) / n of two rates (Tango 1998).

    `b` of `n` tasks were gained, `c` lost. Unlike Wald's it neither collapses at b = c = 0 nor
    leaves [-1, 1]. At a difference of 0 it agrees with McNemar's test without correction.
    """
    if n <= 0:
        return Interval(-1.0, 1.0)
    z = normal_quantile(0.5 + confidence / 2.0)
    observed = (b - c) / n
    low = -1.0 if c == n else _score_bound(b, c, n, z, -1.0, observed)
    high = 1.0 if b == n else _score_bound(b, c, n, -z, observed, 1.0)
    return Interval(low, high)


def _tango_score(b: int, c: int, n: int, delta: float) -> float:
    """Tango's z for the hypothesis that the difference is `delta`."""
    linear = -(b + c) + (2 * n - b + c) * delta
    constant = -c * delta * (1.0 - delta)
    root = math.sqrt(max(0.0, linear * linear - 8.0 * n * constant))
    lost_rate = max(0.0, (root - linear) / (4.0 * n))
    variance = n * (2.0 * lost_rate + delta * (1.0 - delta))
    gap = b - c - n * delta
    if variance <= 0.0:
        return 0.0 if gap == 0.0 else math.copysign(math.inf, gap)
    return gap / math.sqrt(variance)


def _score_bound(b: int, c: int, n: int, z: float, low: float, high: float) -> float:
    """The delta in [low, high] whose score is `z`; the score falls as delta grows."""
    for _ in range(60):
        middle = 0.5 * (low + high)
        if _tango_score(b, c, n, middle) > z:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


def paired_bootstrap(
    diffs_by_task: Mapping[str, Sequence[float]],
    seed: int = 0,
    *,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
) -> Bootstrap:
    """Mean paired difference over tasks, resampling whole tasks so that attempts stay together.

    The attempts of a task are averaged first: more attempts sharpen a task's own value but are
    no new tasks. The percentile interval is widened to what Student's t asks at this number of
    tasks (the expanded percentile interval, Hesterberg 2015), and p is read off the same scale.
    Deterministic for a seed, whatever the order of the mapping. Raises ValueError on no tasks.
    """
    means = [
        math.fsum(diffs_by_task[task]) / len(diffs_by_task[task]) for task in sorted(diffs_by_task)
    ]
    n = len(means)
    if n == 0:
        raise ValueError("paired_bootstrap needs at least one task")
    centre = math.fsum(means) / n
    if n == 1 or min(means) == max(means):
        certain = 0.0 if n > 1 and centre else 1.0
        return Bootstrap(centre, centre, centre, certain)
    draw = random.Random(seed).choices
    drawn = sorted(sum(draw(means, k=n)) / n for _ in range(resamples))
    widen = math.sqrt(n / (n - 1))
    tail = _normal_tail(t_quantile(0.5 + confidence / 2.0, n - 1) * widen)
    low, high = _quantile(drawn, tail), _quantile(drawn, 1.0 - tail)
    below = sum(value < 0.0 for value in drawn) + 0.5 * sum(value == 0.0 for value in drawn)
    share = min(max(below, 0.5), resamples - 0.5) / resamples
    t = normal_quantile(share) / widen
    p = min(1.0, 2.0 * t_cdf(-abs(t), n - 1))
    return Bootstrap(centre, low, high, p)


def _normal_tail(z: float) -> float:
    return 0.5 * math.erfc(z / math.sqrt(2.0))


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Linear interpolation between order statistics."""
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def smallest_detectable_gap(
    n: int, discordant: int, *, alpha: float = ALPHA, power: float = POWER
) -> float:
    """The smallest difference of two paired rates that `n` tasks would show with `power`.

    `discordant` is how many of the tasks came out differently; one more is added so that a
    sample without any does not promise to see everything. Solves Miettinen's sample size formula
    (1968; Connor 1987) for the gap; 1.0 when even a complete reversal would not show.
    """
    if n <= 0:
        return 1.0
    share = (discordant + 1) / (n + 1)
    fewest = math.ceil(math.log(alpha) / math.log(0.5)) / n  # b pairs one way, none back: 0.5**b
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        if _tasks_for(middle, max(share, middle), alpha, power) > n:
            low = middle
        else:
            high = middle
    return min(1.0, max(high, fewest))


def tasks_needed(
    gap: float, discordant_share: float, *, alpha: float = ALPHA, power: float = POWER
) -> int:
    """How many tasks show a difference of `gap` (0..1] with `power`, at this discordant share."""
    if gap <= 0.0:
        raise ValueError("no number of tasks shows a gap of 0")
    return math.ceil(_tasks_for(gap, max(discordant_share, gap), alpha, power) - 1e-9)


def _tasks_for(gap: float, share: float, alpha: float, power: float) -> float:
    if gap <= 0.0:
        return math.inf
    critical, wanted = normal_quantile(1.0 - alpha / 2.0), normal_quantile(power)
    spread = math.sqrt(max(0.0, share - gap * gap))
    return ((critical * math.sqrt(share) + wanted * spread) / gap) ** 2


def smallest_detectable_mean(
    n: int, sd: float, *, alpha: float = ALPHA, power: float = POWER
) -> float:
    """The smallest mean paired difference that `n` tasks would show, given the spread of diffs."""
    if n <= 1:
        return math.inf
    return (normal_quantile(1.0 - alpha / 2.0) + normal_quantile(power)) * sd / math.sqrt(n)


def mcnemar_power(n: int, gap: float, discordant_share: float, *, alpha: float = ALPHA) -> float:
    """The chance that the mid-p test on `n` tasks finds a true gain of `gap`, exactly.

    Sums over every number of discordant pairs that is not negligible.
    """
    share = max(discordant_share, gap)
    if share <= 0.0 or n <= 0:
        return 0.0
    up = (share + gap) / (2.0 * share)
    spread = 7.0 * math.sqrt(n * share * (1.0 - share)) + 1.0
    first, last = max(0, int(n * share - spread)), min(n, int(n * share + spread) + 1)
    total = 0.0
    for pairs in range(first, last + 1):
        lost_most = _critical_losses(pairs, alpha)
        if lost_most >= 0:
            tail = binomial_cdf(lost_most, pairs, 1.0 - up)
            total += math.exp(log_binomial(pairs, n, share)) * tail
    return min(1.0, total)


def _critical_losses(pairs: int, alpha: float) -> int:
    """The most losses among `pairs` discordant tasks that still make the mid-p significant."""
    below, lost = 0.0, -1
    for k in range(pairs // 2 + 1):
        weight = math.exp(log_binomial(k, pairs, 0.5))
        if 2.0 * below + weight >= alpha:
            break
        below += weight
        lost = k
    return lost


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's (1979) adjusted p values, in the order given."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted = [0.0] * len(p_values)
    running = 0.0
    for rank, index in enumerate(order):
        running = max(running, (len(p_values) - rank) * p_values[index])
        adjusted[index] = min(1.0, running)
    return adjusted


def pass_at_k(n: int, correct: int, k: int) -> float:
    """The unbiased chance that one of `k` attempts is right, from `correct` of `n` (Chen 2021).

    Raises ValueError when k is above n: another estimator would be needed.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} attempts, there are {n}")
    if n - correct < k:
        return 1.0
    return 1.0 - math.exp(math.fsum(math.log1p(-k / i) for i in range(n - correct + 1, n + 1)))


@dataclass(frozen=True)
class Side:
    """One model's results on a set of tasks.

    Attributes:
        values: task id -> one value per attempt that was scored without an error.
        attempts: attempts in all, errors included.
        errors: attempts whose scoring failed; they are in no value.
    """

    values: Mapping[str, Sequence[float]]
    attempts: int
    errors: int = 0

    @property
    def error_share(self) -> float:
        return self.errors / self.attempts if self.attempts else 0.0


@dataclass(frozen=True)
class PairedVerdict:
    """What a paired comparison says, with everything needed to doubt it.

    `reason` says why there is none, or why it is weaker than its numbers. `diff` is after - before
    over the `n` paired tasks; `detectable` the smallest gap this many tasks would show; `gained`
    and `lost` the tasks that changed, the largest change first.
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

    better or worse: the test is significant and the interval excludes 0. no_difference: the whole
    interval lies within `margin` (5 points for rates, 5 % of the span of values otherwise).
    inconclusive: neither. unknown: nothing to compare, or more than 5 % scoring errors.

    The interval never says more than the test: where the test does not exclude 0 and the interval
    would, it is drawn to 0, which holds at least as often.
    """
    shared = sorted(task for task in before.values if task in after.values)
    shared = [task for task in shared if before.values[task] and after.values[task]]
    known = {task for side in (before, after) for task in side.values}
    facts = _Facts(len(shared), len(known) - len(shared), (before.errors, after.errors))
    refusal = _refusal(before, after, facts)
    if refusal:
        return facts.verdict("unknown", refusal)
    old = {task: _mean(before.values[task]) for task in shared}
    new = {task: _mean(after.values[task]) for task in shared}
    if all(value in (0.0, 1.0) for side in (old, new) for value in side.values()):
        test = _binary_test(old, new, alpha)
    else:
        test = _mean_test(old, new, alpha, seed)
    if test.p >= alpha and test.interval.excludes_zero:
        method = f"{test.method}, drawn to 0 with the test"
        test = replace(test, interval=test.interval.with_zero(), method=method)
    sign = 1.0 if higher_is_better else -1.0
    moved = sorted(shared, key=lambda task: (-abs(new[task] - old[task]), task))
    gains = tuple(task for task in moved if sign * (new[task] - old[task]) > 1e-12)
    losses = tuple(task for task in moved if sign * (new[task] - old[task]) < -1e-12)
    allowed = test.span * MARGIN if margin is None else margin
    word, reason = _judge(test, sign, allowed, facts.n, alpha)
    return PairedVerdict(
        verdict=word,
        reason=reason,
        before=_mean(list(old.values())),
        after=_mean(list(new.values())),
        diff=test.diff,
        low=test.interval.low,
        high=test.interval.high,
        p=test.p,
        n=facts.n,
        detectable=test.detectable,
        method=test.method,
        margin=allowed,
        unpaired=facts.unpaired,
        errors=facts.errors,
        gained=gains,
        lost=losses,
    )


@dataclass(frozen=True)
class _Facts:
    n: int
    unpaired: int
    errors: tuple[int, int]

    def verdict(self, word: Word, reason: str) -> PairedVerdict:
        return PairedVerdict(word, reason, n=self.n, unpaired=self.unpaired, errors=self.errors)


@dataclass(frozen=True)
class _Test:
    diff: float
    interval: Interval
    p: float
    detectable: float
    method: str
    span: float


def _refusal(before: Side, after: Side, facts: _Facts) -> str:
    """Why there can be no verdict, "" when there can."""
    for name, side in (("before", before), ("after", after)):
        if side.error_share > MAX_ERROR_SHARE:
            return (
                f"scoring failed on {side.errors} of {side.attempts} attempts {name} "
                f"({side.error_share:.0%}); above {MAX_ERROR_SHARE:.0%} there is no verdict"
            )
    if facts.n == 0:
        return "no task was scored on both sides"
    return ""


def _binary_test(old: Mapping[str, float], new: Mapping[str, float], alpha: float) -> _Test:
    """McNemar's test of solved against unsolved tasks, one value of 0 or 1 each."""
    n = len(old)
    b = sum(new[task] > old[task] for task in old)
    c = sum(new[task] < old[task] for task in old)
    return _Test(
        diff=(b - c) / n,
        interval=tango_interval(b, c, n, 1.0 - alpha),
        p=mcnemar_midp(b, c),
        detectable=smallest_detectable_gap(n, b + c, alpha=alpha),
        method="McNemar mid-p, Tango score interval",
        span=1.0,
    )


def _mean_test(
    old: Mapping[str, float], new: Mapping[str, float], alpha: float, seed: int
) -> _Test:
    """The test of paired values that are no plain yes or no, by bootstrap over tasks."""
    diffs = {task: [new[task] - old[task]] for task in old}
    boot = paired_bootstrap(diffs, seed, confidence=1.0 - alpha)
    values = [*old.values(), *new.values()]
    span, n = max(values) - min(values), len(old)
    spread = math.fsum((diff[0] - boot.mean) ** 2 for diff in diffs.values()) / max(1, n - 1)
    # Without any spread, count as if one more task had moved across the span.
    sd = math.sqrt(spread) or span / math.sqrt(n + 1)
    return _Test(
        diff=boot.mean,
        interval=Interval(boot.low, boot.high),
        p=boot.p,
        detectable=smallest_detectable_mean(n, sd, alpha=alpha),
        method=f"bootstrap over tasks ({RESAMPLES} resamples)",
        span=span,
    )


def _judge(test: _Test, sign: float, margin: float, n: int, alpha: float) -> tuple[Word, str]:
    if n < FEWEST_TASKS and not test.method.startswith("McNemar"):
        return "inconclusive", f"{n} tasks are too few to tell (at least {FEWEST_TASKS})"
    if test.p < alpha and test.interval.excludes_zero:
        return ("better" if sign * test.diff > 0 else "worse"), ""
    return ("no_difference" if test.interval.within(margin) else "inconclusive"), ""


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
