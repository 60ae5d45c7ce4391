"""Flips: the tasks that one side solves and the other does not, with their answers."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from engine.evidence.stats.results import answer_text, rounded, text_of
from engine.evidence.verdict.comparison import Comparison
from engine.home.sanitize import Redactor, clip
from engine.records.lines.evaluation_row import EvaluationRow

_PER_DIRECTION = 2  # examples per direction in a result: enough to see what changed, short to read
_CHARS = 240  # characters of a prompt or an answer in an example
_TASK_ID_CHARS = 120


@dataclass(frozen=True)
class FlipExample:
    """A task whose result changed: prompt, both answers and both rewards.

    The texts are shortened and secrets in them are redacted. A reward is None if the task was not
    scored on that side.
    """

    task: str
    prompt: str
    before: str
    after: str
    reward_before: float | None
    reward_after: float | None


@dataclass(frozen=True)
class FlipExamples:
    """Examples of the tasks that changed most: `gained` became better, `lost` became worse."""

    gained: Sequence[FlipExample] = ()
    lost: Sequence[FlipExample] = ()

    def to_json(self) -> dict[str, object]:
        """The examples of gained and of lost tasks as a JSON object."""
        return {
            "gained": [asdict(example) for example in self.gained],
            "lost": [asdict(example) for example in self.lost],
        }


@dataclass(frozen=True)
class Flips:
    """How many of the paired tasks changed, with examples."""

    gained: int
    lost: int
    unchanged: int
    examples: FlipExamples

    def to_json(self) -> dict[str, object]:
        """The counts and examples as a JSON object, as stored results hold them."""
        return {
            "gained": self.gained,
            "lost": self.lost,
            "unchanged": self.unchanged,
            "examples": self.examples.to_json(),
        }


def flips_of(
    comparison: Comparison,
    before: Sequence[EvaluationRow],
    after: Sequence[EvaluationRow],
    redact: Redactor,
) -> Flips:
    """How many tasks became better (gained), worse (lost) or stayed the same, with a few examples.

    `before` and `after` are the rows that were compared; `redact` removes secrets from their texts.
    """
    outcome = comparison.outcome
    return Flips(
        gained=len(outcome.gained),
        lost=len(outcome.lost),
        unchanged=outcome.n - len(outcome.gained) - len(outcome.lost),
        examples=flip_examples(comparison, before, after, redact),
    )


def flip_examples(
    comparison: Comparison,
    before: Iterable[EvaluationRow],
    after: Iterable[EvaluationRow],
    redact: Redactor,
    *,
    per_direction: int = _PER_DIRECTION,
    chars: int = _CHARS,
) -> FlipExamples:
    """The tasks that changed most, with both answers.

    Args:
        before, after: the rows that were compared.
        redact: removes secrets from the texts.
        per_direction: the most gained tasks, and the most lost tasks, that are shown.
        chars: the most characters of each text that are shown.
    """
    rows_before, rows_after = _first_by_task(before), _first_by_task(after)

    def examples(tasks: Sequence[str]) -> list[FlipExample]:
        """The examples of the first `per_direction` of these tasks."""
        return [
            _flip_example(task, rows_before.get(task), rows_after.get(task), redact, chars)
            for task in tasks[:per_direction]
        ]

    outcome = comparison.outcome
    return FlipExamples(gained=examples(outcome.gained), lost=examples(outcome.lost))


def _flip_example(
    task: str,
    row_before: EvaluationRow | None,
    row_after: EvaluationRow | None,
    redact: Redactor,
    chars: int,
) -> FlipExample:
    """The example of one task. A row is None if that side did not answer the task.

    Each text is shortened to `chars` characters.
    """

    def shown_text(text: str) -> str:
        """The text without secrets, shortened to `chars`."""
        return clip(redact.text(text), chars)

    prompt = row_after.prompt if row_after else None
    if not prompt and row_before:  # not every row records its prompt
        prompt = row_before.prompt
    return FlipExample(
        task=redact.text(task)[:_TASK_ID_CHARS],
        prompt=shown_text(text_of(prompt)),
        before=shown_text(answer_text(row_before) if row_before else ""),
        after=shown_text(answer_text(row_after) if row_after else ""),
        reward_before=rounded(row_before.reward if row_before else None),
        reward_after=rounded(row_after.reward if row_after else None),
    )


def _first_by_task(rows: Iterable[EvaluationRow]) -> dict[str, EvaluationRow]:
    """The first row of each task whose scoring did not fail, by task id."""
    first_rows: dict[str, EvaluationRow] = {}
    for row in rows:
        if not row.error:
            first_rows.setdefault(row.task, row)
    return first_rows
