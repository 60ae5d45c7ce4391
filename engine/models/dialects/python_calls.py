"""Tool calls as Python: `[name(a=1, b='x'), ...]`. Nothing of it is run.

Python's own parser does not read them all: names of tools have hyphens, objects are JSON, and some
templates write quotes and line feeds inside a text as they are.
"""

import re
from collections.abc import Sequence

from engine.models.dialects.reading import (
    Found,
    FoundCall,
    Malformed,
    between_marks,
    shown,
    skip_space,
)
from engine.models.dialects.values import after_item, read_pairs
from envs.json_types import ToolSchema

_NAME = re.compile(r"\s*([A-Za-z_][\w.\-]*)\s*\(")
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", "'": "'", '"': '"', "/": "/"}
_FOLLOWS_A_TEXT = (",", ")", "]", "}", ":")  # one of these follows the closing quote of a text


def lfm(text: str, _tools: Sequence[ToolSchema]) -> Found:
    """`<|tool_call_start|>[name(a=1)]<|tool_call_end|>`: LFM2."""
    return between_marks(text, "<|tool_call_start|>", "<|tool_call_end|>", _calls)


def pythonic(text: str, _tools: Sequence[ToolSchema]) -> Found:
    """The calls of Llama 3.2 and 4: the whole reply is `[name(a=1), ...]`, with or without
    `<|python_start|>` before it and `<|python_end|>` behind it. A list that does not begin with a
    call is an answer."""
    body = text.strip().removeprefix("<|python_start|>").removesuffix("<|python_end|>").strip()
    if not (body.startswith("[") and _NAME.match(body, 1)):  # 1: behind the bracket
        return Found(text)
    return python_calls(body, text)


def python_calls(body: str, text: str) -> Found:
    """The calls in a reply that is nothing but calls.

    Args:
        body: the calls, as an expression of Python, without the marks around it.
        text: the whole reply; it stays the content, with a fault, if `body` cannot be read.
    """
    try:
        calls, end = _calls(body, at=0)
        if skip_space(body, end) < len(body):
            raise Malformed(f"text after the calls: {shown(body[end:])}")
    except Malformed as fault:
        return Found(text, faults=(str(fault),))
    return Found(content="", calls=tuple(calls))


def _calls(text: str, at: int) -> tuple[list[FoundCall], int]:
    """The calls at `at` (one, or a list of them in brackets) and the position after them. Raises
    Malformed, also for an empty list."""
    at = skip_space(text, at)
    if not text.startswith("[", at):
        call, at = _call(text, at)
        return [call], at
    calls: list[FoundCall] = []
    at = skip_space(text, at + 1)
    while not text.startswith("]", at):
        call, at = _call(text, at)
        calls.append(call)
        at = skip_space(text, after_item(text, at, "]"))
    if not calls:
        raise Malformed("a list of no calls")
    return calls, at + 1


def _call(text: str, at: int) -> tuple[FoundCall, int]:
    """The call at `at` and the position after it: `name(a=1)`, or `name.call(a=1)` as Llama writes
    tools that it has built in. Raises Malformed."""
    name_match = _NAME.match(text, at)
    if not name_match:
        raise Malformed(f"no call of a tool: {shown(text[at:])}")
    arguments, at = read_pairs(text, name_match.end(), _text_at, separator="=", closing=")")
    return FoundCall(name_match.group(1).removesuffix(".call"), arguments), at


def _text_at(text: str, at: int) -> tuple[str, int] | None:
    """The text in quotes that begins at `at`, and the position after it; None if there is no quote
    at `at`. Raises Malformed if the text has no closing quote."""
    quote = text[at : at + 1]
    if quote not in ("'", '"'):
        return None
    end = _closing_quote(text, at + 1, quote)
    if end is None:
        raise Malformed(f"a text without its end: {shown(text[at:])}")
    return _ESCAPE.sub(_unescaped, text[at + 1 : end]), end + 1


def _closing_quote(text: str, at: int, quote: str) -> int | None:
    """The position of the first quote from `at` on that is not escaped and stands before a comma, a
    colon or a closing bracket; None without one."""
    while at < len(text):
        if text[at] == "\\":  # it escapes the character after it
            at += 2
            continue
        if text[at] == quote and text.startswith(_FOLLOWS_A_TEXT, skip_space(text, at + 1)):
            return at
        at += 1
    return None


def _unescaped(match: re.Match[str]) -> str:
    """The character that a matched escape stands for; an unknown escape stays as it is."""
    code = match.group(1)
    if len(code) > 1:  # u or x, then hex digits
        return chr(int(code[1:], 16))
    return _ESCAPED.get(code, match.group())
