"""Runs that differ in nothing but their seed, compared as one candidate.

The value of such a candidate on a task is the mean over its seeds. The uncertainty of a difference
covers both the tasks (or their groups, if they have any) and the spread between the seeds of one
configuration.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from engine.evidence.compare.candidates import Candidate
from engine.evidence.compare.settings_diff import NEUTRAL, making_of
from engine.evidence.stats.basics.clusters import Clusters
from engine.evidence.stats.basics.distributions import t_cdf, t_quantile
from engine.evidence.stats.inference import (
    ALPHA,
    POWER,
    DifferenceTest,
    Interval,
    PairedVerdict,
    Word,
)
from engine.evidence.stats.results import HIGHER_IS_BETTER, Measure, side, with_one_id_per_prompt
from engine.evidence.verdict.comparison import (
    Comparison,
    compare_rows,
    inconclusive_if_errors_decide,
    values_of_failures,
)
from engine.home.run_dir import Home
from engine.records.lines.evaluation_row import EvaluationRow


def with_seeds_joined(home: Home, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates, with those that differ only in their seed joined into one.

    A joined candidate stands at the place of its first seed; its `members` are the seeds, its
    `rows` the rows of all of them.
    """
    by_configuration: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        key = _configuration_key(home, candidate)  # equal for seeds of one configuration
        by_configuration.setdefault(key, []).append(candidate)
    all_are_one = len(by_configuration) < 2  # if joined, nothing would be left to compare with
    none_to_join = len(by_configuration) == len(candidates)
    if all_are_one or none_to_join:
        return list(candidates)
    return [_joined_candidate(home, members) for members in by_configuration.values()]


def seed_of(home: Home, candidate: Candidate) -> int | None:
    """The seed of the training that made the candidate; None for a base model."""
    return making_of(home, candidate).seed


def compare_candidates(home: Home, first: Candidate, other: Candidate) -> Comparison:
    """Compare two candidates task by task: `first` is the side "before", `other` the side "after".

    A candidate that stands for several seeds has a member for each of them. If either candidate
    does, the uncertainty covers tasks and seeds. Otherwise, and if the rows cannot be compared (no
    common measure, no shared tasks), the result is that of `compare_rows`.
    """
    comparison = compare_rows(first.rows, other.rows)
    measure = comparison.measure
    if comparison.outcome.diff is None or measure is None:
        return comparison
    members_before, members_after = first.members or (first,), other.members or (other,)
    if len(members_before) == 1 and len(members_after) == 1:
        return comparison
    outcomes = _verdicts_over_seeds(comparison, measure, members_before, members_after)
    # The first verdict leaves out rows whose scoring failed, the last counts them as 0. There is
    # only one verdict if no scoring failed.
    without_failed, with_failed = outcomes[0], outcomes[-1]
    # A verdict with a reason is still the verdict of the rows, for which `comparison.errors_decide`
    # is right. A verdict over seeds has no reason; for it the call below decides.
    is_verdict_of_rows = bool(without_failed.reason)
    errors_decide = comparison.errors_decide and is_verdict_of_rows
    comparison = replace(comparison, outcome=without_failed, errors_decide=errors_decide)
    return inconclusive_if_errors_decide(comparison, with_failed)


def _verdicts_over_seeds(
    comparison: Comparison,
    measure: Measure,
    members_before: Sequence[Candidate],
    members_after: Sequence[Candidate],
) -> list[PairedVerdict]:
    """The verdicts on several seeds, one for each way to treat rows whose scoring failed.

    The first leaves these rows out. If there are any, a second one counts them as 0.

    Args:
        comparison: of the rows of all seeds together, as if they were of one model.
        measure: what is compared, such as "success".
        members_before, members_after: one candidate for each seed of a side.
    """
    # All members at once, so that equal prompts get the same task id in all of them.
    members = (*members_before, *members_after)
    rows_of_members = with_one_id_per_prompt(*(member.rows for member in members))
    rows_before = rows_of_members[: len(members_before)]
    rows_after = rows_of_members[len(members_before) :]
    verdicts = []
    for value_of_failure in values_of_failures(measure, *rows_of_members):
        means = _SeedMeans(
            before=[_task_means(rows, measure, value_of_failure) for rows in rows_before],
            after=[_task_means(rows, measure, value_of_failure) for rows in rows_after],
            group_of_task=_groups_of_tasks(rows_of_members),
        )
        verdicts.append(_verdict_over_seeds(comparison, means))
    return verdicts


