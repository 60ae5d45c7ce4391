"""Runs that differ in nothing but their seed, compared as one candidate.

The value of such a candidate on a task is the mean over its seeds. The uncertainty of a difference
counts both the tasks and how far apart the seeds of one configuration came out.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import replace

from engine.evidence.compare.candidates import Candidate
from engine.evidence.compare.settings_diff import NEUTRAL, making_of
from engine.evidence.stats.distributions import t_cdf, t_quantile
from engine.evidence.stats.inference import ALPHA, POWER, Interval, PairedVerdict
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
    """The candidates, with those that differ only in their seed joined to one.

    A joined candidate stands at the place of its first seed; its `members` are the seeds, its
    `rows` the rows of all of them. The list stays as it is where nothing can be joined, or where
    only one candidate would be left and there would be nothing to compare.
    """
    by_configuration: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        by_configuration.setdefault(_configuration_key(home, candidate), []).append(candidate)
    if len(by_configuration) < 2 or len(by_configuration) == len(candidates):
        return list(candidates)
    return [_joined_candidate(home, members) for members in by_configuration.values()]


def seed_of(home: Home, candidate: Candidate) -> object:
    """The seed of the training that made the candidate, None for a base model."""
    return making_of(home, candidate).seed


def compare_candidates(home: Home, first: Candidate, other: Candidate) -> Comparison:
    """Compare two candidates task by task.

    Where either side stands for several seeds, the uncertainty counts tasks and seeds. The
    comparison of the rows is returned unchanged where both sides are single, or where it came to no
    difference (no common measure, no shared tasks).
    """
    comparison = compare_rows(first.rows, other.rows)
    members_of_sides = (first.members or (first,), other.members or (other,))
    measure = comparison.measure
    if max(map(len, members_of_sides)) < 2 or comparison.outcome.diff is None or measure is None:
        return comparison
    # All sides are needed at once to find a common id. Their rows come back in the same order, and
    # each member takes its own.
    rows_by_prompt = iter(
        with_one_id_per_prompt(
            *(candidate.rows for members in members_of_sides for candidate in members)
        )
    )
    rows_of_sides = [[next(rows_by_prompt) for _ in members] for members in members_of_sides]
    all_rows = [seed_rows for members in rows_of_sides for seed_rows in members]
    # One verdict for each value that a failed row can be counted as: left out first, then 0. If
    # they differ, the failed rows decide.
    outcomes = [
        _verdict_over_seeds(
            comparison,
            [
                [_task_means(seed_rows, measure, failed) for seed_rows in members]
                for members in rows_of_sides
            ],
        )
        for failed in values_of_failures(measure, *all_rows)
    ]
    # A verdict over the seeds that was reached has no reason. Where it has one, the verdict of the
    # rows was kept, and what decided that one is kept too.
    errors_decide = comparison.errors_decide and bool(outcomes[0].reason)
    comparison = replace(comparison, outcome=outcomes[0], errors_decide=errors_decide)
    return inconclusive_if_errors_decide(comparison, outcomes[-1])


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
    checkpoint = candidate.label.partition("@")[2]  # two checkpoints of a run are no two seeds
    configuration = [training.choices(), settings, checkpoint]
    return json.dumps(configuration, sort_keys=True, default=str)


def _joined_candidate(home: Home, members: list[Candidate]) -> Candidate:
    """The candidates of one configuration as one candidate, with a label that says so.

    A single candidate is returned as it is. Where two have the same seed, only the newest is
    returned.
    """
    if len(members) == 1:
        return members[0]
    seeds = [seed_of(home, candidate) for candidate in members]
    if len(set(map(str, seeds))) < len(seeds):  # a seed repeats
        return _newest(members)
    label = f"{members[0].label} and {len(members) - 1} more seeds"
    if len(members) == 2:
        label = f"{members[0].label} and {members[1].label}"
    rows = [row for candidate in members for row in candidate.rows]
    return replace(members[0], label=label, rows=rows, members=tuple(members))


def _newest(members: list[Candidate]) -> Candidate:
    """The last candidate, which is the newest.

    It stands for all of them, because repeats of one seed tell nothing about other seeds.
    """
    return members[-1]


def _task_means(
    rows: Sequence[EvaluationRow], measure: Measure, failed: float | None
) -> dict[str, float]:
    """Task id -> mean value over its attempts.

    `failed` is the value to count a failed row as; None leaves the row out.
    """
    values = side(rows, measure, failed).values
    return {task: math.fsum(task_values) / len(task_values) for task, task_values in values.items()}


def _verdict_over_seeds(
    comparison: Comparison, means: list[list[dict[str, float]]]
) -> PairedVerdict:
    """The verdict on several seeds, with a t interval over tasks and seeds.

    The variance of the difference is the one over tasks plus the one over seeds, with
    Satterthwaite's degrees of freedom. The verdict is "unknown" with fewer than two shared tasks.
    Where nothing varies the verdict of `comparison`, which is over the rows, is kept.

    `means` holds two sides; each side is a list of seeds, and each seed maps task -> mean value.
    """
    verdict_of_rows = comparison.outcome
    seeds_before, seeds_after = means
    shared_tasks = set.intersection(*(set(seed) for seeds in means for seed in seeds))
    if len(shared_tasks) < 2:
        return replace(
            verdict_of_rows, verdict="unknown", reason="the seeds share no tasks", diff=None
        )
    levels_before, levels_after = (
        [_mean_over_tasks(seed, shared_tasks) for seed in seeds] for seeds in means
    )
    diff = _mean(levels_after) - _mean(levels_before)
    task_differences = [
        _mean([seed[task] for seed in seeds_after]) - _mean([seed[task] for seed in seeds_before])
        for task in shared_tasks
    ]
    task_variance = _variance(task_differences) / len(task_differences)
    seed_freedom = len(levels_before) + len(levels_after) - 2
    pooled_variance = (
        _squared_deviations(levels_before) + _squared_deviations(levels_after)
    ) / seed_freedom
    seed_variance = pooled_variance * (1.0 / len(levels_before) + 1.0 / len(levels_after))
    total_variance = task_variance + seed_variance
    if total_variance <= 0.0:  # there is nothing to divide by
        return replace(verdict_of_rows, method=f"{verdict_of_rows.method}, seeds alike")
    df = total_variance**2 / (
        task_variance**2 / (len(task_differences) - 1) + seed_variance**2 / seed_freedom
    )
    standard_error = math.sqrt(total_variance)
    half_width = t_quantile(1.0 - ALPHA / 2.0, df) * standard_error
    p = min(1.0, 2.0 * t_cdf(-abs(diff) / standard_error, df))
    interval = Interval(diff - half_width, diff + half_width)
    higher_is_better = HIGHER_IS_BETTER[comparison.measure] if comparison.measure else True
    if p < ALPHA and interval.excludes_zero:
        word = "better" if (diff > 0) == higher_is_better else "worse"
    else:
        word = "no_difference" if interval.within(verdict_of_rows.margin) else "inconclusive"
    return replace(
        verdict_of_rows,
        verdict=word,
        reason="",
        before=_mean(levels_before),
        after=_mean(levels_after),
        diff=diff,
        low=interval.low,
        high=interval.high,
        p=p,
        n=len(shared_tasks),
        detectable=(t_quantile(1.0 - ALPHA / 2.0, df) + t_quantile(POWER, df)) * standard_error,
        method=f"t over {len(shared_tasks)} tasks and "
        f"{len(levels_before)} + {len(levels_after)} seeds",
    )


def _mean_over_tasks(task_means: dict[str, float], tasks: set[str]) -> float:
    """The mean of one seed over `tasks`; `task_means` maps task -> mean value."""
    return math.fsum(task_means[task] for task in tasks) / len(tasks)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _squared_deviations(values: Sequence[float]) -> float:
    average = _mean(values)
    return math.fsum((value - average) ** 2 for value in values)


def _variance(values: Sequence[float]) -> float:
    return _squared_deviations(values) / (len(values) - 1)
