"""Compares a model's answers to reworded tasks with its answers to the same tasks as they are.

Each kind of rewording gets a paired difference with its interval, as a comparison of two models
does. The p values of all kinds and models are corrected together (Holm). "fragile" means that the
model is significantly worse on reworded tasks: it learnt the words too. An answer whose scoring
failed counts as not solved.
"""

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from engine.core.wording.kinds import LABELS
from engine.evidence.stats.inference import ALPHA, PairedVerdict, holm, paired_verdict
from engine.evidence.stats.results import (
    Measure,
    answer_text,
    measure_of,
    rounded,
    rounded_ends,
    show,
    show_change,
    side,
    text_of,
    with_one_id_per_prompt,
)
from engine.home.run_dir import RunDir
from engine.home.sanitize import Redactor, clip
from engine.records.lines.evaluation_row import EvaluationRow, read_evaluation
from engine.records.lines.reworded_kind import RewordedKind
from engine.records.run_config import EvaluateConfig, RunConfig

Word = Literal["fragile", "steady", "improved", "inconclusive", "unknown"]
# A verdict on two models -> the word for one model in other words.
_WORDS: dict[str, Word] = {
    "worse": "fragile",
    "better": "improved",
    "no_difference": "steady",
    "inconclusive": "inconclusive",
    "unknown": "unknown",
}
_EXAMPLES, _CHARS = 2, 240  # flips that are shown of each kind, and characters of each text


@dataclass(frozen=True)
class Flip:
    """A task that the model did worse in other words. The texts are shortened, without secrets.

    Attributes:
        task: its id.
        asked: the prompt in other words, with the tools if those were reworded.
        before: the answer to the task as it is.
        after: the answer to the task in other words.
    """

    task: str
    asked: str
    before: str
    after: str


@dataclass(frozen=True)
class KindResult:
    """How a model did on the tasks in other words of one kind.

    Attributes:
        kind: the kind of rewording, one of `wording.kinds.KINDS`.
        label: the kind in words.
        measure: what is compared, such as "success"; None if nothing was scored.
        outcome: the paired test of the tasks as they are (before) against the reworded tasks
            (after); None if nothing was scored.
        word: the verdict of that test, corrected for the number of kinds and models; "unknown"
            without a test.
        left_out: how many tasks could not be reworded; `why` says why.
        examples: some tasks that the model did worse in other words.
    """

    kind: str
    label: str
    measure: Measure | None
    outcome: PairedVerdict | None
    word: Word
    left_out: int
    why: str
    examples: Sequence[Flip] = ()

    @property
    def sentence(self) -> str:
        """The result as a sentence part, such as "tool descriptions reworded: 87.0 % -> 4.0 %
        (95 % interval of the change -90.3 to -76.1 points), fragile"."""
        if self.outcome is None or self.outcome.diff is None or self.measure is None:
            return f"{self.label}: not asked ({self.why or 'nothing was scored'})"
        outcome, measure = self.outcome, self.measure
        before, after = show(outcome.before, measure), show(outcome.after, measure)
        low, high = show_change(outcome.low, measure), show_change(outcome.high, measure)
        unit = " points" if measure == "success" else ""
        interval = f"{low} to {high}{unit}"
        return (
            f"{self.label}: {before} -> {after} (95 % interval of the change {interval}), "
            f"{self.word}"
        )

    def to_json(self) -> dict[str, object]:
        """The result of this kind of rewording as a JSON object.

        Numbers and examples are included only if tasks were compared, "left_out" and "why" only if
        tasks could not be reworded.
        """
        body: dict[str, object] = {"kind": self.kind, "label": self.label, "verdict": self.word}
        if self.outcome is not None:
            outcome = self.outcome
            body |= {
                "metric": self.measure,
                "before": rounded(outcome.before),
                "after": rounded(outcome.after),
                "difference": rounded(outcome.diff),
                "interval": rounded_ends(outcome.low, outcome.high),
                "n": outcome.n,
                "p": None if outcome.p is None else float(f"{outcome.p:.3g}"),
                "gained": len(outcome.gained),
                "lost": len(outcome.lost),
                "examples": [asdict(example) for example in self.examples],
            }
        if self.left_out:
            body |= {"left_out": self.left_out, "why": self.why}
        return body


