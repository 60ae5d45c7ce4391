"""One answer of a model to a task, as rollouts and evaluations both keep it."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, InstanceOf

from engine.records.lines.line_record import LineRecord
from envs.json_types import ChatMessage

# Why an answer ended, in this order: the model ended it; a turn had `max_tokens`; the conversation
# had no room left in `max_length`; its turns were used up; the environment took longer than it may;
# the environment failed; the provider of a model behind a URL would not answer this.
StopReason = Literal[
    "stop", "max_tokens", "max_context", "max_turns", "timeout", "env_error", "refused"
]
OUT_OF_TOKENS: tuple[StopReason, ...] = ("max_tokens", "max_context")
# What files of earlier versions say instead.
FORMER_STOP_REASONS: dict[str, StopReason] = {"length": "max_tokens", "error": "env_error"}

# Any text, a lone surrogate included: answers and the replies of environments may hold one.
Text = InstanceOf[str]


def _without_nulls(values: object) -> object:
    """Remove the nulls from a mapping of names to numbers: a file has null for NaN and infinity.

    A value that is no mapping is returned as it is, for validation to refuse.
    """
    if not isinstance(values, dict):
        return values
    return {name: value for name, value in values.items() if value is not None}


def present_stop_reason(reason: object) -> object:
    """The word of today for a stop reason of an earlier version; any other value as it is."""
    return FORMER_STOP_REASONS.get(reason, reason) if isinstance(reason, str) else reason


Numbers = Annotated[dict[str, float], BeforeValidator(_without_nulls)]


class Branch(LineRecord):
    """A conversation of a rollout beside its first: its prompt and the messages after it."""

    prompt: list[ChatMessage]
    messages: list[ChatMessage]


class Answer(LineRecord):
    """A completion and its score; None where the file does not say.

    Attributes:
        task: id of the task.
        prompt: the messages that were asked.
        messages: those of model and environment after the prompt.
        completion: text of the last assistant turn.
        reward: the environment's own, before anything is taken off it.
        success: whether it was right, None where the environment never says.
        metrics: named numbers of the score.
        error: why there is no score, None where there is one.
        stop_reason: one of `StopReason`, or the word of a later version.
        tokens: that the model wrote.
        reason: why it earned that, in the words of the environment; None where it does not say.
        parts: what the reward is made of, name -> [weight, value]; None where it does not say.
        invalid_calls: why tool calls in it are invalid, one text each.
        branches: further conversations of a rollout that a command played; None for none.
        task_group: the group that the environment gave the task; None for none.
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
        """Whether the answer was ended by a limit: of tokens or of turns."""
        return self.stop_reason in (*OUT_OF_TOKENS, "max_turns")