def _configuration_key(home: Home, candidate: Candidate) -> str:
    """A text that is equal for candidates that differ only in the seed of their training.

    A candidate whose training is not known, or has no seed, gets a text of its own.
    """
    training = making_of(home, candidate)
    if not training.config or "seed" not in training.setting_values:
        return f"alone: {candidate.label} in {candidate.source}"
    settings = {
        name: value
        for name, value in training.setting_values.items()
        if name not in NEUTRAL and name != "seed"
    }
    # Two checkpoints of one run are not two seeds, so the checkpoint is part of the key.
    _, _, checkpoint = candidate.label.partition("@")
    # One name may stand for other weights by now, so those of the base are part of it, too.
    configuration = [training.choices(), training.base, settings, checkpoint]
    return json.dumps(configuration, sort_keys=True, default=str)


def _joined_candidate(home: Home, members: list[Candidate]) -> Candidate:
    """The candidates of one configuration joined into one, whose label says how many seeds it
    stands for.

    `members` differ only in their seed. If any two have the same seed, none are joined: the last
    member is returned alone.
    """
    if len(members) == 1:
        return members[0]
    seeds = [seed_of(home, candidate) for candidate in members]
    has_repeats = len(set(seeds)) < len(seeds)
    if has_repeats:  # repeats of one seed tell nothing about other seeds
        return members[-1]
    rows = [row for candidate in members for row in candidate.rows]
    return replace(members[0], label=_joint_label(members), rows=rows, members=tuple(members))


def _joint_label(members: Sequence[Candidate]) -> str:
    """The label of several seeds of one configuration, such as "r-1 and r-2" or "r-1 and 2 more
    seeds"."""
    if len(members) == 2:
        return f"{members[0].label} and {members[1].label}"
    return f"{members[0].label} and {len(members) - 1} more seeds"


def _groups_of_tasks(rows_of_members: Sequence[Sequence[EvaluationRow]]) -> dict[str, str]:
    """The group of each task that has one, by task id."""
    return {row.task: row.task_group for rows in rows_of_members for row in rows if row.task_group}


def _task_means(
    rows: Sequence[EvaluationRow], measure: Measure, value_of_failure: float | None
) -> dict[str, float]:
    """The mean value of each task over its attempts, by task id.

    `value_of_failure` is the value given to a row whose scoring failed; None leaves the row out.
    """
    values_by_task = side(rows, measure, value_of_failure).values
    return {task: math.fsum(values) / len(values) for task, values in values_by_task.items()}


@dataclass(frozen=True)
class _SeedLevels:
    """The mean over the tasks for each seed.

    `before` are the seeds of the first candidate, `after` those of the other.
    """

    before: Sequence[float]
    after: Sequence[float]

    def with_means(
        self, verdict: PairedVerdict, task_count: int, clusters: Clusters | None
    ) -> PairedVerdict:
        """The verdict, with the means of both sides, the numbers of tasks and groups, and the
        method filled in. `clusters` are the groups of the tasks; None if the tasks are
        independent."""
        counted_as = f"{clusters.count} groups" if clusters else f"{task_count} tasks"
        return replace(
            verdict,
            before=_mean(self.before),
            after=_mean(self.after),
            n=task_count,
            groups=clusters.count if clusters else 0,
            method=f"t over {counted_as} and {len(self.before)} + {len(self.after)} seeds",
        )


@dataclass(frozen=True)
class _SeedMeans:
    """The mean value of each task (task id -> mean), one dict for each seed.

    `before` are the seeds of the first candidate, `after` those of the other; `group_of_task` has
    the group of each task that has one.
    """

    before: Sequence[dict[str, float]]
    after: Sequence[dict[str, float]]
    group_of_task: Mapping[str, str]

    @property
    def shared_tasks(self) -> set[str]:
        """The ids of the tasks that all seeds have."""
        return set.intersection(*(set(means) for means in (*self.before, *self.after)))

    def levels(self, tasks: set[str]) -> _SeedLevels:
        """The mean value over `tasks` for each seed, of both candidates (before and after)."""
        return _SeedLevels(
            before=[_mean_over_tasks(means, tasks) for means in self.before],
            after=[_mean_over_tasks(means, tasks) for means in self.after],
        )

    def differences(self, tasks: set[str]) -> dict[str, float]:
        """The difference between the two candidates on each of `tasks`, by task id: the mean over
        the seeds `after` minus the mean over the seeds `before`."""
        mean_differences = {}
        for task in tasks:
            mean_before = _mean([means[task] for means in self.before])
            mean_after = _mean([means[task] for means in self.after])
            mean_differences[task] = mean_after - mean_before
        return mean_differences


