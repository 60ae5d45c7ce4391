"""Tool calls as tags with plain text between them: Qwen3-Coder, Qwen3.5 and Nemotron 3, GLM.

Texts have no quotes there, so a parameter's schema decides whether "75001" is a number.
"""

import re
from collections.abc import Mapping, Sequence

from engine.models.dialects.reading import (
    Found,
    FoundCall,
    Malformed,
    between_marks,
    parameters_of,
    shown,
    skip_mark,
    typed,
)
from envs.json_types import JsonObject, ToolSchema

_QWEN_NAME = re.compile(r"\s*<function=([^>\n]+)>")
_QWEN_ARGUMENT = re.compile(
    r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*<parameter=|\s*</function>)", re.DOTALL
)
_GLM_NAME = re.compile(r"\s*([^\s<]+)")
_GLM_ARGUMENT = re.compile(
    r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>(?=\s*<arg_key>|\s*</tool_call>)",
    re.DOTALL,
)


def qwen_tags(text: str, tools: Sequence[ToolSchema]) -> Found:
    """The calls of a reply, each in the form
    `<tool_call><function=name><parameter=a>1</parameter></function></tool_call>`."""

    def read_call(text: str, at: int) -> tuple[list[FoundCall], int]:
        call, at = tagged_call(text, at, _QWEN_NAME, _QWEN_ARGUMENT, tools)
        return [call], skip_mark(text, at, "</function>")

    return between_marks(text, "<tool_call>", "</tool_call>", read_call)


def glm(text: str, tools: Sequence[ToolSchema]) -> Found:
    """The calls of a reply, each in the form
    `<tool_call>name<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>`."""

    def read_call(text: str, at: int) -> tuple[list[FoundCall], int]:
        call, at = tagged_call(text, at, _GLM_NAME, _GLM_ARGUMENT, tools)
        return [call], at

    return between_marks(text, "<tool_call>", "</tool_call>", read_call)


def tagged_call(
    text: str,
    at: int,
    name_pattern: re.Pattern[str],
    argument_pattern: re.Pattern[str],
    tools: Sequence[ToolSchema],
) -> tuple[FoundCall, int]:
    """The call at `at`, whose arguments are tags, and the position after the last of them.

    Args:
        name_pattern: matches the name of the tool with its tag; its group 1 is the name.
        argument_pattern: matches one argument; its group 1 is the name, group 2 the value.
        tools: their schemas say what type a value has.

    Raises Malformed if no name stands at `at`.
    """
    name_match = name_pattern.match(text, at)
    if not name_match:
        raise Malformed(f"no name of a tool: {shown(text[at:])}")
    name = name_match.group(1).strip()
    schemas = parameters_of(tools, name)
    arguments, at = _arguments(text, name_match.end(), argument_pattern, schemas)
    return FoundCall(name, arguments), at


def _arguments(
    text: str, at: int, pattern: re.Pattern[str], schemas: Mapping[str, object]
) -> tuple[JsonObject, int]:
    """The arguments that stand one after the other from `at` on, and the position after the last.

    `pattern` matches one argument: its group 1 is the name, group 2 the value as text. `schemas`
    maps a name to the schema of its value, which tells the value's type.
    """
    arguments: JsonObject = {}
    while argument := pattern.match(text, at):
        key = argument.group(1).strip()
        arguments[key] = typed(argument.group(2), schemas.get(key))
        at = argument.end()
    return arguments, at
