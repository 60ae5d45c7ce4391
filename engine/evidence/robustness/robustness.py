"""The answers to tasks in other words, paired with those to the same tasks as they are.

Each kind of other words gets a paired difference with its interval, as any comparison of two models
does; the p values of all kinds and models are corrected together (Holm). "fragile" means that the
model is significantly worse in other words: it learnt the words too. An answer whose scoring failed
counts as not solved.
"""

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

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
from engine.wording.kinds import LABELS

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
    """A task that the model solved as it is and not in other words; the texts are shortened.

    Attributes:
        asked: the prompt in other words, with the tools where those were reworded.
    """

    task: str
    asked: str
    before: str
    after: str


@dataclass(frozen=True)
class KindResult:
    """How a model did on the tasks in other words of one kind.

    Attributes:
        label: the kind in words.
        outcome: its tasks as they are against the same in other words; None where none was asked.
        word: of that outcome, corrected for all kinds and models.
        left_out: tasks that could not be asked in other words; `why` says why.
        examples: tasks that were solved as they are alone.
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
        outcome, unit = self.outcome, " points" if self.measure == "success" else ""
        low, high = (show_change(end, self.measure) for end in (outcome.low, outcome.high))
        return (
            f"{self.label}: {show(outcome.before, self.measure)} -> "
            f"{show(outcome.after, self.measure)} (95 % interval of the change {low} to {high}"
            f"{unit}), {self.word}"
        )

    def to_json(self) -> dict[str, object]:
        """The result as results hold it."""
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
    """How one model did on its tasks in other words, kind by kind."""

    model: str
    kinds: Sequence[KindResult]

    @property
    def sentence(self) -> str:
        """All kinds in one sentence."""
        return f"In other words {self.model}: {'; '.join(kind.sentence for kind in self.kinds)}."

    @property
    def fragile(self) -> list[KindResult]:
        """The kinds of other words in which it is significantly worse."""
        return [kind for kind in self.kinds if kind.word == "fragile"]

    def to_json(self) -> dict[str, object]:
        return {"model": self.model, "kinds": [kind.to_json() for kind in self.kinds]}


def fragile_sentences(probed: Sequence[Robustness]) -> list[str]:
    """A warning for each model that is worse in other words, with the remedy."""
    return [
        f"{each.model} depends on the words it was trained with "
        f"({', '.join(kind.label for kind in each.fragile)}): train with vary_wording = 0.5, or "
        "give the rows texts of their own (tools of a task, a system message)."
        for each in probed
        if each.fragile
    ]


def robustness_of(
    run: RunDir, config: RunConfig | None, redact: Redactor, left_out: Collection[str] = ()
) -> list[Robustness]:
    """How each model of an evaluation did on its tasks in other words; [] where none was asked so.

    Args:
        redact: removes secrets from the texts of examples.
        left_out: tasks that do not count, as they stand in training rows.
    """
    if not isinstance(config, EvaluateConfig) or not config.perturb:
        return []
    counts = RewordedKind.read_all(run.reworded_kinds)
    results = [
        Robustness(
            model.ref,
            [_kind_result(run, index, count, redact, set(left_out)) for count in counts],
        )
        for index, model in enumerate(config.models)
        if run.model_evals(index).exists()
    ]
    return _corrected([result for result in results if result.kinds])


def _kind_result(
    run: RunDir, index: int, count: RewordedKind, redact: Redactor, left_out: set[str]
) -> KindResult:
    """The result of the model at `index` in the other words of one kind, not yet corrected."""
    reworded = [
        row
        for row in read_evaluation(run.reworded_evals(index, count.kind))
        if row.task not in left_out
    ]
    asked = {row.task for row in reworded}
    plain = [row for row in read_evaluation(run.model_evals(index)) if row.task in asked]
    result = KindResult(
        kind=count.kind,
        label=LABELS[count.kind],
        measure=measure_of(plain, reworded),
        outcome=None,
        word="unknown",
        left_out=count.left_out,
        why=count.why,
    )
    if result.measure is None:
        return result
    outcome = _outcome(plain, reworded, result.measure)
    return replace(
        result,
        outcome=outcome,
        word=_WORDS[outcome.verdict],
        examples=_flips(outcome, plain, reworded, redact),
    )


def _outcome(
    plain: Sequence[EvaluationRow], reworded: Sequence[EvaluationRow], measure: Measure
) -> PairedVerdict:
    """The tasks as they are compared with the same tasks in other words; tasks of one prompt count
    as one, by their prompt as it is."""
    # The prompts as they are, since those in other words all differ.
    prompts = {row.task: row.prompt for row in plain}
    renamed = [row.model_copy(update={"prompt": prompts.get(row.task)}) for row in reworded]
    before, after = with_one_id_per_prompt(plain, renamed)
    return paired_verdict(side(before, measure, 0.0), side(after, measure, 0.0))


def _corrected(results: Sequence[Robustness]) -> list[Robustness]:
    """The results with their words corrected for the number of tests: one that is no longer
    significant is inconclusive."""
    tested = [kind for each in results for kind in each.kinds if _p_of(kind) is not None]
    p_by_holm = iter(holm([_p_of(kind) or 0.0 for kind in tested]))

    def corrected(kind: KindResult) -> KindResult:
        """One kind, with the next of the corrected p values."""
        if _p_of(kind) is None or kind.outcome is None:
            return kind
        p = next(p_by_holm)
        holds = p < ALPHA or kind.word not in ("fragile", "improved")
        return replace(
            kind, word=kind.word if holds else "inconclusive", outcome=replace(kind.outcome, p=p)
        )

    return [replace(each, kinds=[corrected(kind) for kind in each.kinds]) for each in results]


def _p_of(kind: KindResult) -> float | None:
    """The p value of a kind; None where nothing was tested."""
    return kind.outcome.p if kind.outcome else None


def _flips(
    outcome: PairedVerdict,
    plain: Sequence[EvaluationRow],
    reworded: Sequence[EvaluationRow],
    redact: Redactor,
) -> list[Flip]:
    """The first tasks that became worse in other words, with both answers."""
    before = {row.task: row for row in reversed(plain)}
    after = {row.task: row for row in reversed(reworded)}

    def shown(text: str) -> str:
        """The text without secrets, cut."""
        return clip(redact.text(text), _CHARS)

    return [
        Flip(
            task=redact.text(task)[:_CHARS],
            asked=shown(_asked(after[task])),
            before=shown(answer_text(before[task])),
            after=shown(answer_text(after[task])),
        )
        for task in [task for task in outcome.lost if task in before and task in after][:_EXAMPLES]
    ]


def _asked(row: EvaluationRow) -> str:
    """The prompt of a row, behind the descriptions of its tools where it has some."""
    functions = [tool.get("function", tool) for tool in row.tools or []]
    tools = [f"{each.get('name')}: {each.get('description', '')}" for each in functions]
    return "\n".join([*(f"[tool] {tool}" for tool in tools), text_of(row.prompt)])
