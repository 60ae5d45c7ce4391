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
    """The texts that all tasks share, by name: "system" ("" where no task has one), and with
    `with_tools` a "tool NAME" for each tool.

    A text that differs from task to task is left out. `env_tools` are the environment's.
    """
    systems: set[str] = set()
    descriptions: dict[str, set[str]] = {}
    for task in tasks:
        systems.add(system_of(task["prompt"]))
        tools = tools_of(task, env_tools) if with_tools else []
        for tool in tools:
            function = tool.get("function", tool)
            text = str(function.get("description") or "")
            descriptions.setdefault(f"{_TOOL}{function.get('name', '')}", set()).add(text)
    shared = {SYSTEM: systems.pop()} if len(systems) == 1 else {}
    return shared | {name: texts.pop() for name, texts in descriptions.items() if len(texts) == 1}


def system_of(prompt: list[ChatMessage]) -> str:
    """The text of the system message that a prompt begins with; "" without one."""
    if not prompt or prompt[0]["role"] != "system":
        return ""
    return str(prompt[0]["content"])


def prompt_with(prompt: list[ChatMessage], texts: Texts) -> list[ChatMessage]:
    """The prompt with the system message of `texts`: none for "", its own where they have none."""
    if SYSTEM not in texts:
        return prompt
    has_system = bool(prompt) and prompt[0]["role"] == "system"
    others = prompt[1:] if has_system else prompt
    text = texts[SYSTEM]
    if not text:
        return others
    return [{"role": "system", "content": text}, *others]


def tools_with(tools: list[ToolSchema], texts: Texts) -> list[ToolSchema]:
    """The tools with the descriptions of `texts`; names and parameters stay."""
    return [_tool_with(tool, texts) for tool in tools]


def _tool_with(tool: ToolSchema, texts: Texts) -> ToolSchema:
    """One tool, whose function may stand under the key "function" or be the whole schema."""
    function = tool.get("function", tool)
    text = texts.get(f"{_TOOL}{function.get('name', '')}")
    if text is None:
        return tool
    changed = {**function, "description": text}
    return {**tool, "function": changed} if "function" in tool else changed


def tool_descriptions(texts: Texts) -> dict[str, str]:
    """The descriptions of tools among the texts, by the name of the tool."""
    return {
        name.removeprefix(_TOOL): text for name, text in texts.items() if name.startswith(_TOOL)
    }


def as_texts(system: str | None, tools: Mapping[str, str]) -> dict[str, str]:
    """Texts by their names here, of a system message (None: each task's own) and of tools."""
    texts = {} if system is None else {SYSTEM: system}
    return texts | {f"{_TOOL}{name}": text for name, text in tools.items()}
