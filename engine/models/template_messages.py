"""Messages in the form that a chat template takes.

Templates differ in what they know: some write no tools, some drop tool calls or refuse the role
`tool`, some read the arguments of a call as an object and others as text. `abilities` finds out by
rendering short conversations, and `adapt` writes what a template does not know into the messages
themselves, in the form that most models were trained on: tools in the system message, calls as JSON
between <tool_call> and </tool_call>, results in a message of the user. So a template without tools
(Gemma 3, Phi-3) trains on tools too.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.models.reasoning import THINK
from envs.json_types import ChatMessage, ToolSchema

# The text of a conversation: messages, tools, whether the opening of the next turn follows.
# Raises whatever the template raises.
Render = Callable[[Sequence[ChatMessage], Sequence[ToolSchema], bool], str]

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_TOOLS_TEXT = """\
# Tools

You may call the functions described here, one JSON object per line:
<tools>
{schemas}
</tools>

To call one, write its name and its arguments as JSON between these tags:
<tool_call>
{{"name": <name>, "arguments": <object>}}
</tool_call>"""
# No template writes these by itself.
_LISTED, _CALLED, _VALUE, _RESULT, _RULE = "zqlisted", "zqcalled", "zqvalue", "zqresult", "zqrule"


@dataclass(frozen=True)
class Abilities:
    """What a chat template writes of a conversation with tools.

    Attributes:
        lists_tools: the schemas of the tools.
        writes_calls: the calls of an assistant message.
        writes_results: messages of the role `tool`.
        takes_system: messages of the role `system`.
        text_arguments: it reads the arguments of a call as JSON text, not as an object.
    """

    lists_tools: bool
    writes_calls: bool
    writes_results: bool
    takes_system: bool
    text_arguments: bool


def abilities(render: Render) -> Abilities:
    """Find out what a template writes, by rendering short conversations with it.

    Each holds a word that no template writes by itself; the text has it if the template writes the
    part where it stands.
    """
    tools = [_listed_tool()]
    question: ChatMessage = {"role": "user", "content": "?"}
    answer: ChatMessage = {"role": "assistant", "content": "!"}
    result: ChatMessage = {
        "role": "tool",
        "content": _RESULT,
        "name": _CALLED,
        "tool_call_id": "call00001",
    }

    def writes(
        word: str, messages: Sequence[ChatMessage], with_tools: Sequence[ToolSchema] = ()
    ) -> bool:
        try:
            return word in render(messages, with_tools, True)
        except Exception:  # noqa: BLE001  a template is code from a model repository
            return False

    object_call = _call(_CALLED, {"a": _VALUE})
    text_call = _call(_CALLED, json.dumps({"a": _VALUE}))
    # Some templates refuse a call without its result, others the role `tool`.
    takes_object = writes(_VALUE, [question, object_call, result], tools) or writes(
        _VALUE, [question, object_call], tools
    )
    takes_text = writes(_VALUE, [question, text_call], tools)
    before_result = answer
    if takes_object:
        before_result = object_call
    elif takes_text:
        before_result = text_call
    return Abilities(
        lists_tools=writes(_LISTED, [question], tools),
        writes_calls=takes_object or takes_text,
        writes_results=writes(_RESULT, [question, before_result, result], tools),
        takes_system=writes(_RULE, [{"role": "system", "content": _RULE}, question]),
        text_arguments=takes_text and not takes_object,
    )


def _listed_tool() -> ToolSchema:
    """A tool whose name no template writes by itself, with one parameter."""
    parameters = {"type": "object", "properties": {"a": {"type": "string", "description": "a"}}}
    function = {"name": _LISTED, "description": "what it does", "parameters": parameters}
    return {"type": "function", "function": function}


def needs_abilities(messages: Sequence[ChatMessage], tools: Sequence[ToolSchema]) -> bool:
    """Whether a conversation holds anything that not every template writes."""
    return bool(tools) or any(
        message.get("tool_calls") or message.get("role") == "tool" for message in messages
    )


def adapt(
    messages: Sequence[ChatMessage], tools: Sequence[ToolSchema], can: Abilities
) -> tuple[list[ChatMessage], list[ToolSchema]]:
    """The conversation as a template of these abilities can write it: (messages, tools).

    What the template writes by itself is left to it; the rest becomes text of the messages. The
    messages passed in are not changed.
    """
    adapted: list[ChatMessage] = []
    # The last message holds a tool's result as text of the user. Some templates refuse two messages
    # of the user in a row, so a message of the user that follows is joined to it.
    joins_next = False
    for message in messages:
        message = _with_calls(message, can)
        becomes_text = message["role"] == "tool" and not can.writes_results
        if becomes_text:
            text = f"<tool_response>\n{_text(message)}\n</tool_response>"
            message = {"role": "user", "content": text}
        if joins_next and message["role"] == "user":
            adapted[-1] = {**adapted[-1], "content": f"{adapted[-1]['content']}\n{_text(message)}"}
            continue
        joins_next = becomes_text
        adapted.append(message)
    if not tools or can.lists_tools:
        return adapted, list(tools)
    return _with_tools(adapted, tools, can), []


def clean(message: ChatMessage) -> ChatMessage:
    """A copy of `message` in the form that transformers passes to a template.

    Keys with the value None are left out, because templates test whether a key is there. Reasoning
    is given as "thinking" and as "reasoning_content", the two names that templates look for.
    """
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[key] for key in _REASONING_FIELDS if key in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def split_reasoning(message: ChatMessage) -> ChatMessage:
    """A copy of an assistant's message with its reasoning in `reasoning_content` alone, and without
    that field where there is none.

    Reasoning is a field of the message, or the text before </think> in its content.
    """
    rest = {key: value for key, value in message.items() if key not in _REASONING_FIELDS}
    reasoning = next((message[key] for key in _REASONING_FIELDS if message.get(key)), "")
    content = message.get("content")
    if not reasoning and isinstance(content, str) and THINK.closing in content:
        thought, _, answer = content.partition(THINK.closing)
        reasoning = thought.strip().removeprefix(THINK.opening)
        rest["content"] = answer.lstrip("\n")
    if isinstance(reasoning, str) and reasoning.strip():
        rest["reasoning_content"] = reasoning.strip()
    return rest


def without_reasoning(message: ChatMessage) -> ChatMessage:
    """A copy of a message of `split_reasoning` without the field."""
    return {key: value for key, value in message.items() if key != "reasoning_content"}


def has_reasoning(messages: Sequence[ChatMessage]) -> bool:
    """Whether there are assistant messages, and all of them have reasoning."""
    answers = [message for message in messages if message["role"] == "assistant"]
    return bool(answers) and all("reasoning_content" in split_reasoning(each) for each in answers)


def _call(name: str, arguments: object) -> ChatMessage:
    """An assistant's message that calls one function and says nothing."""
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00001", "type": "function", "function": function}],
    }


