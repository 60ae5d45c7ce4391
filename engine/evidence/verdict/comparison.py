"""Two evaluations of the same tasks, compared: the word, its numbers, and the sentence about it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.core.hints import Call
from engine.evidence.stats.inference import ALPHA, MARGIN, PairedVerdict, holm, paired_verdict
from engine.evidence.stats.results import (
    HIGHER_IS_BETTER,
    Level,
    Measure,
    by_prompt,
    level,
    measure_of,
    rounded,
    rounded_ends,
    show,
    show_change,
    side,
    value_of,
)
from engine.evidence.verdict.holdout_reuse import correction_factor
from engine.records.lines.evaluation_row import EvaluationRow

_DECIDED = ("better", "worse", "no_difference")
_LOSS_MARGIN = 0.01  # of a loss, one percent is no difference


@dataclass(frozen=True)
class Comparison:
    """Two sets of rows on the same tasks, compared.

    `errors_decide` where the verdict was taken back because it depends on the answers whose
    scoring failed; `ids` is how many task ids the outcome's tasks had, where rows share their
    prompts, else 0.
    """

    measure: Measure | None
    outcome: PairedVerdict
    before: Level | None
    after: Level | None
    errors_decide: bool = False
    ids: int = 0

    @property
    def lead(self) -> float:
        """How far the second is ahead of the first, 0 where nothing could be compared."""
        gap = self.outcome.diff or 0.0
        return -gap if self.measure == "loss" else gap

    @property
    def difference(self) -> float | None:
        return rounded(self.outcome.diff)

    @property
    def interval(self) -> list[float | None]:
        return rounded_ends(self.outcome.low, self.outcome.high)

    @property
    def p(self) -> float | None:
        """In three digits."""
        return None if self.outcome.p is None else float(f"{self.outcome.p:.3g}")

    @property
    def reason(self) -> str:
        """Why the verdict is not better or worse, "" when it is."""
        outcome, measure = self.outcome, self.measure
        if outcome.reason or measure is None:
            return outcome.reason
        unit = " points" if measure == "success" else ""
        if outcome.verdict == "inconclusive":
            gap = show_change(outcome.detectable, measure).removeprefix("+")
            return f"{outcome.n} tasks would show a change of {gap}{unit} or more"
        if outcome.verdict == "no_difference":
            margin = show_change(outcome.margin, measure).removeprefix("+")
            return f"the whole interval lies within {margin}{unit} of 0"
        return ""

    def to_json(self) -> dict[str, object]:
        """The numbers of a comparison under the names that results use."""
        outcome = self.outcome
        return {
            "verdict": outcome.verdict,
            "metric": self.measure,
            "difference": self.difference,
            "interval": self.interval,
            "n": outcome.n,
            "p": self.p,
            "smallest_detectable_gap": rounded(outcome.detectable),
            "method": outcome.method,
            "gained": len(outcome.gained),
            "lost": len(outcome.lost),
            "unpaired": outcome.unpaired,
            "errors": list(outcome.errors),
            "reason": self.reason,
        }


def without_evidence(measure: Measure | None, reason: str) -> Comparison:
    """The comparison where there is nothing to compare, with the reason."""
    return Comparison(measure, PairedVerdict("unknown", reason), None, None)


def compare_rows(before: Sequence[EvaluationRow], after: Sequence[EvaluationRow]) -> Comparison:
    """Compare two evaluations task by task, on what both were scored by.

    Tasks of one prompt are one task (`results.by_prompt`).
    """
    ids = len({row.task for rows in (before, after) for row in rows})
    before, after = by_prompt(before, after)
    prompts = len({row.task for rows in (before, after) for row in rows})
    measure = measure_of(before, after)
    if measure is None:
        missing = "the first" if not before else "the second" if not after else "either"
        return without_evidence(None, f"nothing was scored in {missing} evaluation")
    old, new = level(before, measure), level(after, measure)
    margin = None
    if measure == "success":
        margin = MARGIN
    elif measure == "loss":
        margin = _LOSS_MARGIN * abs(old.value or 0.0)
    outcomes = [
        paired_verdict(
            side(before, measure, failed),
            side(after, measure, failed),
            higher_is_better=HIGHER_IS_BETTER[measure],
            margin=margin,
        )
        for failed in values_of_failures(measure, before, after)
    ]
    comparison = Comparison(measure, outcomes[0], old, new, ids=ids if prompts < ids else 0)
    return heed_errors(comparison, outcomes[-1])


def values_of_failures(measure: Measure, *row_sets: Sequence[EvaluationRow]) -> list[float | None]:
    """What a failed scoring counts as, each way a comparison is judged: left out (None), and where
    one failed as not solved (0), because its absence must not make a side look better than it is.
    """
    failed = any(value_of(row, measure) is None for rows in row_sets for row in rows)
    return [None, 0.0] if failed and measure != "loss" else [None]


def heed_errors(comparison: Comparison, counted: PairedVerdict) -> Comparison:
    """Takes a verdict back that is another one with failed scorings counted as not solved."""
    old = comparison.outcome
    measure = comparison.measure
    if measure is None or old.verdict not in _DECIDED or counted.verdict == old.verdict:
        return comparison
    levels = f"{show(counted.before, measure)} to {show(counted.after, measure)}"
    failed = sum(old.errors)
    who = f"the {failed} answers" if failed > 1 else "the one answer"
    reason = (
        f"{who} whose scoring failed decide: left out, the verdict is {_words(old.verdict)}; "
        f"counted as not solved, {_words(counted.verdict)} ({levels})"
    )
    outcome = replace(old, verdict="inconclusive", reason=reason)
    return replace(comparison, outcome=outcome, errors_decide=True)


def correct_for_many(
    comparisons: list[Comparison], evaluations: Sequence[int] = ()
) -> list[float | None]:
    """Holm's correction over several comparisons, and for evaluations of the same models before
    (`evaluations` by comparison, see holdout_reuse.evaluations_of_pair); verdicts that are no
    longer significant become inconclusive.

    Changes `comparisons` in place and returns the adjusted p values, None where there was no test.
    """
    tested = [i for i, item in enumerate(comparisons) if item.outcome.p is not None]
    adjusted = holm([comparisons[i].outcome.p or 0.0 for i in tested])
    result: list[float | None] = [None] * len(comparisons)
    for index, p in zip(tested, adjusted, strict=True):
        times = evaluations[index] if evaluations else 1
        p = min(1.0, p * correction_factor(times))
        result[index] = p
        item = comparisons[index]
        if item.outcome.verdict in ("better", "worse") and p >= ALPHA:
            many = [f"{len(tested)} comparisons"] if len(tested) > 1 else []
            many += [f"{times} evaluations of these models"] if times > 1 else []
            reason = (
                f"not significant after correction for {' and '.join(many)} (p = {p:.2g}), "
                "which the interval does not hold"
            )
            outcome = replace(item.outcome, verdict="inconclusive", reason=reason)
            comparisons[index] = replace(item, outcome=outcome)
    return result


def sentence(comparison: Comparison, kind: str = "") -> str:
    """The comparison in one sentence a person can repeat; `kind` stands before the measure."""
    outcome, measure = comparison.outcome, comparison.measure
    if outcome.diff is None or measure is None:
        return f"The verdict is unknown: {outcome.reason}."
    before, after = show(outcome.before, measure), show(outcome.after, measure)
    change = f"{kind}{measure} went from {before} to {after} on {outcome.n} tasks"
    span = f"{show_change(outcome.low, measure)} to {show_change(outcome.high, measure)}"
    span += " points" if measure == "success" else ""
    word = _words(outcome.verdict).capitalize()
    text = f"{word}: {change} (95 % interval of the change {span})"
    return f"{text}; {comparison.reason}." if comparison.reason else f"{text}."


def notes_on_counting(comparison: Comparison) -> list[str]:
    """What to know of a comparison whose scorings failed or whose tasks share their prompts."""
    notes = []
    if comparison.errors_decide:
        notes.append(
            "The answers whose scoring failed decide this verdict: read them, mend the scorer, "
            "push it and score the answers again (evaluate with regrade)."
        )
    if comparison.ids:
        notes.append(
            f"{comparison.ids} tasks have {comparison.outcome.n} different prompts: tasks of one "
            "prompt are one question and count as one."
        )
    return notes


def calls_for_errors(run_id: str) -> list[Call]:
    """The next moves where failed scorings decide."""
    read = Call("read_rollouts", {"run_id": run_id, "pick": "error"})
    return [read, Call("diagnose", {"run_id": run_id})]


def _words(verdict: str) -> str:
    return verdict.replace("_", " ")
