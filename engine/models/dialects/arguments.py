"""Whether a call names a tool that exists, with arguments that fit its schema."""

from collections.abc import Sequence
from typing import Any

from engine.models.dialects.reading import FoundCall
from envs.json_schema import schema_errors
from envs.json_types import ToolSchema

_NAMED = 8  # tools that a fault names
_CHARS = 200  # of a fault


def fault_of(call: FoundCall, tools: Sequence[ToolSchema]) -> str | None:
    """Why a call is invalid: no such tool, or the first argument that breaks its schema. None if it
    is valid.

    A schema that `envs/json_schema.py` does not know is not checked, nor is a `pattern`: it is the
    environment's, and may take for ever.
    """
    functions = {
        str(tool["function"].get("name")): tool["function"]
        for tool in tools
        if isinstance(tool.get("function"), dict)
    }
    function = functions.get(call.name)
    if function is None:
        names = ", ".join(list(functions)[:_NAMED])
        return f"there is no tool {call.name[:_CHARS]!r}; there are: {names}"
    schema = function.get("parameters")
    if not isinstance(schema, dict):
        return None
    try:
        errors = schema_errors(call.arguments, _without_patterns(schema), call.name)
    except Exception:  # noqa: BLE001  the schema is the environment's and may be anything
        return None
    return errors[0][:_CHARS] if errors else None


def _without_patterns(schema: Any) -> Any:
    """A schema without its patterns; a property of that name, whose schema is no text, stays."""
    if isinstance(schema, dict):
        return {
            key: _without_patterns(value)
            for key, value in schema.items()
            if not (key == "pattern" and isinstance(value, str))
        }
    return [_without_patterns(item) for item in schema] if isinstance(schema, list) else schema
