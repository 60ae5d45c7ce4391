"""The functions that a model may call on a task: its own, or else those of its environment.

Standard library only, as this runs on both sides of the pipe.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

from envs.json_types import TaskRow, ToolSchema

_SHOWN_CHARS = 120  # of a faulty schema, in a message


def tools_of(task: TaskRow, env_tools: list[ToolSchema]) -> list[ToolSchema]:
    """Return the tools of a task.

    They are those it was given ([] for none), those of its row in a data file (under `tools` in the
    metadata), or else `env_tools`, those of the environment.
    """
    task_tools = task.get("tools")
    if task_tools is not None:
        return task_tools
    row_tools: Any = (task.get("metadata") or {}).get("tools")
    return row_tools if _are_schemas(row_tools) else env_tools


def checked_tools(tools: Any) -> list[ToolSchema]:
    """Return `tools` as a list of function schemas.

    Raises ValueError for anything else, naming the first that is none.
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
    """Whether `value` is a list of schemas as rows of data files hold them, with the function's
    fields under `function` or directly in the schema. Other metadata may have that name too."""
    if not isinstance(value, list) or not value:
        return False
    for tool in value:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return False
    return True
