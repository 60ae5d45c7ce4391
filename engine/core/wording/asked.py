"""What a model is shown of a task: the task's own words and tools, or reworded ones.

A reworded task is the task row with one more key, `asked`, which holds the `prompt` and `tools`
that a model is shown. Everything else stays, so that the environment scores the answer for the
original task.
"""

from envs.json_types import ChatMessage, TaskRow, ToolSchema
from envs.tool_schemas import tools_of

_ASKED = "asked"


def asked_prompt(task: TaskRow) -> list[ChatMessage]:
    """Return the messages that a model is shown of a task: its reworded prompt if it has one
    (under `_ASKED`), else its own prompt."""
    return task.get(_ASKED, task)["prompt"]


def asked_tools(task: TaskRow, env_tools: list[ToolSchema]) -> list[ToolSchema]:
    """Return the schemas of the tools that a model is shown with a task.

    They are the task's reworded tools, else its own tools, else `env_tools`, those of the
    environment.
    """
    if _ASKED in task:
        return task[_ASKED]["tools"]
    return tools_of(task, env_tools)


def conversation(task: TaskRow) -> list[ChatMessage]:
    """Return the prompt that a model is shown of a task, followed by the reference answer.

    The task must have `gold`: its own prompt with the reference answer as one conversation.
    """
    reference_answer = task["gold"][len(task["prompt"]) :]
    return [*asked_prompt(task), *reference_answer]


def asked_otherwise(task: TaskRow, prompt: list[ChatMessage], tools: list[ToolSchema]) -> TaskRow:
    """Return a copy of the task of which a model is shown `prompt` and `tools` instead of its own.

    The copy keeps its own prompt and tools too, for which an answer is scored.
    """
    return {**task, _ASKED: {"prompt": prompt, "tools": tools}}
