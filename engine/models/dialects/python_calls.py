"""Reads tool calls written as Python: `[name(a=1, b='x'), ...]`. None of it is executed.

Python's own parser cannot read all of these calls: tool names have hyphens, objects are JSON, and
some templates write quotes and line feeds inside a string without escapes.
"""

import re
from collections.abc import Sequence

from engine.models.dialects.reading import (
    Malformed,
    ParsedCall,
    ParsedCalls,
    between_marks,
    shown,
    skip_space,
)
from engine.models.dialects.values import after_item, read_pairs
from envs.json_types import ToolSchema

_NAME = re.compile(r"\s*([A-Za-z_][\w.\-]*)\s*\(")
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", "'": "'", '"': '"', "/": "/"}
_FOLLOWS_A_TEXT = (",", ")", "]", "}", ":")  # one of these follows the closing quote of a string


def lfm(text: str, _unused_tools: Sequence[ToolSchema]) -> ParsedCalls:
    """Read the calls of LFM2: `<|tool_call_start|>[name(a=1)]<|tool_call_end|>`."""
    return between_marks(text, "<|tool_call_start|>", "<|tool_call_end|>", _calls)


def pythonic(text: str, _unused_tools: Sequence[ToolSchema]) -> ParsedCalls:
    """Read the calls of Llama 3.2 and 4, whose whole reply is `[name(a=1), ...]`.

    The marks `<|python_start|>` and `<|python_end|>` around it are optional. A list that does not
    begin with a call is an ordinary answer.
    """
    body = text.strip().removeprefix("<|python_start|>").removesuffix("<|python_end|>").strip()
    if not (body.startswith("[") and _NAME.match(body, 1)):  # 1: the position after the bracket
        return ParsedCalls(text)
    return python_calls(body, text)


def python_calls(body: str, text: str) -> ParsedCalls:
    """Read the calls of a reply that consists of nothing but calls.

    Args:
        body: the calls as a Python expression, without any marks around it.
        text: the whole reply. If `body` cannot be read, it becomes the content, and the result
            has one fault (the reason as a text).
    """
    try:
        calls, end = _calls(body, position=0)
        if skip_space(body, end) < len(body):
            raise Malformed(f"text after the calls: {shown(body[end:])}")
    except Malformed as fault:
        return ParsedCalls(text, faults=(str(fault),))
    return ParsedCalls(content="", calls=tuple(calls))


def _calls(text: str, position: int) -> tuple[list[ParsedCall], int]:
    """Read the calls at `position`: one call, or a list of calls in brackets.

    Returns (the calls, the position after them). Raises Malformed if a call cannot be read or the
    list is empty.
    """
    position = skip_space(text, position)
    if not text.startswith("[", position):
        call, position = _call(text, position)
        return [call], position
    calls: list[ParsedCall] = []
    position = skip_space(text, position + 1)
    while not text.startswith("]", position):
        call, position = _call(text, position)
        calls.append(call)
        position = skip_space(text, after_item(text, position, "]"))
    if not calls:
        raise Malformed("a list of no calls")
    return calls, position + 1


def _call(text: str, position: int) -> tuple[ParsedCall, int]:
    """Read the call at `position`: `name(a=1)`, or `name.call(a=1)` as Llama writes built-in tools.

    Returns (the call, the position after it). Raises Malformed if no call can be read there.
    """
    name_match = _NAME.match(text, position)
    if not name_match:
        raise Malformed(f"no call of a tool: {shown(text[position:])}")
    arguments, position = read_pairs(text, name_match.end(), _text_at, separator="=", closing=")")
    return ParsedCall(name_match.group(1).removesuffix(".call"), arguments), position


def _text_at(text: str, position: int) -> tuple[str, int] | None:
    """Read the quoted string that begins at `position`.

    Returns (the string without quotes, the position after it), or None if no quote stands at
    `position`. Raises Malformed if the closing quote is missing.
    """
    quote = text[position : position + 1]
    if quote not in ("'", '"'):
        return None
    end = _closing_quote(text, position + 1, quote)
    if end is None:
        raise Malformed(f"a text without its end: {shown(text[position:])}")
    return _ESCAPE.sub(_unescaped, text[position + 1 : end]), end + 1


def _closing_quote(text: str, position: int, quote: str) -> int | None:
    """Find the position of the quote that closes a string, searching from `position`; None if there
    is none.

    It is the first `quote` that is not escaped and stands before a comma, a colon or a closing
    bracket, since a string may contain unescaped quotes.
    """
    while position < len(text):
        if text[position] == "\\":  # it escapes the character after it
            position += 2
            continue
        if text[position] == quote and text.startswith(
            _FOLLOWS_A_TEXT, skip_space(text, position + 1)
        ):
            return position
        position += 1
    return None


def _unescaped(match: re.Match[str]) -> str:
    """Return the character that a matched escape stands for. An unknown escape is kept
    unchanged."""
    code = match.group(1)
    if len(code) > 1:  # u or x, then hex digits
        return chr(int(code[1:], 16))
    return _ESCAPED.get(code, match.group())
