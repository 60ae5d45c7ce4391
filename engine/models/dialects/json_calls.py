"""Tool calls as JSON: Hermes, Mistral, Llama 3, DeepSeek, Phi-4."""

import re
from collections.abc import Sequence

from engine.models.dialects.python_calls import python_calls
from engine.models.dialects.reading import (
    Found,
    FoundCall,
    Malformed,
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


def hermes(text: str, _tools: Sequence[ToolSchema]) -> Found:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen2.5, Qwen3."""
    return between_marks(text, "<tool_call>", "</tool_call>", _json_call)


def phi(text: str, _tools: Sequence[ToolSchema]) -> Found:
    """`<|tool_call|>` and a call or a list of calls, then `<|/tool_call|>` (Phi-4-mini) or nothing
    (Granite 3)."""
    return between_marks(text, "<|tool_call|>", "", _json_list_and_mark)


def mistral(text: str, _tools: Sequence[ToolSchema]) -> Found:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]name[ARGS]{...}` once for
    each call, with `[CALL_ID]id` in between in some versions."""
    return between_marks(text, "[TOOL_CALLS]", "", _mistral_body)


def deepseek(text: str, _tools: Sequence[ToolSchema]) -> Found:
    """`<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, a line feed and the arguments in a
    fence of JSON (V3, R1), or `name<｜tool▁sep｜>{...}` (V3.1), then `<｜tool▁call▁end｜>`."""
    found = between_marks(text, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", _deepseek_body)
    if not found.calls and not found.faults:
        return found
    content = found.content
    for mark in ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"):
        content = content.replace(mark, "")
    return Found(content.strip(), found.calls, found.faults)


def llama(text: str, tools: Sequence[ToolSchema]) -> Found:
    """The whole reply is `{"name": ..., "parameters": {...}}`, or several with ";" between them,
    after `<|python_tag|>` or without it: Llama 3.1 to 3.3. Tools that the model has built in are
    written `<|python_tag|>name.call(a=1)`.

    A reply of other JSON is an answer, not a call.
    """
    tagged = text.lstrip().startswith(PYTHON_TAG)
    body = text.lstrip().removeprefix(PYTHON_TAG) if tagged else text
    if not body.lstrip().startswith("{"):
        return python_calls(body.strip(), text) if tagged else Found(text)
    if not tagged and '"name"' not in body:
        return Found(text)
    calls: list[FoundCall] = []
    at = 0
    try:
        while True:
            value, at = json_value(body, at)
            if not tagged and not _is_call(value):
                return Found(text)
            calls.append(call_from_json(value))
            at = skip_space(body, at)
            if at == len(body):
                return Found("", tuple(calls))
            at = skip_mark(body, at, ";") if body[at] == ";" else at
            if skip_space(body, at) == len(body):
                return Found("", tuple(calls))
    except Malformed as fault:
        return Found(text, (), (str(fault),))


def _is_call(value: object) -> bool:
    """Whether a JSON value has the form of a call of Llama's."""
    return (
        isinstance(value, dict) and "name" in value and bool({"parameters", "arguments"} & {*value})
    )


def _json_call(text: str, at: int) -> tuple[list[FoundCall], int]:
    """One object."""
    value, at = json_value(text, at)
    return [call_from_json(value)], at


def _json_list(text: str, at: int) -> tuple[list[FoundCall], int]:
    """A list of objects, or one object."""
    value, at = json_value(text, at)
    values = value if isinstance(value, list) else [value]
    if not values:
        raise Malformed("a list of no calls")
    return [call_from_json(each) for each in values], at


def _json_list_and_mark(text: str, at: int) -> tuple[list[FoundCall], int]:
    """A list of objects or one, and the closing mark if it is there."""
    calls, at = _json_list(text, at)
    closing = "<|/tool_call|>"
    after = skip_space(text, at)
    return calls, after + len(closing) if text.startswith(closing, after) else at


def _mistral_body(text: str, at: int) -> tuple[list[FoundCall], int]:
    """A list of objects, or a name and an object."""
    at = skip_space(text, at)
    if text[at : at + 1] in ("[", "{"):
        return _json_list(text, at)
    named = _NAME.match(text, at)
    if not named:
        raise Malformed(f"a list of calls or a name should follow, not {shown(text[at:])}")
    at, identity = named.end(), ""
    if text.startswith("[CALL_ID]", at):
        numbered = _NAME.match(text, at + len("[CALL_ID]"))
        if not numbered:
            raise Malformed(f"no id after [CALL_ID]: {shown(text[at:])}")
        at, identity = numbered.end(), numbered.group(1)
    if text.startswith("[ARGS]", at):
        at += len("[ARGS]")
    value, at = json_value(text, at)
    return [FoundCall(named.group(1), arguments_from(value, named.group(1)), identity)], at


def _deepseek_body(text: str, at: int) -> tuple[list[FoundCall], int]:
    """A type, a name and fenced arguments; or a name and arguments."""
    separator = text.find("<｜tool▁sep｜>", at)
    if separator < 0:
        raise Malformed(f"no <｜tool▁sep｜> in {shown(text[at:])}")
    name = text[at:separator].strip()
    at = separator + len("<｜tool▁sep｜>")
    fenced = not text.startswith("{", skip_space(text, at))
    if fenced:
        named = _NAME.match(text, at)
        fence = _DEEPSEEK_FENCE.match(text, named.end()) if named else None
        if not named or not fence:
            raise Malformed(f"no name with arguments in {shown(text[at:])}")
        name, at = named.group(1), fence.end()
    value, at = json_value(text, at)
    call = FoundCall(name, arguments_from(value, name))
    return [call], skip_mark(text, at, "```") if fenced else at
