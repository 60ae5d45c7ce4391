"""A question of a program to the model and the answer to it, independent of the protocol."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from engine.serving.messages import BadMessages, check_size, checked_tools
from engine.worker.gateway.chat_request import MAX_STOPS, MAX_TOKENS, Refused, checked_number
from envs.base import Message
from envs.json_types import ChatMessage, JsonObject, ToolSchema

Finish = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class Question:
    """A request for one assistant message.

    Attributes:
        model: what the request calls the model; any name is accepted.
        messages: the conversation, in the form of `envs.base.Message.to_dict`.
        tools: the tools that the model may call.
        max_tokens: the longest answer in tokens; None for the run's own limit.
        stop: texts that end the answer, in addition to those of the run.
        stream: whether the answer is sent as events.
        include_usage: whether a stream ends with the numbers of tokens.
    """

    model: str
    messages: list[ChatMessage]
    tools: list[ToolSchema]
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = True


@dataclass(frozen=True)
class Answer:
    """The model's answer.

    Attributes:
        text: the content of the answer.
        reasoning: its thoughts; "" for none.
        tool_calls: its tool calls in OpenAI's form, each with an id.
        finish: why the answer ended.
        prompt_tokens, completion_tokens: the numbers of tokens.
    """

    text: str
    reasoning: str
    tool_calls: list[JsonObject]
    finish: Finish
    prompt_tokens: int
    completion_tokens: int


class Dialect(Protocol):
    """A protocol for asking over HTTP: a module with these functions."""

    def read(self, body: Any) -> Question:
        """Parse the decoded JSON body of a request. Raises Refused if it cannot be served."""
        ...

    def reply(self, question: Question, answer: Answer) -> JsonObject:
        """Return the answer as the JSON object of a reply that is not streamed."""
        ...

    def events(self, question: Question, answer: Answer) -> list[str]:
        """Return the answer as the server-sent events of a streamed reply."""
        ...


def fields_of(body: Any, acted_on: Sequence[str], decided: Sequence[str]) -> JsonObject:
    """Return the fields of a decoded request body that are acted on, without those that are null.

    Args:
        acted_on: names of fields that the caller reads.
        decided: names of fields that are accepted but have no effect, because the run decides what
            they ask for: how tokens are drawn, what is stored.

    Raises:
        Refused: 400 for a body that is no object, or for any other field: a program whose field was
            silently ignored would misread the answer.
    """
    if not isinstance(body, dict):
        raise Refused(400, "The body must be a JSON object.")
    set_fields = {name: value for name, value in body.items() if value is not None}
    unknown = sorted(set_fields.keys() - {*acted_on, *decided})
    if unknown:
        raise Refused(400, f"Not supported by this gateway: {', '.join(unknown)}.")
    return {name: value for name, value in set_fields.items() if name in acted_on}


def conversation(messages: Any) -> list[ChatMessage]:
    """Return the messages of a request in the normal form of `envs.base.Message.to_dict`, in which
    messages with the same meaning compare as equal. Raises Refused (400) if there are none, or if
    one of them cannot be read."""
    if not isinstance(messages, list) or not messages:
        raise Refused(400, "messages must be a list with at least one message.")
    try:
        return [normal_form(message) for message in messages]
    except (TypeError, ValueError) as error:
        raise Refused(400, f"messages: {error}.") from error


def normal_form(message: Mapping[str, Any]) -> ChatMessage:
    """Return a message in a normal form, in which messages with the same meaning compare as equal.
    Raises TypeError or ValueError if it is no message."""
    return Message.from_dict(message).to_dict()


def checked_size(question: Question) -> Question:
    """Check the size and the tools of a request, and return the request unchanged.

    Raises Refused (400) for tools that have no valid form, Refused (413) for too many messages,
    tools or characters.
    """
    try:
        checked_tools(question.tools)
        check_size(question.messages, question.tools)
    except BadMessages as error:
        raise Refused(413 if error.is_too_large else 400, str(error)) from error
    return question


def token_limit(value: Any, name: str) -> int | None:
    """Return the token limit in the field `name`, or None if `value` is None. Raises Refused (400)
    unless it is a number of at least 1; a number above MAX_TOKENS becomes MAX_TOKENS."""
    if value is None:
        return None
    return int(min(MAX_TOKENS, checked_number(value, name, low=1, high=float(2**31))))


def stop_strings(value: Any) -> tuple[str, ...]:
    """Return the stop strings of a request as a tuple. `value` is what the request has: a text, a
    list of texts or None. Raises Refused (400) for anything else, and for more than MAX_STOPS."""
    texts = [value] if isinstance(value, str) else (value or [])
    is_valid = isinstance(texts, list) and all(isinstance(text, str) and text for text in texts)
    if not is_valid or len(texts) > MAX_STOPS:
        raise Refused(400, f"stop must be a text or a list of at most {MAX_STOPS} texts.")
    return tuple(texts)
