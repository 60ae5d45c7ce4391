"""Preference pairs: a better and a worse answer to one task.

This is the one place that knows where a stored row keeps them. The worse answer stands in the row's
metadata under `rejected`. The better one stands there under `chosen`; if it does not, the row's
reference answer is the better one. An answer is a text, a list of messages, or a whole conversation
that begins with the row's prompt.
"""

from collections.abc import Sequence
from typing import NamedTuple

from envs.base import CHOSEN, REJECTED
from envs.json_types import ChatMessage, TaskRow


class Preference(NamedTuple):
    """Two whole conversations: the row's prompt with the better answer, and with the worse one."""

    chosen: list[ChatMessage]
    rejected: list[ChatMessage]


def pair_of(row: TaskRow) -> Preference | None:
    """Return the preference pair of a stored row, or None.

    The result is None if the better or the worse answer is missing, if the worse answer is neither
    a text nor messages that end with one of the assistant, or if both answers are the same.
    """
    rejected = _conversation(row, REJECTED)
    # If the row has no answer under CHOSEN, its reference conversation holds the better answer.
    chosen = _conversation(row, CHOSEN) or row.get("gold")
    if not chosen or rejected is None or chosen == rejected:
        return None
    return Preference(list(chosen), rejected)


def _conversation(row: TaskRow, key: str) -> list[ChatMessage] | None:
    """Return the row's prompt followed by the answer in its metadata under `key`; None if there is
    no valid answer there."""
    answer = (row.get("metadata") or {}).get(key)
    if isinstance(answer, str) and answer:
        answer = [{"role": "assistant", "content": answer}]
    if not isinstance(answer, list) or not all(_is_message(message) for message in answer):
        return None
    prompt = list(row["prompt"])
    answer = _without_prompt(answer, prompt)  # the answer may be given with the prompt before it
    if not answer or answer[-1]["role"] != "assistant":
        return None
    return [*prompt, *answer]


def _without_prompt(
    messages: list[ChatMessage], prompt: Sequence[ChatMessage]
) -> list[ChatMessage]:
    """Return an answer's `messages` without the prompt, if they begin with it; else all of them."""
    beginning = [_role_and_content(message) for message in messages[: len(prompt)]]
    if beginning == [_role_and_content(message) for message in prompt]:
        return messages[len(prompt) :]
    return messages


def _is_message(message: object) -> bool:
    """Return whether a value is a chat message: an object that names its role."""
    return isinstance(message, dict) and isinstance(message.get("role"), str)


def _role_and_content(message: ChatMessage) -> tuple[object, object]:
    """Return (role, content) of a message, by which two messages are compared.

    Their other keys are ignored, because the stored prompt may lack some.
    """
    return message["role"], message.get("content")
