"""The texts by which all tasks of an environment say what to do: the system message, and what each
tool says of itself. They can be read, and others put in their place."""

from collections.abc import Iterable, Mapping

from envs.json_types import ChatMessage, TaskRow, ToolSchema
from envs.tool_schemas import tools_of

SYSTEM = "system"  # the name of the system message among the texts
_TOOL = "tool "  # before the name of a tool
Texts = Mapping[str, str]


def texts_of(
    tasks: Iterable[TaskRow], env_tools: list[ToolSchema], *, with_tools: bool
) -> dict[str, str]:
    """Return the instruction texts that all tasks share, by name.

    The names are "system" for the system message ("" if no task has one) and "tool NAME" for the
    description of each tool. A text that differs from task to task is left out.

    Args:
        env_tools: the tools of the environment, for tasks without tools of their own.
        with_tools: whether descriptions of tools are returned too.
    """
    systems: set[str] = set()
    descriptions: dict[str, set[str]] = {}  # name of a text -> its different versions
    for task in tasks:
        systems.add(system_of(task["prompt"]))
        tools = tools_of(task, env_tools) if with_tools else []
        for tool in tools:
            function = tool.get("function", tool)  # a tool is a function, or wraps one
            text = str(function.get("description") or "")
            descriptions.setdefault(f"{_TOOL}{function.get('name', '')}", set()).add(text)
    shared = {SYSTEM: systems.pop()} if len(systems) == 1 else {}
    return shared | {name: texts.pop() for name, texts in descriptions.items() if len(texts) == 1}


def system_of(prompt: list[ChatMessage]) -> str:
    """Return the text of the system message that a prompt begins with; "" if there is none."""
    if not prompt or prompt[0]["role"] != "system":
        return ""
    return str(prompt[0]["content"])


def prompt_with(prompt: list[ChatMessage], texts: Texts) -> list[ChatMessage]:
    """Return the prompt with the system message that `texts` has under "system".

    If that is "", the prompt has no system message. If `texts` lacks it, the prompt is returned
    unchanged.
    """
    if SYSTEM not in texts:
        return prompt
    has_system = bool(prompt) and prompt[0]["role"] == "system"
    other_messages = prompt[1:] if has_system else prompt
    text = texts[SYSTEM]
    if not text:
        return other_messages
    return [{"role": "system", "content": text}, *other_messages]


def tools_with(tools: list[ToolSchema], texts: Texts) -> list[ToolSchema]:
    """Return the tools with the descriptions that `texts` has under "tool NAME".

    A tool that `texts` lacks is unchanged. Names and parameters stay.
    """
    return [_tool_with(tool, texts) for tool in tools]


def _tool_with(tool: ToolSchema, texts: Texts) -> ToolSchema:
    """Return one tool with its description from `texts`; unchanged if `texts` has none for it.

    The tool's function may stand under the key "function" or be the whole schema.
    """
    function = tool.get("function", tool)
    text = texts.get(f"{_TOOL}{function.get('name', '')}")
    if text is None:
        return tool
    changed = {**function, "description": text}
    return {**tool, "function": changed} if "function" in tool else changed


def tool_descriptions(texts: Texts) -> dict[str, str]:
    """Return tool name -> description, for the descriptions of tools among the texts."""
    return {
        name.removeprefix(_TOOL): text for name, text in texts.items() if name.startswith(_TOOL)
    }


def as_texts(system: str | None, tools: Mapping[str, str]) -> dict[str, str]:
    """Return a system message and descriptions of tools as texts by name, as `texts_of` returns
    them.

    `system` None leaves the system message out, so that each task keeps its own. `tools` maps tool
    name -> description.
    """
    texts = {} if system is None else {SYSTEM: system}
    return texts | {f"{_TOOL}{name}": text for name, text in tools.items()}