@dataclass(frozen=True)
class Robustness:
    """How one model did on its reworded tasks; `kinds` holds one result for each kind of
    rewording."""

    model: str
    kinds: Sequence[KindResult]

    @property
    def sentence(self) -> str:
        """The results of all kinds of rewording in one sentence."""
        return f"In other words {self.model}: {'; '.join(kind.sentence for kind in self.kinds)}."

    @property
    def fragile(self) -> list[KindResult]:
        """The kinds of rewording in which the model is significantly worse than on the tasks as
        they are."""
        return [kind for kind in self.kinds if kind.word == "fragile"]

    @property
    def improved(self) -> list[KindResult]:
        """The kinds of rewording in which the model is significantly better than on the tasks as
        they are."""
        return [kind for kind in self.kinds if kind.word == "improved"]

    def to_json(self) -> dict[str, object]:
        """The model's results as a JSON object, one for each kind of rewording."""
        return {"model": self.model, "kinds": [kind.to_json() for kind in self.kinds]}


def fragile_sentences(probed: Sequence[Robustness]) -> list[str]:
    """A warning with the remedy for each model that is significantly worse on reworded tasks."""
    warnings = []
    for result in probed:
        if result.fragile:
            kinds = ", ".join(kind.label for kind in result.fragile)
            warnings.append(
                f"{result.model} depends on the words it was trained with ({kinds}): train with "
                "vary_wording = 0.5, or give the rows texts of their own (tools of a task, a "
                "system message)."
            )
    return warnings


def remarks_on(probed: Sequence[Robustness]) -> list[str]:
    """The warnings of an evaluation about reworded tasks: a sentence for each model that is
    significantly worse on them, then one for each that is better."""
    return [*fragile_sentences(probed), *reworded_better_sentences(probed)]


def reworded_better_sentences(probed: Sequence[Robustness]) -> list[str]:
    """A sentence for each model that is significantly better on reworded tasks: another prompt may
    do, without a change of its weights."""
    sentences = []
    for result in probed:
        if result.improved:
            kinds = ", ".join(kind.sentence for kind in result.improved)
            sentences.append(
                f"{result.model} is better in other words ({kinds}): a prompt alone may do; "
                'algorithm="prompt" searches for one.'
            )
    return sentences


def robustness_of(
    run: RunDir, config: RunConfig | None, redact: Redactor, left_out: Collection[str] = ()
) -> list[Robustness]:
    """How each model of an evaluation did on its reworded tasks. Models that have not answered yet
    are left out. Returns [] if no task was reworded.

    Args:
        redact: removes secrets from the texts of examples.
        left_out: ids of tasks that do not count, because they are also training rows.
    """
    if not isinstance(config, EvaluateConfig) or not config.perturb:
        return []
    reworded_kinds = RewordedKind.read_all(run.reworded_kinds)
    if not reworded_kinds:
        return []
    left_out_ids = set(left_out)
    results: list[Robustness] = []
    for index, model in enumerate(config.models):
        if run.model_evals(index).exists():
            kinds = [
                _kind_result(run, index, kind, redact, left_out_ids) for kind in reworded_kinds
            ]
            results.append(Robustness(model.ref, kinds))
    return _corrected(results)


def _kind_result(
    run: RunDir, model_index: int, reworded: RewordedKind, redact: Redactor, left_out: set[str]
) -> KindResult:
    """The result of one model in one kind of rewording; its p value is not yet corrected.

    The answers to the reworded tasks are compared with the model's answers to the same tasks as
    they are.

    Args:
        model_index: the index of the model in the evaluation's config.
        left_out: ids of tasks that do not count.
    """
    all_reworded_rows = read_evaluation(run.reworded_evals(model_index, reworded.kind))
    reworded_rows = [row for row in all_reworded_rows if row.task not in left_out]
    reworded_tasks = {row.task for row in reworded_rows}
    all_plain_rows = read_evaluation(run.model_evals(model_index))
    plain_rows = [row for row in all_plain_rows if row.task in reworded_tasks]
    result = KindResult(
        kind=reworded.kind,
        label=LABELS[reworded.kind],
        measure=measure_of(plain_rows, reworded_rows),
        outcome=None,
        word="unknown",
        left_out=reworded.left_out,
        why=reworded.why,
    )
    if result.measure is None:
        return result
    outcome = _outcome(plain_rows, reworded_rows, result.measure)
    return replace(
        result,
        outcome=outcome,
        word=_WORDS[outcome.verdict],
        examples=_worse_examples(outcome, plain_rows, reworded_rows, redact),
    )


