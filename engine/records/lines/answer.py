"""One answer of a model to a task, as rollouts and evaluations both keep it."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, InstanceOf

from engine.records.lines.line_record import LineRecord
from envs.json_types import ChatMessage

# Why an answer ended. stop: the model ended it. max_tokens: a turn reached `max_tokens`.
# max_context: the conversation filled `max_length`. max_turns: all turns were used. timeout: the
# environment took too long. env_error: the environment failed. refused: the provider of a model
# behind a URL refused to answer.
StopReason = Literal[
    "stop", "max_tokens", "max_context", "max_turns", "timeout", "env_error", "refused"
]
OUT_OF_TOKENS: tuple[StopReason, ...] = ("max_tokens", "max_context")
# Stop reason in files of earlier versions -> the present one.
FORMER_STOP_REASONS: dict[str, StopReason] = {"length": "max_tokens", "error": "env_error"}

# Any text. Unlike pydantic's `str` it may hold a lone surrogate, as answers of models may.
Text = InstanceOf[str]


def _without_nulls(values: object) -> object:
    """Remove the nulls from a mapping of names to numbers; files hold null for NaN and infinity.

    A value that is no mapping is returned unchanged, so that validation refuses it.
    """
    if not isinstance(values, dict):
        return values
    return {name: value for name, value in values.items() if value is not None}


def present_stop_reason(reason: object) -> object:
    """Translate a stop reason of an earlier version to the present word.

    Any other value is returned unchanged.
    """
    if not isinstance(reason, str):
        return reason
    return FORMER_STOP_REASONS.get(reason, reason)


Numbers = Annotated[dict[str, float], BeforeValidator(_without_nulls)]


class Branch(LineRecord):
    """A further conversation of a rollout: its prompt, and the messages after the prompt."""

    prompt: list[ChatMessage]
    messages: list[ChatMessage]


class Answer(LineRecord):
    """A completion and its score. A field is None if the file does not hold it.

    Attributes:
        task: id of the task.
        prompt: the messages of the task.
        messages: the messages of the model and the environment after the prompt.
        completion: text of the last assistant turn.
        reward: the reward that the environment gave, before the trainer subtracts anything.
        success: whether the answer was right; None if the environment does not say.
        metrics: named numbers of the score.
        error: why the answer has no score; None if it has one.
        stop_reason: one of `StopReason`, or a word of a later version.
        tokens: how many tokens the model wrote.
        reason: the environment's explanation of the reward; None if it gives none.
        parts: the parts of the reward, name -> [weight, value]; None if the environment gives none.
        invalid_calls: why tool calls in the answer are invalid, one text for each.
        branches: further conversations of a rollout that a command played; None if there are none.
        task_group: the group that the environment gave the task; None if it has none.
    """

    task: Text
    prompt: list[ChatMessage] | None = None
    messages: list[ChatMessage] | None = None
    completion: Text | None = None
    reward: float | None = None
    success: bool | None = None
    metrics: Numbers | None = None
    error: Text | None = None
    stop_reason: Annotated[str | None, BeforeValidator(present_stop_reason)] = None
    tokens: int = 0
    reason: Text | None = None
    parts: dict[str, list[float]] | None = None
    invalid_calls: list[Text] | None = None
    branches: list[Branch] | None = None
    task_group: Text | None = None

    @property
    def cut(self) -> bool:
        """Whether a limit of tokens or of turns ended the answer."""
        return self.stop_reason in (*OUT_OF_TOKENS, "max_turns")
