"""Question and reference answer of a stored task row, as text."""

from collections.abc import Mapping
from typing import Any

from engine.evidence.stats.results import content_of
from envs.json_types import ChatMessage


def question_of(row: Mapping[str, Any]) -> str:
    """Return the text of a task's prompt, without system messages; `row` is a stored task row."""
    turns = [message for message in row.get("prompt") or [] if message.get("role") != "system"]
    return "\n".join(content_of(turn) for turn in turns).strip()


def answer_of(row: Mapping[str, Any]) -> str:
    """Return the text of a task's reference answer, "" if it has none; `row` is a stored task row.

    Only the assistant's messages count; those of tools or users between them are left out.
    """
    turns = [turn for turn in _messages_after_prompt(row) if turn.get("role") == "assistant"]
    return "\n".join(content_of(turn) for turn in turns).strip()


def _messages_after_prompt(row: Mapping[str, Any]) -> list[ChatMessage]:
    """Return the messages after the prompt of a stored task row: those of its gold (reference)
    conversation, else those of its stored answer; [] if it has neither."""
    gold = row.get("gold")
    if isinstance(gold, list):  # the gold conversation begins with the prompt
        prompt_length = len(row.get("prompt") or [])
        return gold[prompt_length:]
    return row.get("answer") or []
