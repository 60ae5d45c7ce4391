"""Compares two evaluations of the same tasks: the verdict in a word, its numbers, and a
sentence."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from engine.core.format import percent, whole_percent
from engine.core.hints import Call
from engine.evidence.stats.any_of_k import PassAtK, change_of_pass_at_k
from engine.evidence.stats.exam_size import CHANGED_SHARE
from engine.evidence.stats.inference import (
    ALPHA,
    MARGIN,
    PairedVerdict,
    holm,
    mcnemar_midp,
    paired_verdict,
    wilson,
)
from engine.evidence.stats.results import (
    HIGHER_IS_BETTER,
    Level,
    Measure,
    level,
    measure_of,
    rounded,
    rounded_ends,
    show,
    show_change,
    side,
    value_of,
    with_one_id_per_prompt,
)
from engine.evidence.verdict.holdout_reuse import correction_factor
from engine.records.lines.evaluation_row import EvaluationRow

_DECIDED = ("better", "worse", "no_difference")
_FAR_LARGER = 2.0  # a change of this many smallest detectable gaps was never in doubt
_LOSS_MARGIN = 0.01  # a loss that changed by less than one percent counts as unchanged


@dataclass(frozen=True)
class LostOfRight:
    """How many of the tasks that were right before are wrong now. A mean hides these if other tasks
    became right.

    Attributes:
        right, lost: how many tasks were right before (at least 1), and how many of those are wrong
            now.
        share: lost / right.
        interval: low and high end of the 95 % interval of `share` (Wilson).
    """

    right: int
    lost: int
    share: float
    interval: tuple[float, float]

    @staticmethod
    def from_counts(right: int, lost: int) -> "LostOfRight":
        """Build the record from the two counts; `right` must be at least 1."""
        interval = wilson(lost, right)
        ends = (round(interval.low, 4), round(interval.high, 4))
        return LostOfRight(right, lost, round(lost / right, 4), ends)

    @property
    def text(self) -> str:
        """The loss in words, such as "4 of 44 right ones lost (4 to 21 %)"."""
        low, high = (percent(end, digits=0, unit="") for end in self.interval)
        return f"{self.lost} of {self.right} right ones lost ({low} to {high} %)"

    def to_json(self) -> dict[str, object]:
        """The counts, the share and its interval as a JSON object."""
        return asdict(self)


def worst_kind(losses: Mapping[str, LostOfRight]) -> str | None:
    """Return the kind of task with the most lost tasks; of several, that with the largest share.

    Returns None if no kind lost any, or if fewer than five tasks of that kind were right: "2 of 2
    lost" may be chance.
    """
    worst = max(
        losses, key=lambda kind: (losses[kind].lost, losses[kind].share, kind), default=None
    )
    if worst is None or not losses[worst].lost or losses[worst].right < 5:
        return None
    return worst


@dataclass(frozen=True)
class Comparison:
    """The result of comparing two evaluations of the same tasks.

    Attributes:
        measure: what was compared; None if nothing was scored.
        outcome: the verdict with its statistics.
        before, after: how each side did alone; None if nothing was scored.
        errors_decide: whether the verdict became "inconclusive" because it depends on how answers
            whose scoring failed are counted.
        id_count: if several tasks share a prompt, how many task ids there were (tasks with the same
            prompt count as one in `outcome`); 0 if every task has its own prompt.
        metric_name: the name of the environment's metric that the rows hold in place of the reward;
            "" if they hold the reward.
    """

    measure: Measure | None
    outcome: PairedVerdict
    before: Level | None
    after: Level | None
    errors_decide: bool = False
    id_count: int = 0
    metric_name: str = ""

    @property
    def lead(self) -> float:
        """How much better the second of the two compared sides (evaluations) is: above 0 if better,
        below 0 if worse.

        A lower loss is better, so the difference of a loss is negated. Returns 0 if nothing was
        compared.
        """
        difference = self.outcome.diff or 0.0  # the second side minus the first
        return -difference if self.measure == "loss" else difference

    @property
    def lost_of_right(self) -> "LostOfRight | None":
        """How many of the tasks that the first side solved the second side does not solve. The mean
        hides these if other tasks were gained.

        Returns None if the first side solved no task, if success was not compared, or if tasks were
        tried several times: most tasks are then neither solved nor failed.
        """
        outcome = self.outcome
        if self.measure != "success" or outcome.before is None:
            return None
        for level_of_side in (self.before, self.after):
            tried_once = level_of_side and level_of_side.attempts == level_of_side.tasks
            if not tried_once:
                return None
        solved_before = round(outcome.before * outcome.n)  # the rate times the number of tasks
        if solved_before == 0:
            return None
        return LostOfRight.from_counts(solved_before, len(outcome.lost))

    @property
    def difference(self) -> float | None:
        """The mean after minus the mean before, rounded; None if nothing was compared."""
        return rounded(self.outcome.diff)

    @property
    def interval(self) -> list[float | None]:
        """The two ends of the interval of the difference, rounded."""
        return rounded_ends(self.outcome.low, self.outcome.high)

    @property
    def p(self) -> float | None:
        """The p value with three significant digits; None if there was no test."""
        return None if self.outcome.p is None else float(f"{self.outcome.p:.3g}")

    @property
    def reason(self) -> str:
        """Why the verdict is neither better nor worse; "" if it is one of the two.

        This is the reason that the statistics gave, if any. Else, for "inconclusive", the smallest
        change that this many tasks would show; for "no_difference", the margin around 0 that
        contains the interval.
        """
        outcome, measure = self.outcome, self.measure
        if outcome.reason or measure is None:
            return outcome.reason
        if outcome.verdict == "inconclusive":
            gap = _size_text(outcome.detectable, measure)
            return f"{outcome.n} tasks would show a change of {gap} or more, by their noise"
        if outcome.verdict == "no_difference":
            margin = _size_text(outcome.margin, measure)
            return f"the whole interval lies within {margin} of 0"
        return ""

    def to_json(self) -> dict[str, object]:
        """The comparison as a JSON object, under the key names that stored results use."""
        outcome, lost_of_right = self.outcome, self.lost_of_right
        group_entry = {"groups": outcome.groups} if outcome.groups else {}
        lost_entry = {"lost_of_right": lost_of_right.to_json()} if lost_of_right else {}
        body: dict[str, object] = {
            "verdict": outcome.verdict,
            "metric": self.metric_name or self.measure,
            "difference": self.difference,
            "interval": self.interval,
            "n": outcome.n,
            **group_entry,
            "p": self.p,
            "smallest_detectable_gap": rounded(outcome.detectable),
            **self._note_on_gap(),
            "method": outcome.method,
            "gained": len(outcome.gained),
            "lost": len(outcome.lost),
            **lost_entry,
            "unpaired": outcome.unpaired,
            "errors": list(outcome.errors),
            "reason": self.reason,
        }
        change = self._change_of_pass_at_k()
        if change is not None:
            body["pass_at_k_change"] = change.to_json()
        return body

    def _note_on_gap(self) -> dict[str, str]:
        """A note on what the smallest detectable gap is: not the change, and not what a dry run
        named before there were results. Returns {} if there is no gap."""
        outcome = self.outcome
        if outcome.detectable is None:
            return {}
        if self.measure == "success":
            changed = len(outcome.gained) + len(outcome.lost)
            text = (
                f"measured: {changed} of {outcome.n} tasks changed; before a run "
                f"{whole_percent(CHANGED_SHARE)} are assumed"
            )
        else:
            text = f"measured from the noise of these {outcome.n} tasks"
        if abs(outcome.diff or 0.0) >= _FAR_LARGER * outcome.detectable:
            text += "; the change is far larger than this gap"
        return {"smallest_detectable_gap_is": text}

    def _change_of_pass_at_k(self) -> PassAtK | None:
        """The change of pass@k from the first evaluation to the second. pass@k is the chance that
        at least one of k attempts succeeds.

        Returns None for a reward or a loss, and if tasks were tried once.
        """
        if self.before is None or self.before.successes is None:
            return None
        if self.after is None or self.after.successes is None:
            return None
        return change_of_pass_at_k(self.before.successes, self.after.successes)


def _size_text(change: float | None, measure: Measure) -> str:
    """The size of a change that is not negative, as text: "5.0 points" for success, "0.02" for a
    reward or a loss."""
    unit = " points" if measure == "success" else ""
    return show_change(change, measure).removeprefix("+") + unit


def without_evidence(measure: Measure | None, reason: str) -> Comparison:
    """A comparison with the verdict "unknown" for `reason`, if nothing can be compared."""
    return Comparison(measure, PairedVerdict("unknown", reason), before=None, after=None)


def compare_rows(before: Sequence[EvaluationRow], after: Sequence[EvaluationRow]) -> Comparison:
    """Compare two evaluations task by task, by a measure that both have. "better" means that the
    model of `after` is better than that of `before`.

    Tasks with the same prompt count as one task (`results.with_one_id_per_prompt`). The verdict is
    "unknown" if the two have no measure in common, and "inconclusive" if it depends on how failed
    scorings are counted.
    """
    id_count = _count_tasks(before, after)
    before, after = with_one_id_per_prompt(before, after)
    prompts_are_shared = _count_tasks(before, after) < id_count
    measure = measure_of(before, after)
    if measure is None:
        return without_evidence(measure=None, reason=_reason_for_no_measure(before, after))
    level_before, level_after = level(before, measure), level(after, measure)  # mean, interval
    outcomes = _outcomes(before, after, measure, _margin(level_before))
    # The first outcome leaves failed scorings out, the last one counts them as not solved. There is
    # only one outcome if no scoring failed.
    outcome, outcome_with_failures = outcomes[0], outcomes[-1]
    comparison = Comparison(
        measure,
        outcome=outcome,
        before=level_before,
        after=level_after,
        id_count=id_count if prompts_are_shared else 0,
    )
    return inconclusive_if_errors_decide(comparison, outcome_with_failures)


def _count_tasks(*row_sets: Sequence[EvaluationRow]) -> int:
    """The number of different task ids in all the rows together."""
    return len({row.task for rows in row_sets for row in rows})


def _outcomes(
    before: Sequence[EvaluationRow],
    after: Sequence[EvaluationRow],
    measure: Measure,
    margin: float | None,
) -> list[PairedVerdict]:
    """The paired tests of two evaluations: one, or two if some answers could not be scored.

    The first leaves out answers that could not be scored; the second counts each of them as 0.
    There is no second one for a loss, for which 0 would be the best value.

    Args:
        margin: a difference that is smaller counts as none; if None, a share of the span of the
            values.
    """
    verdicts = []
    for value_of_failure in values_of_failures(measure, before, after):
        verdict = paired_verdict(
            side(before, measure, value_of_failure),
            side(after, measure, value_of_failure),
            higher_is_better=HIGHER_IS_BETTER[measure],
            margin=margin,
        )
        verdicts.append(verdict)
    return verdicts


def _reason_for_no_measure(before: Sequence[EvaluationRow], after: Sequence[EvaluationRow]) -> str:
    """Why two evaluations have no measure in common, such as "nothing was scored in the first
    evaluation".

    `before` and `after` hold all their rows, also those whose scoring failed.
    """
    if not before:
        missing = "the first"
    elif not after:
        missing = "the second"
    else:  # both have rows, but none that were scored by a common measure
        missing = "either"
    return f"nothing was scored in {missing} evaluation"


def _margin(before: Level) -> float | None:
    """The largest difference from the level (mean result) before that still counts as none.

    Returns None for a reward: `paired_verdict` then takes a share of the span of the rewards.
    """
    if before.measure == "success":
        return MARGIN
    if before.measure == "loss":
        return _LOSS_MARGIN * abs(before.value or 0.0)
    return None


def values_of_failures(measure: Measure, *row_sets: Sequence[EvaluationRow]) -> list[float | None]:
    """The values that a failed scoring is counted as. The comparison is made once for each value.

    None leaves failed answers out, 0 counts them as not solved. Returns [None] if no scoring
    failed, and for a loss, which has no value for "not solved".
    """
    all_rows = itertools.chain.from_iterable(row_sets)
    any_failed = any(value_of(row, measure) is None for row in all_rows)
    if not any_failed or measure == "loss":
        return [None]
    # Both are tried because leaving answers out could make a side look better than it is.
    return [None, 0.0]


def inconclusive_if_errors_decide(
    comparison: Comparison, with_failures: PairedVerdict
) -> Comparison:
    """The comparison, made inconclusive if counting failed scorings as not solved changes its
    verdict.

    `comparison` was made with failed scorings left out; `with_failures` is the outcome of the same
    rows with failed scorings counted as not solved.
    """
    outcome, measure = comparison.outcome, comparison.measure
    if measure is None or outcome.verdict not in _DECIDED:
        return comparison
    if with_failures.verdict == outcome.verdict:
        return comparison
    reason = _reason_by_errors(outcome, with_failures, measure)
    outcome = replace(outcome, verdict="inconclusive", reason=reason)
    return replace(comparison, outcome=outcome, errors_decide=True)


def _reason_by_errors(
    without_failures: PairedVerdict, with_failures: PairedVerdict, measure: Measure
) -> str:
    """The reason that a verdict depends on how failed scorings are counted, as part of a sentence:
    it names the verdict with failed scorings left out, and with failed scorings counted as not
    solved."""
    level_before = show(with_failures.before, measure)
    level_after = show(with_failures.after, measure)
    failed_count = sum(without_failures.errors)
    failed_answers = f"the {failed_count} answers" if failed_count > 1 else "the one answer"
    word_left_out = _as_words(without_failures.verdict)
    word_counted = _as_words(with_failures.verdict)
    return (
        f"{failed_answers} whose scoring failed decide: left out, the verdict is {word_left_out}; "
        f"counted as not solved, {word_counted} ({level_before} to {level_after})"
    )


def correct_for_many(
    comparisons: Sequence[Comparison], evaluation_counts: Sequence[int]
) -> list[tuple[Comparison, float | None]]:
    """Correct several comparisons for their number, because each is a chance to be wrong.

    Returns each comparison with its corrected p value (None if there was no test). A "better" or
    "worse" that is no longer significant becomes "inconclusive".

    `evaluation_counts` holds for each comparison how many evaluations have tested its two models
    (`holdout_reuse.evaluations_of_pair`).
    """
    p_values = [item.outcome.p for item in comparisons if item.outcome.p is not None]
    p_by_holm = iter(holm(p_values))  # one for each comparison that was tested, in their order
    corrected: list[tuple[Comparison, float | None]] = []
    for comparison, evaluation_count in zip(comparisons, evaluation_counts, strict=True):
        p = None
        if comparison.outcome.p is not None:
            p = min(1.0, next(p_by_holm) * correction_factor(evaluation_count))
            comparison = _if_significant(
                comparison, p, tests=len(p_values), evaluations=evaluation_count
            )
        corrected.append((comparison, p))
    return corrected


def _if_significant(
    comparison: Comparison, p: float, *, tests: int, evaluations: int
) -> Comparison:
    """The comparison; its verdict "better" or "worse" becomes "inconclusive", with the reason, if
    `p` is not significant.

    Args:
        p: the p value, corrected for the next two counts.
        tests: how many comparisons were tested together.
        evaluations: how many evaluations have tested the same two models.
    """
    if comparison.outcome.verdict not in ("better", "worse") or p < ALPHA:
        return comparison
    corrected_for = []
    if tests > 1:
        corrected_for.append(f"{tests} comparisons")
    if evaluations > 1:
        corrected_for.append(f"{evaluations} evaluations of these models")
    reason = (
        f"not significant after correction for {' and '.join(corrected_for)} (p = {p:.2g}), "
        "which the interval does not hold"
    )
    outcome = replace(comparison.outcome, verdict="inconclusive", reason=reason)
    return replace(comparison, outcome=outcome)


def sentence(comparison: Comparison, measure_prefix: str = "") -> str:
    """The comparison in one sentence: verdict, both levels, interval and reason. If nothing was
    compared, the sentence says why.

    `measure_prefix` is put directly before the name of the measure and must end with a space, such
    as "held-out ".
    """
    outcome, measure = comparison.outcome, comparison.measure
    if outcome.diff is None or measure is None:
        return f"The verdict is unknown: {outcome.reason}."
    before, after = show(outcome.before, measure), show(outcome.after, measure)
    name = comparison.metric_name or measure
    change = f"{measure_prefix}{name} went from {before} to {after} on {outcome.n} tasks"
    if outcome.groups:
        change += f" of {outcome.groups} groups"
    verdict = _as_words(outcome.verdict).capitalize()
    interval = _interval_text(outcome, measure)
    clauses = [f"{verdict}: {change} (95 % interval of the change {interval})"]
    lost = comparison.lost_of_right  # tasks that were right before and no longer are
    if lost and lost.lost and outcome.verdict != "worse":  # a gain elsewhere would hide them
        clauses.append(lost.text)
    if comparison.reason:
        clauses.append(comparison.reason)
    return "; ".join(clauses) + "."


def _interval_text(outcome: PairedVerdict, measure: Measure) -> str:
    """The interval of a change as text, such as "-1.2 to +7.4 points"; a reward or a loss has no
    unit."""
    ends = f"{show_change(outcome.low, measure)} to {show_change(outcome.high, measure)}"
    return f"{ends} points" if measure == "success" else ends


def notes_on_counting(comparison: Comparison) -> list[str]:
    """Sentences about how the rows were counted, for the reader of a comparison.

    There is one if failed scorings decide the verdict, and one if several tasks share a prompt.
    """
    notes = []
    if comparison.errors_decide:
        notes.append(
            "The answers whose scoring failed decide this verdict: read them, mend the scorer, "
            "push it and score the answers again (evaluate with regrade)."
        )
    if comparison.id_count:
        notes.append(
            f"{comparison.id_count} tasks have {comparison.outcome.n} different prompts: tasks of "
            "one prompt are one question and count as one."
        )
    return notes


def calls_for_errors(run_id: str) -> list[Call]:
    """The calls to suggest if answers whose scoring failed decide the verdict."""
    read_errors = Call("read_rollouts", {"run_id": run_id, "pick": "error"})
    return [read_errors, Call("diagnose", {"run_id": run_id})]


def _as_words(verdict: str) -> str:
    """A verdict as a phrase: no_difference becomes "no difference"."""
    return verdict.replace("_", " ")


def p_of_loss(before: Sequence[EvaluationRow], after: Sequence[EvaluationRow]) -> float:
    """The p value of the test that a kind of task was solved as often after as before; 1 if it was
    not solved less often, or if nothing says which answers are right."""
    right_after = {row.task: row.success is True for row in after}
    gained = lost = 0
    for row in before:
        if row.task in right_after:
            is_right = right_after[row.task]
            lost += bool(row.success and not is_right)
            gained += bool(row.success is False and is_right)
    return mcnemar_midp(gained, lost) if lost > gained else 1.0


def mean_reward(rows: Sequence[EvaluationRow]) -> float | None:
    """The mean reward of the rows whose scoring did not fail. Returns None if there are none."""
    rewards = [row.reward for row in rows if not row.error and row.reward is not None]
    return rounded(sum(rewards) / len(rewards)) if rewards else None
