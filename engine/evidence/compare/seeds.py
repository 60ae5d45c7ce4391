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
    """The candidates with those that differ in the seed alone as one, where two or more are left.

    A group keeps the place of its first candidate; `members` are its seeds, `rows` the rows of all.
    """
    groups: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault(_identity(home, candidate), []).append(candidate)
    if len(groups) < 2 or len(groups) == len(candidates):
        return list(candidates)
    return [_joined(home, members) for members in groups.values()]


def seed_of(home: Home, candidate: Candidate) -> object:
    return making_of(home, candidate).settings.get("seed")


def compare_candidates(home: Home, first: Candidate, other: Candidate) -> Comparison:
    """Two candidates task by task; with seeds on either side, over tasks and seeds."""
    comparison = compare_rows(first.rows, other.rows)
    sides = (first.members or (first,), other.members or (other,))
    measure = comparison.measure
    if max(map(len, sides)) < 2 or comparison.outcome.diff is None or measure is None:
        return comparison
    prompts = iter(by_prompt(*(candidate.rows for members in sides for candidate in members)))
    rows = [[next(prompts) for _ in members] for members in sides]
    every = [of_seed for members in rows for of_seed in members]
    outcomes = [
        _seeded(
            comparison,
            [[_by_task(of_seed, measure, failed) for of_seed in members] for members in rows],
        )
        for failed in values_of_failures(measure, *every)
    ]
    # Where the seeds are alike the verdict of the rows stays, and so does what decided it.
    decide = comparison.errors_decide and bool(outcomes[0].reason)
    comparison = replace(comparison, outcome=outcomes[0], errors_decide=decide)
    return heed_errors(comparison, outcomes[-1])


def _identity(home: Home, candidate: Candidate) -> str:
    """What two candidates must share to be seeds of one configuration."""
    making = making_of(home, candidate)
    if not making.config or "seed" not in making.settings:
        return f"alone: {candidate.label} in {candidate.source}"
    settings = {
        name: value
        for name, value in making.settings.items()
        if name not in NEUTRAL and name != "seed"
    }
    named = candidate.label.partition("@")[2]  # two checkpoints of a run are no two seeds
    body = [making.choices(), settings, named]
    return json.dumps(body, sort_keys=True, default=str)


def _joined(home: Home, members: list[Candidate]) -> Candidate:
    seeds = [seed_of(home, candidate) for candidate in members]
    if len(members) < 2 or len(set(map(str, seeds))) < len(seeds):
        return members[0] if len(members) == 1 else _same_seed(members)
    label = f"{members[0].label} and {len(members) - 1} more seeds"
    if len(members) == 2:
        label = f"{members[0].label} and {members[1].label}"
    rows = [row for candidate in members for row in candidate.rows]
    return replace(members[0], label=label, rows=rows, members=tuple(members))


def _same_seed(members: list[Candidate]) -> Candidate:
    """Repeats of one seed are no new evidence about seeds; the newest stands for them."""
    return members[-1]


def _by_task(
    rows: Sequence[EvaluationRow], measure: Measure, failed: float | None
) -> dict[str, float]:
    values = side(rows, measure, failed).values
    return {task: math.fsum(each) / len(each) for task, each in values.items()}


def _seeded(comparison: Comparison, means: list[list[dict[str, float]]]) -> PairedVerdict:
    """The verdict with a t interval over tasks and seeds (Satterthwaite's degrees of freedom)."""
    old = comparison.outcome
    shared = set.intersection(*(set(run) for runs in means for run in runs))
    if len(shared) < 2:
        return replace(old, verdict="unknown", reason="the seeds share no tasks", diff=None)
    before, after = ([_level(run, shared) for run in runs] for runs in means)
    diff = _mean(after) - _mean(before)
    gaps = [_mean([r[t] for r in means[1]]) - _mean([r[t] for r in means[0]]) for t in shared]
    tasks = _variance(gaps) / len(gaps)
    freedom = len(before) + len(after) - 2
    pooled = (_squares(before) + _squares(after)) / freedom
    seeds = pooled * (1.0 / len(before) + 1.0 / len(after))
    spread = tasks + seeds
    if spread <= 0.0:
        return replace(old, method=f"{old.method}, seeds alike")
    df = spread**2 / (tasks**2 / (len(gaps) - 1) + seeds**2 / freedom)
    error = math.sqrt(spread)
    reach = t_quantile(1.0 - ALPHA / 2.0, df) * error
    p = min(1.0, 2.0 * t_cdf(-abs(diff) / error, df))
    interval = Interval(diff - reach, diff + reach)
    better = HIGHER_IS_BETTER[comparison.measure] if comparison.measure else True
    if p < ALPHA and interval.excludes_zero:
        word = "better" if (diff > 0) == better else "worse"
    else:
        word = "no_difference" if interval.within(old.margin) else "inconclusive"
    return replace(
        old,
        verdict=word,
        reason="",
        before=_mean(before),
        after=_mean(after),
        diff=diff,
        low=interval.low,
        high=interval.high,
        p=p,
        n=len(shared),
        detectable=(t_quantile(1.0 - ALPHA / 2.0, df) + t_quantile(POWER, df)) * error,
        method=f"t over {len(shared)} tasks and {len(before)} + {len(after)} seeds",
    )


def _level(run: dict[str, float], tasks: set[str]) -> float:
    return math.fsum(run[task] for task in tasks) / len(tasks)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _squares(values: Sequence[float]) -> float:
    middle = _mean(values)
    return math.fsum((value - middle) ** 2 for value in values)


def _variance(values: Sequence[float]) -> float:
    return _squares(values) / (len(values) - 1)
