"""Checks whether a call names a tool that exists, with arguments that fit the tool's schema."""

from collections.abc import Sequence
from typing import Any

from engine.models.dialects.reading import ParsedCall
from envs.json_schema import schema_errors
from envs.json_types import JsonObject, ToolSchema

_SHOWN_TOOLS = 8  # how many of the existing tools a message names
_FAULT_CHARS = 200  # the longest message


def fault_of(call: ParsedCall, tools: Sequence[ToolSchema]) -> str | None:
    """Explain why a call is invalid: its tool does not exist, or an argument breaks the tool's
    schema. Returns None if the call is valid.

    A schema with a keyword that `envs/json_schema.py` does not know is not checked. Neither is any
    `pattern`: the environment's author wrote that regular expression, and matching it might never
    end.
    """
    functions = _functions_by_name(tools)
    function = functions.get(call.name)
    if function is None:
        names = ", ".join(list(functions)[:_SHOWN_TOOLS])
        return f"there is no tool {call.name[:_FAULT_CHARS]!r}; there are: {names}"
    schema = function.get("parameters")
    if not isinstance(schema, dict):
        return None
    try:
        errors = schema_errors(call.arguments, _without_patterns(schema), call.name)
    except Exception:  # noqa: BLE001  the schema is the environment's and may be anything
        return None
    return errors[0][:_FAULT_CHARS] if errors else None


def _functions_by_name(tools: Sequence[ToolSchema]) -> JsonObject:
    """Return the `function` of each tool (name, description, schema of the parameters), by tool
    name."""
    return {
        str(tool["function"].get("name")): tool["function"]
        for tool in tools
        if isinstance(tool.get("function"), dict)
    }


def _without_patterns(schema: Any) -> Any:
    """Copy a JSON schema, or a part of one, without its `pattern`s (regular expressions for
    strings)."""
    if isinstance(schema, dict):
        return {
            key: _without_patterns(value)
            for key, value in schema.items()
            # A pattern is text; under "pattern" there may also be the schema of a property.
            if not (key == "pattern" and isinstance(value, str))
        }
    if isinstance(schema, list):
        return [_without_patterns(item) for item in schema]
    return schema
