"""What a model is shown of a task: its own words and tools, or those it was reworded to.

A reworded task is the task row with one more key, `asked`, whose `prompt` and `tools` a model is
shown. Everything else stays, so that the environment scores the answer for the task as it was.
"""

from envs.json_types import ChatMessage, TaskRow, ToolSchema
from envs.tool_schemas import tools_of

_ASKED = "asked"


def asked_prompt(task: TaskRow) -> list[ChatMessage]:
    """The messages that a model is asked with."""
    return task.get(_ASKED, task)["prompt"]


def asked_tools(task: TaskRow, env_tools: list[ToolSchema]) -> list[ToolSchema]:
    """The tools that a model is shown; `env_tools` are those of the environment."""
    if _ASKED in task:
        return task[_ASKED]["tools"]
    return tools_of(task, env_tools)


def conversation(task: TaskRow) -> list[ChatMessage]:
    """The whole reference conversation (`gold`) of a task that has an answer, after the prompt that
    a model is asked with."""
    return [*asked_prompt(task), *task["gold"][len(task["prompt"]) :]]


def asked_otherwise(task: TaskRow, prompt: list[ChatMessage], tools: list[ToolSchema]) -> TaskRow:
    """The task, shown to a model with this prompt and these tools."""
    return {**task, _ASKED: {"prompt": prompt, "tools": tools}}
