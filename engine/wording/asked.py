"""What a model is shown of a task: its own words and tools, or those it was reworded to.

A reworded task is the task row with one more key, `asked`, whose `prompt` and `tools` a model is
shown. Everything else stays, so that the environment scores the answer for the task as it was.
"""

from envs.json_types import ChatMessage, TaskRow, ToolSchema
from envs.tool_schemas import tools_of

_ASKED = "asked"


def asked_prompt(task: TaskRow) -> list[ChatMessage]:
    """The messages that a model is shown: those in other words where the task was reworded, else
    the task's own prompt."""
    return task.get(_ASKED, task)["prompt"]


def asked_tools(task: TaskRow, env_tools: list[ToolSchema]) -> list[ToolSchema]:
    """The tools that a model is shown: those in other words where the task was reworded; else the
    task's own, or `env_tools` (the environment's) where it has none."""
    if _ASKED in task:
        return task[_ASKED]["tools"]
    return tools_of(task, env_tools)


def conversation(task: TaskRow) -> list[ChatMessage]:
    """The prompt that a model is shown, followed by the reference answer: the messages of the
    task's `gold` after its own prompt. The task must have `gold`."""
    messages_after_prompt = task["gold"][len(task["prompt"]) :]
    return [*asked_prompt(task), *messages_after_prompt]


def asked_otherwise(task: TaskRow, prompt: list[ChatMessage], tools: list[ToolSchema]) -> TaskRow:
    """A copy of the task that is shown to a model with `prompt` and `tools` instead of its own. It
    is still scored for its own prompt."""
    return {**task, _ASKED: {"prompt": prompt, "tools": tools}}
