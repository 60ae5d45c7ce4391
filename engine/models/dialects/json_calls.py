"""Tool calls as JSON: Hermes, Mistral, Llama 3, DeepSeek, Phi-4."""

import re
from collections.abc import Iterator, Sequence

from engine.models.dialects.python_calls import python_calls
from engine.models.dialects.reading import (
    Malformed,
    ParsedCall,
    ParsedCalls,
    arguments_from,
    between_marks,
    call_from_json,
    json_value,
    shown,
    skip_mark,
    skip_space,
)
from envs.json_types import ToolSchema

PYTHON_TAG = "<|python_tag|>"
_NAME = re.compile(r"\s*([A-Za-z0-9_.\-]+)")
_DEEPSEEK_FENCE = re.compile(r"\s*```(?:json)?\s*")


def hermes(text: str, _tools: Sequence[ToolSchema]) -> ParsedCalls:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen2.5, Qwen3."""
    return between_marks(text, "<tool_call>", "</tool_call>", _json_call)


def phi(text: str, _tools: Sequence[ToolSchema]) -> ParsedCalls:
    """`<|tool_call|>` and a call or a list of calls, then `<|/tool_call|>` (Phi-4-mini) or nothing
    (Granite 3)."""
    return between_marks(text, "<|tool_call|>", closing="", body=_json_list_and_mark)


def mistral(text: str, _tools: Sequence[ToolSchema]) -> ParsedCalls:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]name[ARGS]{...}` once for
    each call, with `[CALL_ID]id` in between in some versions."""
    return between_marks(text, "[TOOL_CALLS]", closing="", body=_mistral_body)


