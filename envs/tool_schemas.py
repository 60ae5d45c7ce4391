"""The functions that a model may call on a task: its own, or else those of its environment.

Standard library only, as this runs on both sides of the pipe.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

from envs.config.problem import EnvProblem
from envs.json_types import TaskRow, ToolSchema

_ENTRY = "environment.py"  # where an environment's tools stand
MAX_TOOLS_BYTES = 1 << 20  # of all tool schemas together, as JSON
_SHOWN_CHARS = 120  # how much of a faulty schema an error message shows


def tools_of(task: TaskRow, env_tools: list[ToolSchema]) -> list[ToolSchema]:
    """Return the function schemas of the tools that the model may call on a task.

    The first of these that exists: the task's own tools ([] means none), the `tools` in its
    metadata (from its row in a data file), the tools of the environment (`env_tools`).
    """
    task_tools = task.get("tools")
    if task_tools is not None:
        return task_tools
    row_tools: Any = (task.get("metadata") or {}).get("tools")
    return row_tools if _are_schemas(row_tools) else env_tools


def checked_tools(tools: Any) -> list[ToolSchema]:
    """Return `tools` as a list of OpenAI function schemas.

    Raises ValueError if `tools` is not a list, or for the first item that is not a function schema;
    the message names its position.
    """
    # A text or a dict can be iterated too, but is no list of schemas.
    if isinstance(tools, str | dict) or not isinstance(tools, Iterable):
        raise ValueError(f"a list of functions is needed, got {type(tools).__name__}")
    schemas = list(tools)
    for index, tool in enumerate(schemas):
        if not is_function_schema(tool):
            raise ValueError(f"tools[{index}] is no function schema: {str(tool)[:_SHOWN_CHARS]}")
    return schemas


def is_function_schema(tool: Any) -> bool:
    """Whether `tool` is an OpenAI function schema: {"function": {"name": ..., ...}, ...}."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _are_schemas(value: Any) -> TypeGuard[list[ToolSchema]]:
    """Whether `value` is a list of function schemas, at least one, as rows of data files hold them.

    The function's fields are under `function` or directly in the schema. The check is needed
    because other metadata may be called `tools` too.
    """
    if not isinstance(value, list) or not value:
        return False
    for tool in value:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return False
    return True


def check_tools(tools: Any) -> None:
    """Check that `tools` is a list of OpenAI function schemas that can be stored as JSON.

    Raises EnvProblem ENV_INVALID if it is not, or if all schemas together exceed MAX_TOOLS_BYTES.
    """
    size = 0  # of all schemas so far, as JSON, in bytes
    # A text or a dict can be iterated too, but is no list of schemas.
    if isinstance(tools, str | dict) or not isinstance(tools, Iterable):
        raise EnvProblem("ENV_INVALID", f"tools is a list of functions, got {type(tools).__name__}")
    for index, tool in enumerate(tools):
        _check_schema(tool, index)
        size += _json_size(tool, index)
        if size > MAX_TOOLS_BYTES:
            too_large = f"the schemas of tools take more than {MAX_TOOLS_BYTES >> 20} MB"
            raise EnvProblem("ENV_INVALID", too_large, "Describe them in less.", _ENTRY)


def _check_schema(tool: Any, index: int) -> None:
    """Raise EnvProblem ENV_INVALID unless `tool` is the schema of a function with a name.

    `index` is the position of `tool` in its list, for the error message.
    """
    if not is_function_schema(tool):
        raise EnvProblem(
            "ENV_INVALID",
            f"tools[{index}] is no function schema: {str(tool)[:_SHOWN_CHARS]}",
            hint='Write {"type": "function", "function": {"name": ..., "parameters": {...}}}.',
            file=_ENTRY,
        )


def _json_size(tool: Any, index: int) -> int:
    """Return how many bytes a tool's schema takes as JSON.

    Raises EnvProblem ENV_INVALID if the schema cannot be written as JSON; `index` is its position
    in the list, for the error message.
    """
    try:
        return len(json.dumps(tool, ensure_ascii=False, allow_nan=False).encode())
    except UnicodeEncodeError:
        message = f"a text of tools[{index}] has half of a surrogate pair in it"
        raise EnvProblem("ENV_INVALID", message, file=_ENTRY) from None
    # TypeError: no JSON type; ValueError: nan or a circle; RecursionError: nested too deep.
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvProblem(
            "ENV_INVALID", f"tools[{index}] is not JSON: {error}", file=_ENTRY
        ) from error
