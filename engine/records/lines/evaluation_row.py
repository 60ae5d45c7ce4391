"""One held-out answer: a line of a file in `evals/`."""

from pathlib import Path

from engine.records.lines.answer import Answer
from engine.records.lines.line_record import Line
from envs.json_types import ToolSchema

# The keys that come first in a line: of an answer, of a measured loss, and of an earlier skill.
_ANSWER_KEYS = ("model", "task", "half", "attempt")
_LOSS_KEYS = (*_ANSWER_KEYS, "loss", "tokens")
_SKILL_KEYS = ("model", "task", "battery", "family")


class EvaluationRow(Answer):
    """The answer of one model to one task, or the loss of the task's reference answer.

    Attributes:
        model: id of the run, or the reference an evaluation was asked for.
        half: `select` or `report` (engine/home/halves.py); None in files without halves.
        attempt: from 0; None where each task is asked once.
        loss: mean cross-entropy of the reference answer in nats per token, where it was measured
            instead of an answer.
        battery, family: of an earlier skill: which battery asks it, and the kind of task.
        tools: what the model could call, of a task that was asked in other words.
        reward_before, success_before, error_before: the score before it was scored again.
    """

    model: str
    half: str | None = None
    attempt: int | None = None
    loss: float | None = None
    battery: str | None = None
    family: str | None = None
    tools: list[ToolSchema] | None = None
    reward_before: float | None = None
    success_before: bool | None = None
    error_before: str | None = None

    def to_line(self) -> Line:
        """The JSON object to append to the file. The keys that identify the answer come first,
        which makes the file easier to read for people."""
        line = super().to_line()
        if "loss" in line:  # the loss of a reference answer, not an answer
            first_keys = _LOSS_KEYS
        elif "half" in line:  # an answer to a held-out task of one half
            first_keys = _ANSWER_KEYS
        else:  # an answer without a half, such as one that shows an earlier skill
            first_keys = _SKILL_KEYS
        return {key: line[key] for key in first_keys if key in line} | line


def read_evaluation(path: Path) -> list[EvaluationRow]:
    """Read the answers in a file of `evals/`; [] where there is no file. Damaged lines are left
    out; `EvaluationRow.read_file` also counts them."""
    return EvaluationRow.read_all(path)
