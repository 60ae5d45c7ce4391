"""Seeds of one configuration, compared as a group.

One run says what one seed came to. Runs that differ in nothing but the seed are taken together: a
group's value on a task is the mean over its seeds, and the uncertainty of the difference counts
both the tasks and how far apart the seeds of one configuration came out.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import replace

from engine.evidence.compare.candidates import Candidate
from engine.evidence.compare.settings_diff import NEUTRAL, making_of
from engine.evidence.stats.distributions import t_cdf, t_quantile
from engine.evidence.stats.inference import ALPHA, POWER, Interval, PairedVerdict
from engine.evidence.stats.results import HIGHER_IS_BETTER, Measure, by_prompt, side
from engine.evidence.verdict.comparison import (
    Comparison,
    compare_rows,
    heed_errors,
    values_of_failures,
)
from engine.home.run_dir import Home
from engine.records.lines.evaluation_row import EvaluationRow


def grouped(home: Home, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates, with those that differ only in their seed joined to one.

    A group keeps the place of its first candidate; `members` are its seeds, `rows` the rows of all.
    The list stays as it is where nothing can be joined, or where everything would become one
    candidate and nothing would be left to compare.
    """
    by_configuration: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        by_configuration.setdefault(_identity(home, candidate), []).append(candidate)
    if len(by_configuration) < 2 or len(by_configuration) == len(candidates):
        return list(candidates)
    return [_joined(home, members) for members in by_configuration.values()]


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
    # by_prompt wants all sides at once; its answer is dealt back to the members in order.
    rows_by_prompt = iter(
        by_prompt(*(candidate.rows for members in members_of_sides for candidate in members))
    )
    rows_of_sides = [[next(rows_by_prompt) for _ in members] for members in members_of_sides]
    all_rows = [seed_rows for members in rows_of_sides for seed_rows in members]
    # One verdict for every value that a failed row may be counted as, to see if that decides.
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
    # A new verdict over the seeds has no reason. Only where the verdict of the rows stayed does
    # what decided it stay too.
    errors_decide = comparison.errors_decide and bool(outcomes[0].reason)
    comparison = replace(comparison, outcome=outcomes[0], errors_decide=errors_decide)
    return heed_errors(comparison, outcomes[-1])


def _identity(home: Home, candidate: Candidate) -> str:
    """A text that is equal for two candidates that are seeds of one configuration.

    A candidate whose training is not known, or has no seed, equals no other.
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
    identity = [training.choices(), settings, checkpoint]
    return json.dumps(identity, sort_keys=True, default=str)


def _joined(home: Home, members: list[Candidate]) -> Candidate:
    """The candidates of one configuration as one; where a seed repeats, only the newest."""
    if len(members) == 1:
        return members[0]
    seeds = [seed_of(home, candidate) for candidate in members]
    if len(set(map(str, seeds))) < len(seeds):
        return _newest(members)
    label = f"{members[0].label} and {len(members) - 1} more seeds"
    if len(members) == 2:
        label = f"{members[0].label} and {members[1].label}"
    rows = [row for candidate in members for row in candidate.rows]
    return replace(members[0], label=label, rows=rows, members=tuple(members))


def _newest(members: list[Candidate]) -> Candidate:
    """The last candidate: repeats of one seed tell nothing about seeds, so the newest stands for
    them."""
    return members[-1]


def _task_means(
    rows: Sequence[EvaluationRow], measure: Measure, failed: float | None
) -> dict[str, float]:
    """The mean value of each task; `failed` is the value of a failed row, None leaves it out."""
    values = side(rows, measure, failed).values
    return {task: math.fsum(task_values) / len(task_values) for task, task_values in values.items()}


def _verdict_over_seeds(
    comparison: Comparison, means: list[list[dict[str, float]]]
) -> PairedVerdict:
    """The verdict on several seeds, with a t interval over tasks and seeds.

    `means` holds two sides, each a list of seeds, each task -> mean value. The variance of the
    difference is that over tasks plus that over seeds, with Satterthwaite's degrees of freedom.
    "unknown" with fewer than two shared tasks; the verdict of the rows stays where nothing varies.
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


def _mean_over_tasks(run: dict[str, float], tasks: set[str]) -> float:
    """The mean of one seed over the tasks."""
    return math.fsum(run[task] for task in tasks) / len(tasks)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _squared_deviations(values: Sequence[float]) -> float:
    average = _mean(values)
    return math.fsum((value - average) ** 2 for value in values)


def _variance(values: Sequence[float]) -> float:
    return _squared_deviations(values) / (len(values) - 1)
