"""Evidence in the form that results and files have, from rows written as plain objects."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from engine.evidence.compare import rank_changes
from engine.evidence.stats import results
from engine.evidence.stats.inference import Side
from engine.evidence.verdict import comparison, holdout_reuse, provenance, regression, verdict
from engine.evidence.verdict.comparison import Comparison
from engine.home.run_dir import Home, RunDir
from engine.records.lines.evaluation_row import EvaluationRow

Row = Mapping[str, Any]


def records(rows: Iterable[Row | EvaluationRow]) -> list[EvaluationRow]:
    """The rows as records; a model is made up where none is named."""
    return [
        row if isinstance(row, EvaluationRow) else EvaluationRow.of({"model": "m", **row}, "a test")
        for row in rows
    ]


def compare_rows(before: Iterable[Row], after: Iterable[Row]) -> Comparison:
    return comparison.compare_rows(records(before), records(after))


def measure_of(*row_sets: Iterable[Row]) -> str | None:
    return results.measure_of(*(records(rows) for rows in row_sets))


def side(rows: Iterable[Row], measure: results.Measure) -> Side:
    return results.side(records(rows), measure)


def run_verdict(run: RunDir) -> dict[str, Any]:
    return verdict.run_verdict(run).to_json()


def kept_skills(run: RunDir) -> dict[str, Any]:
    kept = regression.kept_skills(run)
    return kept.to_json() if kept else {}


def compare_skills(before: Sequence[Row], after: Sequence[Row]) -> dict[str, Any]:
    return regression.compare_skills(records(before), records(after)).to_json()


def verify(home: Home, run_id: str) -> dict[str, Any]:
    return provenance.verify(home, run_id).to_json()


def read_provenance(run: RunDir) -> dict[str, Any]:
    sealed = provenance.read_provenance(run)
    return sealed.to_json() if sealed else {}


def holdout_use(home: Home, env_id: str, run_id: str = "") -> dict[str, Any]:
    return holdout_reuse.holdout_use(home, env_id, run_id).to_json()


def use_by_env(home: Home) -> dict[str, dict[str, Any]]:
    return {env_id: use.to_json() for env_id, use in holdout_reuse.use_by_env(home).items()}


def order_changes(models: Mapping[str, Iterable[Row]]) -> dict[str, Any]:
    return rank_changes.rank_changes({ref: records(rows) for ref, rows in models.items()}).to_json()


def count_pairs(values: Iterable[rank_changes.BeforeAfter]) -> dict[str, int]:
    return asdict(rank_changes.count_pairs(values))