def _with_calls(message: ChatMessage, can: Abilities) -> ChatMessage:
    """The message with its tool calls in the form that the template reads: with arguments as object
    or text, or in the content where the template writes no calls."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    if can.writes_calls:
        return {**message, "tool_calls": [_with_arguments(call, can) for call in calls]}
    lines = []
    if content := _text(message):
        lines.append(content)
    for call in calls:
        function = call.get("function", call)  # a call may come without the object around it
        json_call = {"name": function["name"], "arguments": _arguments(function)}
        lines.append(f"<tool_call>\n{json.dumps(json_call, ensure_ascii=False)}\n</tool_call>")
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(lines)}


def _with_arguments(call: ChatMessage, can: Abilities) -> ChatMessage:
    """A tool call with its arguments as an object, or as JSON text where the template reads that.
    Text that is no JSON object stays as it is."""
    function = call.get("function", call)
    arguments = _arguments(function)
    if can.text_arguments and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    changed = {**function, "arguments": arguments}
    return {**call, "function": changed} if "function" in call else changed


def _arguments(function: ChatMessage) -> object:
    """The arguments of a call as an object, {} where it has none; as they stand where they are no
    JSON object."""
    arguments = function.get("arguments")
    if arguments in (None, ""):
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):  # no JSON, or nested too deep
        return arguments
    return value if isinstance(value, dict) else arguments


def _with_tools(
    messages: list[ChatMessage], tools: Sequence[ToolSchema], can: Abilities
) -> list[ChatMessage]:
    """The conversation with the tools described in its first message: the system's, a new one, or
    the user's where the template has no system messages."""
    schemas = "\n".join(
        json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools
    )
    text = _TOOLS_TEXT.format(schemas=schemas)
    if not messages:
        return messages
    first = messages[0]
    if first["role"] == "system":
        return [{**first, "content": f"{_text(first)}\n\n{text}"}, *messages[1:]]
    if can.takes_system:
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": f"{text}\n\n{_text(first)}"}, *messages[1:]]


def _text(message: ChatMessage) -> str:
    """The content of a message: "" where it has none, as JSON where it is no text."""
    content = message.get("content")
    if content is None:
        return ""
    return content if isinstance(content, str) else json.dumps(content)
