"""One answer of a model to a task, as rollouts and evaluations both keep it."""

from typing import Annotated

from pydantic import BeforeValidator, InstanceOf

from engine.records.lines.line_record import LineRecord
from envs.json_types import ChatMessage

# Any text, a lone surrogate included: answers and the replies of environments may hold one.
Text = InstanceOf[str]


def _without_nulls(values: object) -> object:
    """Remove the nulls from a mapping of names to numbers; the file holds null for NaN and
    infinity. A value that is no mapping is returned as it is, for validation to refuse."""
    if not isinstance(values, dict):
        return values
    return {name: value for name, value in values.items() if value is not None}


Numbers = Annotated[dict[str, float], BeforeValidator(_without_nulls)]


class Answer(LineRecord):
    """A completion and its score; None where the file does not say.

    Attributes:
        task: id of the task.
        prompt: the messages that were asked.
        messages: what model and environment said after it.
        completion: text of the last assistant turn.
        reward: the environment's own, before anything is taken off it.
        success: whether it was right, None where the environment never says.
        metrics: named numbers of the score.
        error: why there is no score, None where there is one.
        stop_reason: stop, length, max_turns or error.
        tokens: that the model wrote.
    """

    task: Text
    prompt: list[ChatMessage] | None = None
    messages: list[ChatMessage] | None = None
    completion: Text | None = None
    reward: float | None = None
    success: bool | None = None
    metrics: Numbers | None = None
    error: Text | None = None
    stop_reason: str | None = None
    tokens: int = 0

    @property
    def cut(self) -> bool:
        """Whether the answer was ended by `max_tokens` or by running out of turns."""
        return self.stop_reason in ("length", "max_turns")
