"""All dialects, and which of them a model writes.

The chat template decides, never the name of a model: it is asked to write a conversation with a
tool call, and the first dialect that reads the same call back is the model's. Where a template
refuses such a conversation, or leaves calls out, the marks in its source decide.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.errors import UserError
from engine.models import reasoning
from engine.models.chat_format import ChatFormat, TemplateError
from engine.models.dialects import (
    channels,
    gemma_calls,
    json_calls,
    python_calls,
    tagged_calls,
)
from engine.models.dialects.arguments import fault_of
from engine.models.dialects.reading import Found, FoundCall, Reader
from envs.json_types import ChatMessage, JsonObject, ToolSchema


@dataclass(frozen=True)
class Dialect:
    """How a family of models writes tool calls.

    Attributes:
        name: of the dialect.
        calls: reads them.
        marks: strings of which a template of this family has one in its source; () where the
            dialect has no marks of its own.
        thoughts: finds reasoning in a reply; None where tags stand around it.
        short_ids: whether an id of a call must have nine letters and digits.
    """

    name: str
    calls: Reader
    marks: tuple[str, ...] = ()
    thoughts: reasoning.ThoughtReader | None = None
    short_ids: bool = False


HERMES = Dialect("hermes", json_calls.hermes)
# Those without marks of their own come last.
DIALECTS = (
    Dialect("harmony", channels.harmony, ("<|channel|>commentary",), channels.HARMONY_THOUGHTS),
    Dialect("muse", channels.muse, ("<atem:",), channels.MUSE_THOUGHTS),
    Dialect("qwen_tags", tagged_calls.qwen_tags, ("<function=",)),
    Dialect("glm", tagged_calls.glm, ("<arg_key>",)),
    HERMES,
    Dialect("gemma", gemma_calls.gemma, ("<|tool_call>",)),
    Dialect("deepseek", json_calls.deepseek, ("<｜tool▁call▁begin｜>",)),
    Dialect("mistral", json_calls.mistral, ("[TOOL_CALLS]",), short_ids=True),
    Dialect("phi", json_calls.phi, ("<|tool_call|>", "<|tool|>")),
    Dialect("lfm", python_calls.lfm, ("<|tool_call_start|>", "<|tool_list_start|>")),
    Dialect("llama", json_calls.llama, ("<|python_tag|>",)),
    Dialect("pythonic", python_calls.pythonic, ("<|python_start|>",)),
)
_BEGINS_SOMETHING = re.compile(r"[<\[{]")  # a mark, a list or an object
_QUESTION = "What is the weather?"
_CALL = FoundCall("get_weather", {"city": "Bern", "days": 3})
_TOOL: ToolSchema = {
    "type": "function",
    "function": {
        "name": _CALL.name,
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Its name."},
                "days": {"type": "integer", "description": "How many."},
            },
            "required": ["city"],
        },
    },
}


@dataclass(frozen=True)
class Reply:
    """What a model said in one turn.

    Attributes:
        message: role, content, and where there are any reasoning_content and tool_calls.
        invalid_calls: why a tool call is invalid, one text each: it cannot be read, names no tool
            that there is, or has arguments that break the tool's schema.
    """

    message: ChatMessage
    invalid_calls: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReplyReader:
    """Reads the replies of one model.

    Attributes:
        dialect: of its tool calls.
        thoughts: finds reasoning in a reply.
    """

    dialect: Dialect
    thoughts: reasoning.ThoughtReader

    def read(self, text: str, tools: Sequence[ToolSchema]) -> Reply:
        """Turn the text of a completion into an assistant message.

        - `reasoning_content`: the reasoning; missing where there is none.
        - `tool_calls`: the calls in OpenAI's form, `arguments` as an object; only with `tools`.
        - `content`: the rest. If one call cannot be read, all stay there as they were written, and
          the environment sees them.
        """
        message: ChatMessage = {"role": "assistant", "content": text}
        thought, rest = self.thoughts.take_off(text)
        if thought is not None:
            message["reasoning_content"] = thought
        found = self.dialect.calls(rest, tools)
        if found.faults or (found.calls and not tools):
            message["content"] = rest
        else:
            message["content"] = found.content
        if not tools:
            return Reply(message)
        if found.calls and not found.faults:
            message["tool_calls"] = [
                self._as_openai(call, number) for number, call in enumerate(found.calls, start=1)
            ]
        faults = [fault_of(call, tools) for call in found.calls]
        return Reply(message, (*found.faults, *(fault for fault in faults if fault)))

    def certain(self, text: str, tools: Sequence[ToolSchema]) -> str:
        """The beginning of an unfinished reply that is content whatever follows.

        With `tools`, or where a reply has channels, it ends before the first character that may
        begin a call or a thought. Without them it is all of the text: tags of thoughts stay in it.
        """
        if self.dialect.thoughts is not None:
            return ""
        return _BEGINS_SOMETHING.split(text, maxsplit=1)[0] if tools else text

    def _as_openai(self, call: FoundCall, number: int) -> JsonObject:
        """A call in OpenAI's form; its id is the model's own, or made of its number."""
        made = f"call{number:05}" if self.dialect.short_ids else f"call_{number}"
        return {
            "id": call.id or made,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }


def reader_of(chat: ChatFormat) -> ReplyReader:
    """The reader of the replies that a model with this chat template writes."""
    source = chat.tool_template or chat.template
    by_tags = reasoning.tagged_thoughts(reasoning.tags_of(chat.template + chat.tool_template))
    written = _written_calls(chat)
    for dialect in DIALECTS:
        thoughts = dialect.thoughts or by_tags
        if any(_reads(dialect.calls(thoughts.take_off(text)[1], [_TOOL])) for text in written):
            if dialect is HERMES and "<tool_call>" not in source:
                break  # we wrote this call, as the template writes none: its marks say more
            return ReplyReader(dialect, thoughts)
    for dialect in DIALECTS:
        if any(mark in source for mark in dialect.marks):
            return ReplyReader(dialect, dialect.thoughts or by_tags)
    return ReplyReader(HERMES, by_tags)


def _reads(found: Found) -> bool:
    """Whether the call that was written was read, and nothing else."""
    said = [(call.name, call.arguments) for call in found.calls]
    return said == [(_CALL.name, _CALL.arguments)] and not found.faults


def _written_calls(chat: ChatFormat) -> list[str]:
    """How the template writes the call, in each form of it that it takes."""
    arguments = (_CALL.arguments, json.dumps(_CALL.arguments))
    return [
        text
        for each in arguments
        if (text := _written(chat, {"name": _CALL.name, "arguments": each})) is not None
    ]


def _written(chat: ChatFormat, function: JsonObject) -> str | None:
    """The assistant turn with one call, up to its end; None where the template refuses it."""
    user: ChatMessage = {"role": "user", "content": _QUESTION}
    call = {"id": "call00001", "type": "function", "function": function}
    turn: ChatMessage = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        prompt = chat.text([user], [_TOOL], prompt=True)
        closed = chat.text([user, turn], [_TOOL], prompt=False)
    except (TemplateError, UserError):
        return None
    if closed.startswith(prompt):
        written = closed[len(prompt) :]
    else:
        written = closed.rpartition(_QUESTION)[2]
    ends = [written.rfind(stop) for stop in chat.stop_texts if stop in written]
    return written[: max(ends)] if ends else written
