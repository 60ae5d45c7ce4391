"""Puts one task into other words, for one kind of change and one seed, by rules that hold for every
environment. The answer is scored for the original task, so no rule changes what the right answer
is."""

import random

from engine.core.wording.asked import asked_otherwise, asked_prompt, asked_tools
from engine.core.wording.frames import reframe_text
from engine.core.wording.kinds import Kind, Stock
from engine.core.wording.system_messages import with_other_system
from engine.core.wording.tool_texts import with_other_texts
from envs.json_types import ChatMessage, TaskRow, ToolSchema


def drawn(task: TaskRow, kind: Kind, seed: int, stock: Stock) -> random.Random:
    """Return the random generator that decides how a task is reworded.

    Its numbers are the same for the same task, kind of rewording, seed and stock of words.
    """
    return random.Random(f"{stock}-{kind}-{seed}-{task['id']}")


def reword(
    task: TaskRow, kind: Kind, env_tools: list[ToolSchema], seed: int, stock: Stock
) -> TaskRow | None:
    """Return a copy of the task in other words, which is still scored for the original task.

    Returns None if there is nothing to change: "tools" without tools, "wording" without a text of
    the user, and always "options", because only the environment knows which option is right
    (engine/core/wording/options.py).

    Args:
        kind: what is reworded: "wording", "system", "tools" or "options".
        env_tools: the tools of the environment, for tasks without tools of their own.
        stock: which words may be used: those for training, or those for the probe (the test of
            robustness).
    """
    rng = drawn(task, kind, seed, stock)
    prompt, tools = asked_prompt(task), asked_tools(task, env_tools)
    if kind == "wording":
        other_prompt = _with_other_frame(prompt, rng, stock)
        return None if other_prompt is None else asked_otherwise(task, other_prompt, tools)
    if kind == "system":
        return asked_otherwise(task, with_other_system(prompt, rng, stock), tools)
    if kind == "tools" and tools:
        return asked_otherwise(task, prompt, with_other_texts(tools, rng, stock))
    return None


def _with_other_frame(
    prompt: list[ChatMessage], rng: random.Random, stock: Stock
) -> list[ChatMessage] | None:
    """Return a copy of the prompt with other words around its last user message that has a text.

    Returns None if there is no such message. `stock` names the list of words; `reframe_text` says
    how the text changes.
    """
    for index in reversed(range(len(prompt))):
        message = prompt[index]
        text = str(message["content"])
        if message["role"] == "user" and text.strip():
            reworded = {**message, "content": reframe_text(text, rng, stock)}
            return [*prompt[:index], reworded, *prompt[index + 1 :]]
    return None