def _verdict_over_seeds(comparison: Comparison, means: _SeedMeans) -> PairedVerdict:
    """The verdict on two candidates, of which at least one has several seeds.

    It has a t interval over seeds and tasks (or groups, if tasks have them). `means` holds the mean
    of each task for each seed. The verdict is "unknown" if the seeds share fewer than two tasks or
    groups. If nothing varies, it is the verdict of `comparison`, which compares the rows without
    regard to seeds.
    """
    verdict_of_rows = comparison.outcome
    tasks = means.shared_tasks
    clusters = Clusters.from_groups(tasks, means.group_of_task)  # None without groups
    if len(tasks) < 2 or (clusters and clusters.count < 2):
        reason = "all tasks are of one group" if clusters else "the seeds share no tasks"
        return replace(verdict_of_rows, verdict="unknown", reason=reason, diff=None)
    levels = means.levels(tasks)
    variance, df = _variance_and_freedom(means.differences(tasks), levels, clusters)
    if variance <= 0.0:
        return replace(verdict_of_rows, method=f"{verdict_of_rows.method}, seeds alike")
    test = _t_test(_mean(levels.after) - _mean(levels.before), variance, df)
    word = _word_of_test(test, comparison.measure, verdict_of_rows.margin)
    verdict = replace(verdict_of_rows, verdict=word, reason="")
    return test.with_statistics(levels.with_means(verdict, len(tasks), clusters))


def _t_test(diff: float, variance: float, df: float) -> DifferenceTest:
    """The two-sided t test of whether the mean difference `diff` is 0.

    `variance` is that of the mean difference, above 0; `df` its degrees of freedom. The result has
    the p value, the interval at the level ALPHA, and the smallest difference that would be detected
    with the probability POWER.
    """
    standard_error = math.sqrt(variance)
    t_alpha, t_power = t_quantile(1.0 - ALPHA / 2.0, df), t_quantile(POWER, df)
    half_width = t_alpha * standard_error
    return DifferenceTest(
        diff=diff,
        interval=Interval(diff - half_width, diff + half_width),
        p=min(1.0, 2.0 * t_cdf(-abs(diff) / standard_error, df)),
        detectable=(t_alpha + t_power) * standard_error,
    )


def _word_of_test(test: DifferenceTest, measure: Measure | None, margin: float) -> Word:
    """The verdict that a test supports; differences within `margin` count as none."""
    if test.p < ALPHA and test.interval.excludes_zero:
        # `measure` is None only in a comparison without evidence, which has no test.
        higher_is_better = HIGHER_IS_BETTER[measure] if measure else True
        rose = test.diff > 0
        return "better" if rose == higher_is_better else "worse"
    return "no_difference" if test.interval.within(margin) else "inconclusive"


def _variance_and_freedom(
    differences: Mapping[str, float], levels: _SeedLevels, clusters: Clusters | None
) -> tuple[float, float]:
    """The variance of the difference over tasks and seeds, and its degrees of freedom.

    The variance over tasks and the variance over seeds are added; the degrees of freedom are
    Satterthwaite's. Returns (0, 0) if nothing varies.

    Args:
        differences: task id -> difference of its mean values, for at least two tasks.
        levels: the mean of each seed.
        clusters: at least two groups of tasks; with them the variance over tasks is that of the
            sums of the groups (Liang and Zeger 1986). None if the tasks are independent.
    """
    # A task without a group is a group of its own.
    groups = clusters.members if clusters else [[task] for task in differences]
    task_freedom = len(groups) - 1
    mean = _mean(list(differences.values()))
    group_sums = [math.fsum(differences[task] - mean for task in tasks) for tasks in groups]
    sum_of_squares = math.fsum(group_sum * group_sum for group_sum in group_sums)
    # The variance of the mean over the tasks.
    task_variance = sum_of_squares * len(groups) / task_freedom / len(differences) ** 2
    seed_freedom = len(levels.before) + len(levels.after) - 2
    seed_variance = _seed_variance(levels, seed_freedom)
    total_variance = task_variance + seed_variance
    if total_variance <= 0.0:
        return 0.0, 0.0
    weighted_squares = task_variance**2 / task_freedom + seed_variance**2 / seed_freedom
    return total_variance, total_variance**2 / weighted_squares


def _seed_variance(levels: _SeedLevels, freedom: int) -> float:
    """The variance, over seeds, of the difference between the mean of the seeds `after` and that of
    the seeds `before`; `freedom` are its degrees of freedom."""
    deviations = _squared_deviations(levels.before) + _squared_deviations(levels.after)
    pooled_variance = deviations / freedom  # of a single seed
    return pooled_variance * (1.0 / len(levels.before) + 1.0 / len(levels.after))


def _mean_over_tasks(task_means: dict[str, float], tasks: set[str]) -> float:
    """The mean of one seed over `tasks`; `task_means` maps task id -> mean value."""
    return math.fsum(task_means[task] for task in tasks) / len(tasks)


def _mean(values: Sequence[float]) -> float:
    """The mean of `values`, of which there must be at least one."""
    return math.fsum(values) / len(values)


def _squared_deviations(values: Sequence[float]) -> float:
    """The sum of the squared deviations from the mean."""
    average = _mean(values)
    return math.fsum((value - average) ** 2 for value in values)
