"""Preference pairs: a task's reference answer as the better one, and a worse one beside it.

The one place that knows where a stored row keeps the worse answer: under `rejected` in its
metadata, as text, as messages, or as a whole conversation that begins with the row's prompt.
"""

from envs.json_types import ChatMessage, TaskRow

REJECTED = "rejected"


def rejected_of(row: TaskRow) -> list[ChatMessage] | None:
    """The whole conversation with the worse answer: the row's prompt, then that answer.

    None for a row that is no pair: one without a reference answer or without a worse one, or whose
    `rejected` is neither text nor messages that end with the assistant's, or the better answer over
    again.
    """
    if not row.get("gold"):
        return None
    answer = (row.get("metadata") or {}).get(REJECTED)
    if isinstance(answer, str) and answer:
        answer = [{"role": "assistant", "content": answer}]
    if not isinstance(answer, list) or not all(_is_message(message) for message in answer):
        return None
    prompt = list(row["prompt"])
    if [_said(message) for message in answer[: len(prompt)]] == [_said(m) for m in prompt]:
        answer = answer[len(prompt) :]
    if not answer or answer[-1]["role"] != "assistant":
        return None
    conversation = [*prompt, *answer]
    return conversation if conversation != row["gold"] else None


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str)


def _said(message: ChatMessage) -> tuple[object, object]:
    """Who says what; other keys of a message may be missing on one side."""
    return message["role"], message.get("content")
