"""Reads Gemma 4's tool calls, such as `<|tool_call>call:name{key:value,...}<tool_call|>`.

Strings stand between special quotes: `<|"|>text<|"|>`. Keys have either no quotes or these.
"""

import re
from collections.abc import Sequence

from engine.models.dialects.reading import (
    Malformed,
    ParsedCall,
    ParsedCalls,
    between_marks,
    shown,
    skip_mark,
)
from engine.models.dialects.values import read_pairs
from envs.json_types import ToolSchema

_QUOTE = '<|"|>'
_NAME = re.compile(r"\s*call:([^\s{]+)")


def gemma(text: str, _unused_tools: Sequence[ToolSchema]) -> ParsedCalls:
    """Read the tool calls of a reply as Gemma writes them:
    `<|tool_call>call:name{a:1}<tool_call|>`.

    If the reply has no calls, the result holds the unchanged text as its content.
    """
    parsed = between_marks(text, "<|tool_call>", "<tool_call|>", _read_call)
    if not parsed.calls and not parsed.faults:  # an answer without calls
        return parsed
    # After its calls the model opens the message with their results, which is no content.
    content = parsed.content.removesuffix("<|tool_response>").rstrip()
    return ParsedCalls(content, parsed.calls, parsed.faults)


def _read_call(text: str, position: int) -> tuple[list[ParsedCall], int]:
    """Read one call, such as `call:name{a:1}`, that begins at `position` of the text.

    Returns (a list with this one call, the position after it). Raises Malformed if no call begins
    there or its arguments cannot be read.
    """
    name_match = _NAME.match(text, position)
    if not name_match:
        raise Malformed(f"no call:name in {shown(text[position:])}")
    arguments, position = read_pairs(text, skip_mark(text, name_match.end(), "{"), _text_at)
    return [ParsedCall(name_match.group(1), arguments)], position


def _text_at(text: str, position: int) -> tuple[str, int] | None:
    """Read the quoted string (between two `<|"|>`) that begins at `position`.

    Returns (the string without quotes, the position after it), or None if no quote stands at
    `position`. Raises Malformed if the closing quote is missing.
    """
    if not text.startswith(_QUOTE, position):
        return None
    position += len(_QUOTE)
    end = text.find(_QUOTE, position)
    if end < 0:
        raise Malformed(f"a text without its end: {shown(text[position:])}")
    return text[position:end], end + len(_QUOTE)
