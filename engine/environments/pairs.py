"""Preference pairs: a better and a worse answer to one task.

The one place that knows where a stored row keeps them: in its metadata, the better answer under
`chosen`, or else as the row's reference answer, and the worse one under `rejected`; each as text,
as messages, or as a whole conversation that begins with the row's prompt.
"""

from collections.abc import Sequence
from typing import NamedTuple

from envs.base import CHOSEN, REJECTED
from envs.json_types import ChatMessage, TaskRow


class Preference(NamedTuple):
    """Two whole conversations: the row's prompt, then the better or the worse answer."""

    chosen: list[ChatMessage]
    rejected: list[ChatMessage]


def pair_of(row: TaskRow) -> Preference | None:
    """The pair of a stored row; None for one that has none.

    It has none if the better or the worse answer is missing, if the worse one is neither a text nor
    messages of which the last is the assistant's, or if both answers are the same.
    """
    rejected = _conversation(row, REJECTED)
    # Without a better answer of its own, the reference answer is the better one.
    chosen = _conversation(row, CHOSEN) or row.get("gold")
    if not chosen or rejected is None or chosen == rejected:
        return None
    return Preference(list(chosen), rejected)


def _conversation(row: TaskRow, key: str) -> list[ChatMessage] | None:
    """The row's prompt with the answer in its metadata under `key`; None where there is no valid
    answer."""
    answer = (row.get("metadata") or {}).get(key)
    if isinstance(answer, str) and answer:
        answer = [{"role": "assistant", "content": answer}]
    if not isinstance(answer, list) or not all(_is_message(message) for message in answer):
        return None
    prompt = list(row["prompt"])
    answer = _without_prompt(answer, prompt)  # which it may begin with
    if not answer or answer[-1]["role"] != "assistant":
        return None
    return [*prompt, *answer]


def _without_prompt(
    messages: list[ChatMessage], prompt: Sequence[ChatMessage]
) -> list[ChatMessage]:
    """The messages without the prompt, if they begin with it; else all of them."""
    beginning = [_role_and_content(message) for message in messages[: len(prompt)]]
    if beginning == [_role_and_content(message) for message in prompt]:
        return messages[len(prompt) :]
    return messages


def _is_message(message: object) -> bool:
    """Whether a value looks like a chat message: an object that names its role."""
    return isinstance(message, dict) and isinstance(message.get("role"), str)


def _role_and_content(message: ChatMessage) -> tuple[object, object]:
    """What two messages are compared by; the stored prompt may lack other keys of a message."""
    return message["role"], message.get("content")
