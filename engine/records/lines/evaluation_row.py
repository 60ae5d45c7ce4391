"""One held-out answer: a line of a file in `evals/`."""

from pathlib import Path

from engine.records.lines.answer import Answer
from engine.records.lines.line_record import Line

# The order of keys in a line: of a played answer, of a measured loss, of a skill of pebble's.
_PLAYED = ("model", "task", "half", "attempt")
_LOSS = (*_PLAYED, "loss", "tokens")
_SKILL = ("model", "task", "battery", "family")


class EvaluationRow(Answer):
    """What one model said to one task, or the loss of its reference answer.

    Attributes:
        model: id of the run, or the reference an evaluation was asked for.
        half: `select` or `report` (engine/home/halves.py); None in files without halves.
        attempt: from 0; None where each task is asked once.
        loss: mean cross-entropy of the reference answer in nats per token, where it was measured
            instead of an answer.
        battery, family: of an earlier skill: which battery asks it, and the kind of task.
        reward_before, success_before, error_before: the score before it was scored again.
    """

    model: str
    half: str | None = None
    attempt: int | None = None
    loss: float | None = None
    battery: str | None = None
    family: str | None = None
    reward_before: float | None = None
    success_before: bool | None = None
    error_before: str | None = None

    def to_line(self) -> Line:
        line = super().to_line()
        first = _LOSS if "loss" in line else _PLAYED if "half" in line else _SKILL
        return {key: line[key] for key in first if key in line} | line


def read_evaluation(path: Path) -> list[EvaluationRow]:
    """The answers in a file of `evals/`; [] where there is no file.

    Damaged lines are skipped; `read_file` of the record counts them.
    """
    return EvaluationRow.read_all(path)
