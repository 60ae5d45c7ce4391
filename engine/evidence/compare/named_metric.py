"""Rows judged by a named metric of the environment in place of success or reward."""

from collections.abc import Sequence
from dataclasses import replace

from engine.core.errors import UserError
from engine.evidence.compare.candidates import Candidate
from engine.records.lines.evaluation_row import EvaluationRow

_SHOWN_NAMES = 20  # of metrics, in the hint of a refusal
OWN_MEASURES = ("success", "reward", "loss")  # what is compared without a name


def by_metric(candidates: Sequence[Candidate], metric: str) -> list[Candidate]:
    """The candidates with the metric called `metric` as the reward of their rows, and no success. A
    row without it is left out: what only some tasks have is absent on the others, not 0.

    Raises UserError BAD_ARGUMENT if no row has such a metric; its hint names those there are.
    """
    judged = [
        replace(
            candidate,
            rows=_rows_by_metric(candidate.rows, metric),
            members=tuple(by_metric_of(member, metric) for member in candidate.members),
        )
        for candidate in candidates
    ]
    if any(row.reward is not None for candidate in judged for row in candidate.rows):
        return judged
    names = sorted({name for c in candidates for row in c.rows for name in row.metrics or {}})
    raise UserError(
        "BAD_ARGUMENT",
        f"no answer has a metric {metric[:60]!r}",
        hint=f"Known: {', '.join(names[:_SHOWN_NAMES])}." if names else "The scorer names none.",
        field="metric",
    )


def by_metric_of(candidate: Candidate, metric: str) -> Candidate:
    """One candidate of `by_metric`, which may have no row with the metric."""
    return replace(candidate, rows=_rows_by_metric(candidate.rows, metric))


def _rows_by_metric(rows: Sequence[EvaluationRow], metric: str) -> list[EvaluationRow]:
    """The rows that have the metric, with its value as their reward. A row whose scoring failed
    stays: it might have had it."""
    return [
        row.model_copy(
            update={"reward": (row.metrics or {}).get(metric), "success": None, "loss": None}
        )
        for row in rows
        if row.error or metric in (row.metrics or {})
    ]
