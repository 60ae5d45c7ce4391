"""Rows judged by a named metric of the environment in place of success or reward."""

from collections.abc import Sequence
from dataclasses import replace

from engine.core.errors import UserError
from engine.evidence.compare.candidates import Candidate
from engine.evidence.stats import results

_SHOWN_NAMES = 20  # most metrics that the hint of an error names
OWN_MEASURES = ("success", "reward", "loss")  # what is compared if no metric is named


def by_metric(candidates: Sequence[Candidate], metric: str) -> list[Candidate]:
    """The candidates with one of the environment's own metrics in place of their reward.

    In their rows the reward becomes that metric, and success and loss become None. Rows without the
    metric are left out, because a metric that only some tasks have is absent on the others, not 0.

    Raises UserError BAD_ARGUMENT if no row has such a metric; its hint names the metrics that
    exist.
    """
    judged_candidates = []
    for candidate in candidates:
        # A candidate that stands for several seeds has a member for each.
        members = tuple(by_metric_of(member, metric) for member in candidate.members)
        judged_candidates.append(replace(by_metric_of(candidate, metric), members=members))
    judged_rows = (row for candidate in judged_candidates for row in candidate.rows)
    if any(row.reward is not None for row in judged_rows):
        return judged_candidates
    raise _no_such_metric(candidates, metric)


def _no_such_metric(candidates: Sequence[Candidate], metric: str) -> UserError:
    """The error that no answer of the candidates has `metric`; its hint names the metrics that
    exist."""
    names: set[str] = set()
    for candidate in candidates:
        for row in candidate.rows:
            names |= set(row.metrics or {})
    known_names = ", ".join(sorted(names)[:_SHOWN_NAMES])
    return UserError(
        "BAD_ARGUMENT",
        f"no answer has a metric {metric[:60]!r}",
        hint=f"Known: {known_names}." if names else "The scorer names none.",
        field="metric",
    )


def by_metric_of(candidate: Candidate, metric: str) -> Candidate:
    """One candidate with `metric` as the reward of its rows; rows without the metric are left
    out."""
    return replace(candidate, rows=results.by_metric(candidate.rows, metric))
