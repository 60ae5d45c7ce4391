"""How many held-out tasks, or attempts at each, an evaluation needs to show a change worth
having."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from engine.evidence.stats.basics.distributions import binomial_cdf, log_binomial
from engine.evidence.stats.inference import (
    ALPHA,
    MARGIN,
    PairedVerdict,
    Side,
    smallest_detectable_mean,
    tasks_needed,
)
from engine.home.run_dir import Home
from engine.records.env_version import EnvVersion
from engine.records.record import DamagedRecord

MOST_ATTEMPTS = 16  # at one task; instead of more attempts, more tasks are cheaper


def tasks_to_decide(verdict: PairedVerdict) -> int | None:
    """How many tasks would show a change as large as the margin in four cases of five.

    Estimated from how much the two sides of `verdict` differed task by task. Returns None if
    nothing was compared, if the smallest detectable change is not known, or if the margin is 0.
    """
    if not verdict.n or verdict.detectable is None or not math.isfinite(verdict.detectable):
        return None
    if verdict.method.startswith("McNemar"):  # each task is solved or not
        return tasks_for_share(verdict)
    if verdict.margin <= 0:
        return None
    # The smallest detectable mean falls with the square root of the number of tasks.
    times_as_many_tasks = (verdict.detectable / verdict.margin) ** 2
    return math.ceil(verdict.n * times_as_many_tasks)


def tasks_for_share(verdict: PairedVerdict) -> int:
    """How many tasks would show that the share of solved tasks changed by `MARGIN` (5 points).

    The number depends on how many of the tasks of `verdict` changed their result; there must be
    tasks.
    """
    changed_tasks = len(verdict.gained) + len(verdict.lost)
    # One more than were seen: a sample without any change would ask for too few tasks.
    changed_share = (changed_tasks + 1) / (verdict.n + 1)
    return tasks_needed(MARGIN, discordant_share=changed_share)


def attempts_needed(before: Side, after: Side, margin: float) -> int | None:
    """How many attempts at each task would show a mean change of `margin` on these tasks.

    Returns None if no number up to `MOST_ATTEMPTS` would, or if fewer than two tasks had several
    attempts on both sides: single attempts do not show how random they are.
    """
    repeated_tasks = _tasks_with_several_attempts(before, after)
    if len(repeated_tasks) < 2:
        return None
    noise = _GapNoise.estimated(before, after, repeated_tasks)
    # Start above the present number of attempts: the question is how many more it takes.
    for attempts in range(noise.fewest_attempts + 1, MOST_ATTEMPTS + 1):
        sd = noise.deviation_with(attempts)
        if smallest_detectable_mean(len(repeated_tasks), sd) <= margin:
            return attempts
    return None


@dataclass(frozen=True)
class _GapNoise:
    """How much the gap between two sides (after - before) varies from task to task, and why.

    More attempts average out the randomness of single answers, but not the differences between
    tasks.
    """

    attempt_variance: float  # of a task's gap, from one attempt on each side
    task_variance: float  # of the gaps between tasks, without the part from attempts
    fewest_attempts: int  # the smallest number that any task had on a side

    @staticmethod
    def estimated(before: Side, after: Side, tasks: Sequence[str]) -> "_GapNoise":
        """Estimate the noise from `tasks`: at least two, each with several attempts on both
        sides."""
        values_before = [before.values[task] for task in tasks]
        values_after = [after.values[task] for task in tasks]
        attempt_values = [*values_before, *values_after]
        # Twice the variance of an attempt, because there is one on each side.
        attempt_variance = fmean([variance(values) for values in attempt_values]) * 2
        fewest_attempts = min(len(values) for values in attempt_values)
        gaps = [
            fmean(values_of_task_after) - fmean(values_of_task_before)
            for values_of_task_before, values_of_task_after in zip(
                values_before, values_after, strict=True
            )
        ]
        # The variance of the gaps beyond what the attempts add to it.
        task_variance = max(0.0, variance(gaps) - attempt_variance / fewest_attempts)
        return _GapNoise(attempt_variance, task_variance, fewest_attempts)

    def deviation_with(self, attempts: int) -> float:
        """The standard deviation of the tasks' gaps with this many attempts on each side."""
        return math.sqrt(self.task_variance + self.attempt_variance / attempts)


