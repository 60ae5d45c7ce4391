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


def hermes(text: str, _unused_tools: Sequence[ToolSchema]) -> ParsedCalls:
    """Read calls in the form `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes,
    Qwen2.5 and Qwen3 write them."""
    return between_marks(text, "<tool_call>", "</tool_call>", _json_call)


def phi(text: str, _unused_tools: Sequence[ToolSchema]) -> ParsedCalls:
    """Read calls in the form `<|tool_call|>`, one call or a list of calls, `<|/tool_call|>`.

    Phi-4-mini writes the closing mark; Granite 3 leaves it out.
    """
    return between_marks(text, "<|tool_call|>", closing="", body=_json_list_and_mark)


def mistral(text: str, _unused_tools: Sequence[ToolSchema]) -> ParsedCalls:
    """Read calls as Mistral writes them: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or
    `[TOOL_CALLS]name[ARGS]{...}` for each call. Some versions put `[CALL_ID]id` before `[ARGS]`."""
    return between_marks(text, "[TOOL_CALLS]", closing="", body=_mistral_body)


def deepseek(text: str, _unused_tools: Sequence[ToolSchema]) -> ParsedCalls:
    """Read the calls of a reply as DeepSeek writes them.

    V3 and R1 write `<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, a line feed, the
    arguments in a fence of JSON, and `<｜tool▁call▁end｜>`. V3.1 writes
    `name<｜tool▁sep｜>{...}` between the same two marks.
    """
    parsed = between_marks(text, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", _deepseek_body)
    if not parsed.calls and not parsed.faults:  # an answer without calls
        return parsed
    content = parsed.content
    # The marks around all calls of a reply stand outside those of each call.
    for mark in ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"):
        content = content.replace(mark, "")
    return ParsedCalls(content.strip(), parsed.calls, parsed.faults)


def llama(text: str, tools: Sequence[ToolSchema]) -> ParsedCalls:
    """Read the calls of Llama 3.1 to 3.3, which make up the whole reply.

    A call is `{"name": ..., "parameters": {...}}`; several have ";" between them; `<|python_tag|>`
    may stand before them. Calls of the model's built-in tools are `<|python_tag|>name.call(a=1)`. A
    reply of other JSON, without the tag, is an answer and not a call.
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
    """Return the calls in a text that consists of JSON values, such as `{"name": ...}; {"name":
    ...}`.

    If a value does not have the form of a call, this returns None (the text is an answer), or
    raises Malformed if `is_certain` says that all values are calls. Bad JSON raises Malformed as
    well.
    """
    calls: list[ParsedCall] = []
    for value in _json_values(body):
        if not is_certain and not _is_call(value):
            return None
        calls.append(call_from_json(value))
    return calls


def _json_values(text: str) -> Iterator[object]:
    """Yield the JSON values that a text consists of, at least one. ";" may follow each value.
    Raises Malformed if a value is not valid JSON."""
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
    """Tell whether a JSON value has the form of a Llama call: a name and parameters (or
    arguments)."""
    if not isinstance(value, dict):
        return False
    return "name" in value and ("parameters" in value or "arguments" in value)


def _json_call(text: str, position: int) -> tuple[list[ParsedCall], int]:
    """Read the call at `position`, one JSON object: return ([the call], the position after it).
    Raises Malformed if no such object stands there."""
    value, position = json_value(text, position)
    return [call_from_json(value)], position


def _json_list(text: str, position: int) -> tuple[list[ParsedCall], int]:
    """Read the calls at `position`: a list of JSON objects, or one object.

    Returns (the calls, the position after them). Raises Malformed if a call cannot be read or the
    list is empty.
    """
    value, position = json_value(text, position)
    values = value if isinstance(value, list) else [value]
    if not values:
        raise Malformed("a list of no calls")
    return [call_from_json(item) for item in values], position


def _json_list_and_mark(text: str, position: int) -> tuple[list[ParsedCall], int]:
    """Read the calls at `position` (a list of JSON objects, or one object) and the closing mark.

    The mark may be missing. Returns (the calls, the position after them and the mark). Raises
    Malformed if a call cannot be read.
    """
    calls, position = _json_list(text, position)
    closing = "<|/tool_call|>"
    next_at = skip_space(text, position)
    if text.startswith(closing, next_at):
        position = next_at + len(closing)
    return calls, position


def _mistral_body(text: str, position: int) -> tuple[list[ParsedCall], int]:
    """Read Mistral's calls at `position`: a list of objects, or one `name[ARGS]{...}`.

    Returns (the calls, the position after them). Raises Malformed if neither can be read there.
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
    """Read the optional id of a call at `position`, such as `[CALL_ID]abc`.

    Returns (the id, the position after it), or ("", `position`) if there is no `[CALL_ID]`. Raises
    Malformed if the mark is there but no id follows.
    """
    if not text.startswith("[CALL_ID]", position):
        return "", position
    id_match = _NAME.match(text, position + len("[CALL_ID]"))
    if not id_match:
        raise Malformed(f"no id after [CALL_ID]: {shown(text[position:])}")
    return id_match.group(1), id_match.end()


def _deepseek_body(text: str, position: int) -> tuple[list[ParsedCall], int]:
    """Read DeepSeek's call at `position`: return ([the call], the position after it).

    V3 and R1 write a type, the separator, a name and fenced arguments; V3.1 writes a name, the
    separator and arguments. Raises Malformed if neither form can be read.
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
    """Read a name at `position` and its arguments, which are JSON in a fence of three backticks.

    Returns ([the call], the position after it). Raises Malformed if the name, the fence or the JSON
    is missing or damaged.
    """
    name_match = _NAME.match(text, position)
    fence = _DEEPSEEK_FENCE.match(text, name_match.end()) if name_match else None
    if not name_match or not fence:
        raise Malformed(f"no name with arguments in {shown(text[position:])}")
    name = name_match.group(1)
    value, position = json_value(text, fence.end())
    call = ParsedCall(name, arguments_from(value, name))
    return [call], skip_mark(text, position, "```")