def _outcome(
    plain: Sequence[EvaluationRow], reworded: Sequence[EvaluationRow], measure: Measure
) -> PairedVerdict:
    """Compare tasks as they are (before) with the same tasks in other words (after), in pairs.

    Tasks with the same plain prompt count as one task. A scoring that failed counts as 0.
    """
    # Reworded prompts all differ, so equal tasks are known only by their plain prompts.
    plain_prompts = {row.task: row.prompt for row in plain}
    with_plain_prompts = [
        row.model_copy(update={"prompt": plain_prompts.get(row.task)}) for row in reworded
    ]
    before, after = with_one_id_per_prompt(plain, with_plain_prompts)
    return paired_verdict(side(before, measure, 0.0), side(after, measure, 0.0))


def _corrected(results: Sequence[Robustness]) -> list[Robustness]:
    """The results with their p values corrected by Holm; the number of tests is models x kinds.

    The word "fragile" or "improved" becomes "inconclusive" if its corrected p value is no longer
    significant. A kind without a p value (nothing was tested) stays as it is.
    """
    all_kinds = [kind for model in results for kind in model.kinds]
    p_values = [kind.outcome.p for kind in all_kinds if kind.outcome and kind.outcome.p is not None]
    corrected_p_values = iter(holm(p_values))  # in the order of models and kinds
    corrected_results = []
    for model in results:
        kinds = []
        for kind in model.kinds:
            if kind.outcome is not None and kind.outcome.p is not None:
                outcome = replace(kind.outcome, p=next(corrected_p_values))
                word = _word_after_correction(kind.word, outcome)
                kind = replace(kind, word=word, outcome=outcome)
            kinds.append(kind)
        corrected_results.append(replace(model, kinds=kinds))
    return corrected_results


def _word_after_correction(word: Word, outcome: PairedVerdict) -> Word:
    """The word for a corrected outcome: `word`, or "inconclusive" if `word` claims a change
    ("fragile", "improved") that the corrected p value no longer supports."""
    is_significant = outcome.p is not None and outcome.p < ALPHA
    claims_change = word in ("fragile", "improved")
    return "inconclusive" if claims_change and not is_significant else word


def _worse_examples(
    outcome: PairedVerdict,
    plain: Sequence[EvaluationRow],
    reworded: Sequence[EvaluationRow],
    redact: Redactor,
) -> list[Flip]:
    """Examples: the first `_EXAMPLES` tasks that the model did worse in other words, each with its
    first answer to the task as it is and to the reworded task."""
    # A later key overwrites an earlier one, so going backwards keeps the first attempt at a task.
    first_plain = {row.task: row for row in reversed(plain)}
    first_reworded = {row.task: row for row in reversed(reworded)}

    def shown(text: str) -> str:
        """The text without secrets, shortened to `_CHARS` characters."""
        return clip(redact.text(text), _CHARS)

    worse_tasks = [task for task in outcome.lost if task in first_plain and task in first_reworded]
    flips = []
    for task in worse_tasks[:_EXAMPLES]:
        plain_row, reworded_row = first_plain[task], first_reworded[task]
        flip = Flip(
            task=redact.text(task)[:_CHARS],
            asked=shown(_tools_and_prompt(reworded_row)),
            before=shown(answer_text(plain_row)),
            after=shown(answer_text(reworded_row)),
        )
        flips.append(flip)
    return flips


def _tools_and_prompt(row: EvaluationRow) -> str:
    """What the model was shown: a line "[tool] name: description" for each tool, then the
    prompt."""
    # OpenAI's form nests the function: {"type": "function", "function": {"name": ...}}.
    functions = [tool.get("function", tool) for tool in row.tools or []]
    tool_lines = [
        f"[tool] {function.get('name')}: {function.get('description', '')}"
        for function in functions
    ]
    return "\n".join([*tool_lines, text_of(row.prompt)])
