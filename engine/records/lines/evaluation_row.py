"""One held-out answer: a line of a file in `evals/`."""

from pathlib import Path

from engine.records.lines.answer import Answer
from engine.records.lines.line_record import Line
from envs.json_types import ToolSchema

# The keys that come first in a line: for an answer, for the loss of a reference answer, and for an
# answer that shows an earlier skill.
_ANSWER_KEYS = ("model", "task", "half", "attempt")
_LOSS_KEYS = (*_ANSWER_KEYS, "loss", "tokens")
_SKILL_KEYS = ("model", "task", "battery", "family")


class EvaluationRow(Answer):
    """The answer of one model to one task, or the loss of the task's reference answer.

    Attributes:
        model: the id of the training run, or the reference that an evaluation was given.
        half: `select` (the task chooses the checkpoint) or `report` (see engine/home/halves.py);
            None in files that do not distinguish the two.
        attempt: number of the attempt, from 0; None if each task is asked once.
        loss: mean cross-entropy of the reference answer in nats per token; None in the row of an
            answer.
        battery, family: for a question on an earlier skill: its battery (set of questions) and its
            kind.
        tools: for a task that was asked in other words: the tools that the model could call.
        reward_before, success_before, error_before: the old score of an answer that was scored
            again.
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
        """Return the JSON object to append to the file.

        The keys that identify the answer come first, so that people can read the file more easily.
        """
        line = super().to_line()
        if "loss" in line:  # the loss of a reference answer
            first_keys = _LOSS_KEYS
        elif "half" in line:  # an answer to a held-out task
            first_keys = _ANSWER_KEYS
        else:  # for example an answer that shows an earlier skill
            first_keys = _SKILL_KEYS
        return {key: line[key] for key in first_keys if key in line} | line


def read_evaluation(path: Path) -> list[EvaluationRow]:
    """Read the answers in a file of `evals/`; [] if there is no file.

    Damaged lines are left out; `EvaluationRow.read_file` also counts them.
    """
    return EvaluationRow.read_all(path)
