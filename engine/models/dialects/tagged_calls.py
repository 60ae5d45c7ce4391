"""Reads tool calls written as tags with plain text between them: Qwen3-Coder, Qwen3.5 and Nemotron
3, GLM.

Strings have no quotes there, so a parameter's schema decides whether "75001" is a number.
"""

import re
from collections.abc import Mapping, Sequence

from engine.models.dialects.reading import (
    Malformed,
    ParsedCall,
    ParsedCalls,
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


def qwen_tags(text: str, tools: Sequence[ToolSchema]) -> ParsedCalls:
    """Read the calls of a reply, each in the form
    `<tool_call><function=name><parameter=a>1</parameter></function></tool_call>`."""

    def read_call(text: str, position: int) -> tuple[list[ParsedCall], int]:
        """Read the call at `position`: return ([the call], the position after `</function>`)."""
        call, position = tagged_call(text, position, _QWEN_NAME, _QWEN_ARGUMENT, tools)
        return [call], skip_mark(text, position, "</function>")

    return between_marks(text, "<tool_call>", "</tool_call>", read_call)


def glm(text: str, tools: Sequence[ToolSchema]) -> ParsedCalls:
    """Read the calls of a reply, each in the form
    `<tool_call>name<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>`."""

    def read_call(text: str, position: int) -> tuple[list[ParsedCall], int]:
        """Read the call at `position`: return ([the call], the position after its last
        argument)."""
        call, position = tagged_call(text, position, _GLM_NAME, _GLM_ARGUMENT, tools)
        return [call], position

    return between_marks(text, "<tool_call>", "</tool_call>", read_call)


def tagged_call(
    text: str,
    position: int,
    name_pattern: re.Pattern[str],
    argument_pattern: re.Pattern[str],
    tools: Sequence[ToolSchema],
) -> tuple[ParsedCall, int]:
    """Read the call at `position`, whose arguments are tags.

    Args:
        name_pattern: matches the tool's name with its tag; group 1 is the name.
        argument_pattern: matches one argument; group 1 is its name, group 2 its value.
        tools: the tools, whose schemas say which type a value has.

    Returns (the call, the position after its last argument). Raises Malformed if no name stands at
    `position`.
    """
    name_match = name_pattern.match(text, position)
    if not name_match:
        raise Malformed(f"no name of a tool: {shown(text[position:])}")
    name = name_match.group(1).strip()
    schemas = parameters_of(tools, name)
    arguments, position = _arguments(text, name_match.end(), argument_pattern, schemas)
    return ParsedCall(name, arguments), position


def _arguments(
    text: str, position: int, pattern: re.Pattern[str], schemas: Mapping[str, object]
) -> tuple[JsonObject, int]:
    """Read the arguments that follow one another from `position` on.

    `pattern` matches one argument: group 1 is its name, group 2 its value as text. `schemas` maps a
    name to the schema of its value, which gives the value's type. Returns (the arguments by name,
    the position after the last).
    """
    arguments: JsonObject = {}
    while argument := pattern.match(text, position):
        key = argument.group(1).strip()
        arguments[key] = typed(argument.group(2), schemas.get(key))
        position = argument.end()
    return arguments, position
