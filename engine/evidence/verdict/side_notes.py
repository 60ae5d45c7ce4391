"""What a verdict says beside its comparison: the reward where success ties, answers that are cut
far more often than before, the word of the environment's reward audit, scores that are missing,
and whether the verdict is the one that was expected."""

from collections.abc import Sequence
from pathlib import Path

from engine.core.files import read_object
from engine.core.format import whole_percent
from engine.evidence.stats.inference import PairedVerdict
from engine.evidence.stats.results import rounded, show_change
from engine.evidence.verdict.comparison import Comparison, compare_rows
from engine.evidence.verdict.sides import Sides
from engine.records.lines.evaluation_row import EvaluationRow
from engine.records.run_config import RunConfig

_CUT_MOVED = 0.2  # a share of cut answers that moved by this much is worth a word
_FAILED_AUDIT = "risk"


def tie_sentences(sides: Sides, comparison: Comparison) -> list[str]:
    """Where success is the same on every task: what the reward did, and how many answers are cut.

    [] where success moved on any task, or where something else was compared.
    """
    outcome = comparison.outcome
    if comparison.measure != "success" or not outcome.n or outcome.gained or outcome.lost:
        return []
    return [*_reward_sentence(sides), *_cut_sentence(sides)]


def _reward_sentence(sides: Sides) -> list[str]:
    """What the reward did where success ties, as a list of one sentence.

    [] where the reward did not move either, or was not measured on both sides.
    """
    comparison = compare_rows(_by_reward(sides.before), _by_reward(sides.after))
    before, after = comparison.outcome.before, comparison.outcome.after
    if comparison.measure != "reward" or before is None or after is None:
        return []
    if before == after:
        return []
    low, high = (show_change(end, "reward") for end in comparison.interval)
    return [
        f"Success ties on every task; the reward went from {rounded(before):.3g} to "
        f"{rounded(after):.3g} (95 % interval of the change {low} to {high})."
    ]


def _by_reward(rows: Sequence[EvaluationRow]) -> list[EvaluationRow]:
    """The rows without success, so that their reward is compared."""
    return [row.model_copy(update={"success": None}) for row in rows]


def _cut_sentence(sides: Sides) -> list[str]:
    """That far more or fewer answers are cut, as a list of one sentence; [] where it is not so."""
    before, after = _cut_share(sides.before), _cut_share(sides.after)
    if abs(after - before) < _CUT_MOVED:
        return []
    return [f"Answers cut by a limit went from {whole_percent(before)} to {whole_percent(after)}."]


def _cut_share(rows: Sequence[EvaluationRow]) -> float:
    """The share of the rows that a limit of length or turns cut; 0.0 for none."""
    return sum(row.cut for row in rows) / len(rows) if rows else 0.0


def audit_sentences(config: RunConfig | None) -> list[str]:
    """That the reward audit of the run's environment failed, as a list of one sentence; else []."""
    if not audit_risk(config) or config is None:
        return []
    audit = read_object(Path(config.env_dir) / "audit.json")
    risks = ", ".join(str(risk) for risk in (audit.get("risks") or [])[:2])
    named = f" ({risks} are paid)" if risks else ""
    return [f"The reward audit of this environment says risk{named}: a score may not mean right."]


def audit_risk(config: RunConfig | None) -> str:
    """The word "risk" where the reward audit of the run's environment failed, else ""."""
    if config is None or not config.env_dir:
        return ""
    verdict = read_object(Path(config.env_dir) / "audit.json").get("verdict")
    return _FAILED_AUDIT if verdict == _FAILED_AUDIT else ""


def missing_score_sentences(outcome: PairedVerdict) -> list[str]:
    """Sentences on tasks scored on one side only, and on answers whose scoring failed."""
    notes = []
    if outcome.unpaired:
        notes.append(f"{outcome.unpaired} tasks were scored on one side only and are left out.")
    errors_before, errors_after = outcome.errors
    if errors_before + errors_after and outcome.verdict != "unknown":
        notes.append(
            f"Scoring failed on {errors_before} attempts before and {errors_after} after; "
            "they are left out of the comparison."
        )
    return notes


def expectation_of(expected: str, verdict: str) -> tuple[str, bool | None]:
    """What was expected of the run, and whether it came true.

    The second is None where the verdict is unknown or inconclusive. ("", None) where nothing was
    expected, or something other than "better" or "no_difference".
    """
    if expected not in ("better", "no_difference"):
        return "", None
    if verdict in ("unknown", "inconclusive"):
        return expected, None
    return expected, verdict == expected
