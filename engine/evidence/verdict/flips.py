"""The tasks that one side solves and the other does not, with what was answered."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from engine.evidence.stats.results import answer_text, rounded, text_of
from engine.evidence.verdict.comparison import Comparison
from engine.home.sanitize import Redactor, clip
from engine.records.lines.evaluation_row import EvaluationRow

_EACH = 2  # examples per direction in a result: enough to see what changed, short to read
_CHARS = 240  # characters of a prompt or an answer in an example
_TASK_ID_CHARS = 120


@dataclass(frozen=True)
class FlipExample:
    """A task whose result changed: prompt, both answers and both rewards.

    The texts are shortened and secrets in them are redacted. A reward is None where the task was
    not scored on that side.
    """

    task: str
    prompt: str
    before: str
    after: str
    reward_before: float | None
    reward_after: float | None


@dataclass(frozen=True)
class FlipExamples:
    """The tasks that changed most, by direction."""

    gained: Sequence[FlipExample] = ()
    lost: Sequence[FlipExample] = ()

    def to_json(self) -> dict[str, object]:
        return {
            "gained": [asdict(example) for example in self.gained],
            "lost": [asdict(example) for example in self.lost],
        }


@dataclass(frozen=True)
class Flips:
    """How many of the paired tasks changed, and some of them."""

    gained: int
    lost: int
    unchanged: int
    examples: FlipExamples

    def to_json(self) -> dict[str, object]:
        """The counts and examples as results hold them."""
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
    """How many tasks were gained, lost and unchanged in `comparison`, with a few examples.

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
    each: int = _EACH,
    chars: int = _CHARS,
) -> FlipExamples:
    """The tasks that changed most, with both answers.

    Of several attempts at a task the first one that was scored is shown. A side without one shows
    an empty answer.

    Args:
        before, after: the rows that were compared.
        redact: removes secrets from the texts.
        each: how many tasks are shown per direction, at most.
        chars: how many characters of each text are shown, at most.
    """
    old_rows, new_rows = _first_by_task(before), _first_by_task(after)

    def example(task: str) -> FlipExample:
        """The example of one task; its prompt is that of the second side, else of the first."""
        old, new = old_rows.get(task), new_rows.get(task)
        prompt = (new and new.prompt) or (old and old.prompt) or ""
        return FlipExample(
            task=redact.text(task)[:_TASK_ID_CHARS],
            prompt=clip(redact.text(text_of(prompt)), chars),
            before=clip(redact.text(answer_text(old) if old else ""), chars),
            after=clip(redact.text(answer_text(new) if new else ""), chars),
            reward_before=rounded(old.reward if old else None),
            reward_after=rounded(new.reward if new else None),
        )

    return FlipExamples(
        gained=[example(task) for task in comparison.outcome.gained[:each]],
        lost=[example(task) for task in comparison.outcome.lost[:each]],
    )


def _first_by_task(rows: Iterable[EvaluationRow]) -> dict[str, EvaluationRow]:
    """Task id -> its first row whose scoring did not fail; tasks without one are left out."""
    first: dict[str, EvaluationRow] = {}
    for row in rows:
        if not row.error:
            first.setdefault(row.task, row)
    return first