def deepseek(text: str, _tools: Sequence[ToolSchema]) -> ParsedCalls:
    """The calls of a reply, each in the form
    `<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, a line feed and the arguments in a
    fence of JSON (V3, R1), or `name<｜tool▁sep｜>{...}` (V3.1), then `<｜tool▁call▁end｜>`."""
    parsed = between_marks(text, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", _deepseek_body)
    if not parsed.calls and not parsed.faults:  # an answer without calls
        return parsed
    content = parsed.content
    # The marks around all calls of a reply stand outside those of each call.
    for mark in ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"):
        content = content.replace(mark, "")
    return ParsedCalls(content.strip(), parsed.calls, parsed.faults)


def llama(text: str, tools: Sequence[ToolSchema]) -> ParsedCalls:
    """The calls of Llama 3.1 to 3.3: the whole reply is `{"name": ..., "parameters": {...}}`, or
    several of these with ";" between them, with or without `<|python_tag|>` before them. Tools that
    the model has built in are written `<|python_tag|>name.call(a=1)`.

    A reply of other JSON without the tag is an answer, not a call.
    """
    has_tag = text.lstrip().startswith(PYTHON_TAG)
    body = text.lstrip().removeprefix(PYTHON_TAG) if has_tag else text
    if not body.lstrip().startswith("{"):
        return python_calls(body.strip(), text) if has_tag else ParsedCalls(text)
    if not has_tag and '"name"' not in body:  # JSON that names no tool is an answer
        return ParsedCalls(text)
    try:
        calls = _llama_calls(body, is_certain=has_tag)
    except Malformed as fault:
        return ParsedCalls(text, faults=(str(fault),))
    # None: without the tag, JSON that is no call is an answer.
    return ParsedCalls(text) if calls is None else ParsedCalls(content="", calls=tuple(calls))


def _llama_calls(body: str, *, is_certain: bool) -> list[ParsedCall] | None:
    """The calls that a text of JSON values consists of. None if a value has not the form of a call;
    with `is_certain`, which says that all are calls, this raises Malformed, as bad JSON does."""
    calls: list[ParsedCall] = []
    for value in _json_values(body):
        if not is_certain and not _is_call(value):
            return None
        calls.append(call_from_json(value))
    return calls


def _json_values(text: str) -> Iterator[object]:
    """The JSON values that a text consists of, at least one; ";" may stand after each. Raises
    Malformed where a value should begin and is no JSON."""
    position = 0
    is_at_end = False
    while not is_at_end:
        value, position = json_value(text, position)
        yield value
        position = skip_space(text, position)
        if text.startswith(";", position):
            position += 1
        is_at_end = skip_space(text, position) == len(text)


def _is_call(value: object) -> bool:
    """Whether a JSON value has the form of a call of Llama's."""
    if not isinstance(value, dict):
        return False
    return "name" in value and ("parameters" in value or "arguments" in value)


def _json_call(text: str, position: int) -> tuple[list[ParsedCall], int]:
    """Read the call at `position`, one JSON object: ([the call], the position after it). Raises
    Malformed."""
    value, position = json_value(text, position)
    return [call_from_json(value)], position


def _json_list(text: str, position: int) -> tuple[list[ParsedCall], int]:
    """Read the calls at `position`: a list of JSON objects, or one object.

    Returns (the calls, the position after them). Raises Malformed, also for an empty list.
    """
    value, position = json_value(text, position)
    values = value if isinstance(value, list) else [value]
    if not values:
        raise Malformed("a list of no calls")
    return [call_from_json(item) for item in values], position


def _json_list_and_mark(text: str, position: int) -> tuple[list[ParsedCall], int]:
    """Read the calls at `position`, a list of JSON objects or one object, and the closing mark.

    Returns (the calls, the position after the mark). The mark may be missing. Raises Malformed.
    """
    calls, position = _json_list(text, position)
    closing = "<|/tool_call|>"
    next_at = skip_space(text, position)
    if text.startswith(closing, next_at):
        position = next_at + len(closing)
    return calls, position


def _mistral_body(text: str, position: int) -> tuple[list[ParsedCall], int]:
    """Read Mistral's calls at `position`: a list of objects, or one `name[ARGS]{...}`.

    Returns (the calls, the position after them). Raises Malformed.
    """
    position = skip_space(text, position)
    if text.startswith(("[", "{"), position):
        return _json_list(text, position)
    name_match = _NAME.match(text, position)
    if not name_match:
        raise Malformed(f"a list of calls or a name should follow, not {shown(text[position:])}")
    name = name_match.group(1)
    call_id, position = _mistral_call_id(text, name_match.end())
    if text.startswith("[ARGS]", position):  # it may be missing
        position += len("[ARGS]")
    value, position = json_value(text, position)
    return [ParsedCall(name, arguments_from(value, name), call_id)], position


def _mistral_call_id(text: str, position: int) -> tuple[str, int]:
    """Read the id of a call, `[CALL_ID]` and a name, at `position`.

    Returns (the id, the position after it); ("", `position`) if there is none. Raises Malformed for
    the mark of an id without an id.
    """
    if not text.startswith("[CALL_ID]", position):
        return "", position
    id_match = _NAME.match(text, position + len("[CALL_ID]"))
    if not id_match:
        raise Malformed(f"no id after [CALL_ID]: {shown(text[position:])}")
    return id_match.group(1), id_match.end()


def _deepseek_body(text: str, position: int) -> tuple[list[ParsedCall], int]:
    """Read DeepSeek's call at `position`: ([the call], the position after it). Raises Malformed.

    V3 and R1 write a type, the separator, a name and fenced arguments; V3.1 writes a name, the
    separator and arguments.
    """
    separator = text.find("<｜tool▁sep｜>", position)
    if separator < 0:
        raise Malformed(f"no <｜tool▁sep｜> in {shown(text[position:])}")
    type_or_name = text[position:separator].strip()
    position = separator + len("<｜tool▁sep｜>")
    if text.startswith("{", skip_space(text, position)):  # V3.1: arguments follow the name
        value, position = json_value(text, position)
        return [ParsedCall(type_or_name, arguments_from(value, type_or_name))], position
    return _deepseek_fenced_call(text, position)


def _deepseek_fenced_call(text: str, position: int) -> tuple[list[ParsedCall], int]:
    """Read a name, and its arguments as JSON between lines of three backticks, at `position`.

    Returns ([the call], the position after it). Raises Malformed.
    """
    name_match = _NAME.match(text, position)
    fence = _DEEPSEEK_FENCE.match(text, name_match.end()) if name_match else None
    if not name_match or not fence:
        raise Malformed(f"no name with arguments in {shown(text[position:])}")
    name = name_match.group(1)
    value, position = json_value(text, fence.end())
    call = ParsedCall(name, arguments_from(value, name))
    return [call], skip_mark(text, position, "```")
