"""What a model is shown of a task: the task's own words and tools, or reworded ones.

A reworded task is the task row with one more key, `asked`, which holds the `prompt` and `tools`
that a model is shown. Everything else stays, so that the environment scores the answer for the
original task.
"""

from envs.json_types import ChatMessage, TaskRow, ToolSchema
from envs.tool_schemas import tools_of

_ASKED = "asked"


def asked_prompt(task: TaskRow) -> list[ChatMessage]:
    """Return the messages that a model is shown: the reworded prompt if there is one, else the
    task's own."""
    return task.get(_ASKED, task)["prompt"]


def asked_tools(task: TaskRow, env_tools: list[ToolSchema]) -> list[ToolSchema]:
    """Return the tools that a model is shown: the reworded ones if there are any. Else they are the
    task's own, or `env_tools` (the environment's) if the task has none."""
    if _ASKED in task:
        return task[_ASKED]["tools"]
    return tools_of(task, env_tools)


def conversation(task: TaskRow) -> list[ChatMessage]:
    """Return the prompt that a model is shown, followed by the reference answer. That is the part
    of the task's `gold` after the task's own prompt. The task must have `gold`."""
    messages_after_prompt = task["gold"][len(task["prompt"]) :]
    return [*asked_prompt(task), *messages_after_prompt]


def asked_otherwise(task: TaskRow, prompt: list[ChatMessage], tools: list[ToolSchema]) -> TaskRow:
    """Copy the task so that a model is shown `prompt` and `tools` instead of the task's own. The
    copy is still scored for its own prompt."""
    return {**task, _ASKED: {"prompt": prompt, "tools": tools}}
