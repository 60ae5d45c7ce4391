"""Rewrites messages into the form that a chat template can write.

Templates differ in what they know: some write no tools, some drop tool calls or refuse the role
`tool`, some read the arguments of a call as an object and others as text. `abilities` finds this
out by rendering short conversations. `adapt` writes what a template does not know into the messages
themselves, in the form that most models were trained on: tools in the system message, calls as JSON
between <tool_call> and </tool_call>, results in a user message. So a model whose template knows no
tools (Gemma 3, Phi-3) can train with tools too.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.models.reasoning import THINK
from envs.json_types import ChatMessage, ToolSchema

# Renders a conversation with a chat template: (messages, tools, whether the opening of the next
# turn is added) -> text. Raises whatever the template raises.
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
# Words for trial conversations, which no template writes unless a message contains them.
_LISTED, _CALLED, _VALUE, _RESULT, _RULE = "zqlisted", "zqcalled", "zqvalue", "zqresult", "zqrule"
_CALL_ID = "call00001"  # nine letters and digits, which Mistral's templates demand


@dataclass(frozen=True)
class Abilities:
    """Which parts of a conversation with tools a chat template writes by itself.

    Attributes:
        lists_tools: it writes the schemas of the tools.
        writes_calls: it writes the calls of an assistant message.
        writes_results: it writes messages of the role `tool`.
        takes_system: it writes messages of the role `system`.
        text_arguments: it reads the arguments of a call as JSON text, not as an object.
    """

    lists_tools: bool
    writes_calls: bool
    writes_results: bool
    takes_system: bool
    text_arguments: bool


def abilities(render: Render) -> Abilities:
    """Find out which parts of a conversation with tools a template writes, by rendering short ones.

    Each part (the tool, its call, its result) contains a word of its own that no template writes by
    itself. If the rendered text has the word, the template writes the part.
    """
    trial = _Trial(render)
    question: ChatMessage = {"role": "user", "content": "?"}
    result = _result(_CALLED, _RESULT)
    object_call = _call(_CALLED, {"a": _VALUE})
    text_call = _call(_CALLED, json.dumps({"a": _VALUE}))
    # Tried with and without the call's result: some templates refuse a call without a result,
    # others refuse the role `tool`, which a result has.
    takes_object = trial.writes(_VALUE, question, object_call, result) or trial.writes(
        _VALUE, question, object_call
    )
    takes_text = trial.writes(_VALUE, question, text_call)
    before_result: ChatMessage = {"role": "assistant", "content": "!"}
    if takes_object:
        before_result = object_call
    elif takes_text:
        before_result = text_call
    return Abilities(
        lists_tools=trial.writes(_LISTED, question),
        writes_calls=takes_object or takes_text,
        writes_results=trial.writes(_RESULT, question, before_result, result),
        takes_system=trial.takes_system(question),
        text_arguments=takes_text and not takes_object,
    )


@dataclass(frozen=True)
class _Trial:
    """Renders short conversations with a template, to find out which parts it writes."""

    render: Render

    def writes(self, word: str, *messages: ChatMessage) -> bool:
        """Tell whether the template writes `word`, which is in the `messages` or names the listed
        tool."""
        return self._is_in_text(word, list(messages), [_listed_tool()])

    def takes_system(self, question: ChatMessage) -> bool:
        """Tell whether the template writes a system message before `question`, in a chat without
        tools."""
        rule: ChatMessage = {"role": "system", "content": _RULE}
        return self._is_in_text(_RULE, [rule, question], tools=[])

    def _is_in_text(
        self, word: str, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema]
    ) -> bool:
        """Tell whether the rendered conversation contains `word`. False if the template refuses
        it."""
        try:
            text = self.render(messages, tools, True)  # True: the opening of a next turn follows
        except Exception:  # noqa: BLE001  a template is code from a model repository
            return False
        return word in text


def _listed_tool() -> ToolSchema:
    """Make a tool with one parameter and with a name that no template writes by itself."""
    parameters = {"type": "object", "properties": {"a": {"type": "string", "description": "a"}}}
    function = {"name": _LISTED, "description": "what it does", "parameters": parameters}
    return {"type": "function", "function": function}


def needs_abilities(messages: Sequence[ChatMessage], tools: Sequence[ToolSchema]) -> bool:
    """Tell whether a conversation has tools, calls or results, which not every template writes."""
    return bool(tools) or any(
        message.get("tool_calls") or message.get("role") == "tool" for message in messages
    )


def adapt(
    messages: Sequence[ChatMessage], tools: Sequence[ToolSchema], can: Abilities
) -> tuple[list[ChatMessage], list[ToolSchema]]:
    """Return the conversation as (messages, tools) in a form that a template of these abilities
    writes.

    What the template writes by itself stays as it is; the rest becomes text in the messages. The
    given messages are not changed.
    """
    adapted: list[ChatMessage] = []
    # Whether the last message is a tool's result that became a user message. Some templates refuse
    # two user messages in a row, so a user message that follows is joined to it.
    joins_next = False
    for message in messages:
        message = _with_calls(message, can)
        becomes_text = message["role"] == "tool" and not can.writes_results
        if becomes_text:
            message = _result_as_text(message)
        if joins_next and message["role"] == "user":
            adapted[-1] = _joined_messages(adapted[-1], message)
            continue
        joins_next = becomes_text
        adapted.append(message)
    if not tools or can.lists_tools:
        return adapted, list(tools)
    return _with_tools(adapted, tools, can), []


def _result_as_text(message: ChatMessage) -> ChatMessage:
    """Turn the result of a tool into a user message."""
    return {"role": "user", "content": f"<tool_response>\n{_text(message)}\n</tool_response>"}


def _joined_messages(first: ChatMessage, second: ChatMessage) -> ChatMessage:
    """Return the message `first` with the text of `second` appended to its own."""
    return {**first, "content": f"{first['content']}\n{_text(second)}"}


def clean(message: ChatMessage) -> ChatMessage:
    """Copy `message` into the form that transformers passes to a template.

    Keys with the value None are left out, because templates test whether a key exists. Reasoning is
    given both as "thinking" and as "reasoning_content", the two names that templates look for.
    """
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[key] for key in _REASONING_FIELDS if key in message), None)
    if reasoning is None:
        return message
    # The message's own "thinking" overrides the copy. Its own "reasoning_content" is not lost
    # either: as the first of the fields it is what `reasoning` was taken from.
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def split_reasoning(message: ChatMessage) -> ChatMessage:
    """Copy an assistant message so that its reasoning stands in `reasoning_content` only.

    The reasoning is the first non-empty one of `_REASONING_FIELDS`, or else the content before
    </think>. Without any reasoning the copy lacks the field.
    """
    copy = {key: value for key, value in message.items() if key not in _REASONING_FIELDS}
    reasoning = next((message[key] for key in _REASONING_FIELDS if message.get(key)), "")
    content = message.get("content")
    if not reasoning and isinstance(content, str) and THINK.closing in content:
        thought, _, answer = content.partition(THINK.closing)
        reasoning = thought.strip().removeprefix(THINK.opening)
        copy["content"] = answer.lstrip("\n")
    if isinstance(reasoning, str) and reasoning.strip():
        copy["reasoning_content"] = reasoning.strip()
    return copy


def without_reasoning(message: ChatMessage) -> ChatMessage:
    """Copy a message without its `reasoning_content`, the only reasoning after
    `split_reasoning`."""
    return {key: value for key, value in message.items() if key != "reasoning_content"}


def has_reasoning(messages: Sequence[ChatMessage]) -> bool:
    """Tell whether there are assistant messages and all of them have reasoning."""
    answers = [message for message in messages if message["role"] == "assistant"]
    return bool(answers) and all(
        "reasoning_content" in split_reasoning(answer) for answer in answers
    )


def _call(name: str, arguments: object) -> ChatMessage:
    """Make an assistant message without text that calls one function."""
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": _CALL_ID, "type": "function", "function": function}],
    }


def _result(name: str, content: str) -> ChatMessage:
    """Make the message with the result of the function called by the message that `_call` makes."""
    return {"role": "tool", "content": content, "name": name, "tool_call_id": _CALL_ID}


def _with_calls(message: ChatMessage, can: Abilities) -> ChatMessage:
    """Return the message with its tool calls in a form that a template of these abilities reads.

    They stay in `tool_calls`, with arguments in the template's form, or become text of the content
    if the template writes no calls.
    """
    calls = message.get("tool_calls")
    if not calls:
        return message
    if can.writes_calls:
        return {**message, "tool_calls": [_with_arguments(call, can) for call in calls]}
    content = _text(message)
    parts = [content] if content else []
    parts += [_call_as_text(call) for call in calls]
    without_calls = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**without_calls, "content": "\n".join(parts)}


def _call_as_text(call: ChatMessage) -> str:
    """Write a tool call as JSON between <tool_call> and </tool_call>."""
    function = call.get("function", call)  # a call may be the function itself
    json_call = {"name": function["name"], "arguments": _arguments(function)}
    return f"<tool_call>\n{json.dumps(json_call, ensure_ascii=False)}\n</tool_call>"


def _with_arguments(call: ChatMessage, can: Abilities) -> ChatMessage:
    """Return a tool call with its arguments in the form that a template of these abilities reads:
    an object, or JSON text. Text that is no JSON object stays unchanged."""
    # A call holds its function under the key "function", or is the function itself.
    function = call.get("function", call)
    arguments = _arguments(function)
    if can.text_arguments and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    new_function = {**function, "arguments": arguments}
    return {**call, "function": new_function} if "function" in call else new_function


def _arguments(function: ChatMessage) -> object:
    """Return the arguments of a call, parsed if they are the JSON text of an object; {} if it has
    none. Other arguments are returned unchanged."""
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
    """Return the conversation with the tools described in its first message.

    The description follows the text of a system message, or becomes a new system message. If the
    template takes no system message, it stands before the text of the first message. A conversation
    without messages stays empty.
    """
    functions = [tool.get("function", tool) for tool in tools]  # a tool may be the function itself
    schemas = "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)
    description = _TOOLS_TEXT.format(schemas=schemas)
    if not messages:
        return messages
    first = messages[0]
    if first["role"] == "system":
        return [{**first, "content": f"{_text(first)}\n\n{description}"}, *messages[1:]]
    if can.takes_system:
        return [{"role": "system", "content": description}, *messages]
    return [{**first, "content": f"{description}\n\n{_text(first)}"}, *messages[1:]]


def _text(message: ChatMessage) -> str:
    """Return the content of a message as text: "" if it is missing, JSON if it is not a string."""
    content = message.get("content")
    if content is None:
        return ""
    return content if isinstance(content, str) else json.dumps(content)