def _tasks_with_several_attempts(before: Side, after: Side) -> list[str]:
    """The tasks with at least two scored attempts on both sides, in the order of `before`."""
    return [
        task
        for task in before.values
        if len(before.values[task]) > 1 and len(after.values.get(task, ())) > 1
    ]


def split_rows(home: Home, env_id: str, split: str = "heldout") -> int | None:
    """How many rows a split of an environment version has.

    `env_id` is the environment's name and the hash of the version, such as "sums@3f2a9c01b4d7".
    Returns None if it has another form, or if the version is gone.
    """
    name, _, hash12 = env_id.partition("@")
    if not name or not hash12:
        return None
    try:
        return EnvVersion.read(home.env(name, hash12) / "env.json").rows.get(split)
    except (OSError, DamagedRecord):  # the version is gone, or its file is damaged
        return None


def more_rows(needed: int | None, have: int, split: str = "held-out") -> str:
    """The advice to give an environment more rows, if an evaluation already uses all that it has.

    For example "tasks(): at least 400 held-out rows instead of 100, then push and evaluate again".

    Args:
        needed: how many rows would be enough; None if that is not known.
        have: how many rows there are.
        split: the name of the split in the sentence.
    """
    amount = f"at least {needed}" if needed else f"more than {have}"
    return f"tasks(): {amount} {split} rows instead of {have}, then push and evaluate again"


def mcnemar_power(
    tasks: int, gap: float, discordant_share: float, *, alpha: float = ALPHA
) -> float:
    """The probability that McNemar's mid-p test on this many `tasks` finds a true gain of `gap`.

    Computed exactly. Returns 0 without tasks, or if no task comes out differently.

    Args:
        gap: the true difference of the two rates.
        discordant_share: share of the tasks that come out differently on the two sides; at least
            `gap` is assumed.
        alpha: level of the test.
    """
    share = max(discordant_share, gap)
    if share <= 0.0 or tasks <= 0:
        return 0.0
    gain_rate = (share + gap) / (2.0 * share)  # share of the discordant tasks that are gains
    power = 0.0
    for discordant in _likely_counts(tasks, share):
        most_losses = _critical_losses(discordant, alpha)
        if most_losses >= 0:
            chance_of_significance = binomial_cdf(most_losses, discordant, 1.0 - gain_rate)
            chance_of_count = math.exp(log_binomial(discordant, tasks, share))
            power += chance_of_count * chance_of_significance
    return min(1.0, power)


def _likely_counts(trials: int, probability: float) -> range:
    """The numbers of successes that are likely enough to matter; each trial succeeds with
    `probability`.

    They lie within seven standard deviations of the expected number; the rest is negligible.
    """
    expected = trials * probability
    spread = 7.0 * math.sqrt(expected * (1.0 - probability)) + 1.0
    fewest = max(0, int(expected - spread))
    most = min(trials, int(expected + spread) + 1)
    return range(fewest, most + 1)


def _critical_losses(discordant: int, alpha: float) -> int:
    """The most losses among `discordant` changed tasks with which a gain is still significant.

    Significant means that the mid-p is below `alpha`. Returns -1 if the tasks are so few that a
    gain is not significant even without a loss.
    """
    chance_of_fewer = 0.0  # of fewer losses than `losses`, if gains and losses are equally likely
    most_losses = -1
    for losses in range(discordant // 2 + 1):
        chance_of_losses = math.exp(log_binomial(losses, discordant, 0.5))
        if 2.0 * chance_of_fewer + chance_of_losses >= alpha:  # the two-sided mid-p
            break
        chance_of_fewer += chance_of_losses
        most_losses = losses
    return most_losses
