"""Gemma 4's tool calls: `<|tool_call>call:name{key:value,...}<tool_call|>`; a text is
`<|"|>text<|"|>`, and keys have no quotes or those of a text."""

import re
from collections.abc import Sequence

from engine.models.dialects.reading import (
    Found,
    FoundCall,
    Malformed,
    between_marks,
    shown,
    skip_mark,
)
from engine.models.dialects.values import read_pairs
from envs.json_types import ToolSchema

_QUOTE = '<|"|>'
_NAME = re.compile(r"\s*call:([^\s{]+)")


def gemma(text: str, _tools: Sequence[ToolSchema]) -> Found:
    """The calls of a reply as Gemma writes them: `<|tool_call>call:name{a:1}<tool_call|>`."""
    parsed = between_marks(text, "<|tool_call>", "<tool_call|>", _read_call)
    if not parsed.calls and not parsed.faults:  # an answer without calls
        return parsed
    # After its calls the model opens the message with their results, which is no content.
    content = parsed.content.removesuffix("<|tool_response>").rstrip()
    return Found(content, parsed.calls, parsed.faults)


def _read_call(text: str, at: int) -> tuple[list[FoundCall], int]:
    """The call that begins at `at`, a name and an object, as a list of one, and the position after
    the call. Raises Malformed."""
    name_match = _NAME.match(text, at)
    if not name_match:
        raise Malformed(f"no call:name in {shown(text[at:])}")
    arguments, at = read_pairs(text, skip_mark(text, name_match.end(), "{"), _text_at)
    return [FoundCall(name_match.group(1), arguments)], at


def _text_at(text: str, at: int) -> tuple[str, int] | None:
    """The text in quotes that begins at `at`, and the position after it; None if there is no quote
    at `at`. Raises Malformed if the text has no closing quote."""
    if not text.startswith(_QUOTE, at):
        return None
    at += len(_QUOTE)
    end = text.find(_QUOTE, at)
    if end < 0:
        raise Malformed(f"a text without its end: {shown(text[at:])}")
    return text[at:end], end + len(_QUOTE)
