"""All dialects (the forms in which model families write tool calls), and how to tell which one a
model writes.

A model's dialect follows from its chat template, never from its name. The template is asked to
write a conversation with a tool call, and the first dialect that reads the same call back is the
model's. If the template refuses such a conversation or leaves calls out, the special strings in its
source decide.
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
from engine.models.dialects.reading import ParsedCall, Reader
from envs.json_types import ChatMessage, JsonObject, ToolSchema


@dataclass(frozen=True)
class Dialect:
    """How a family of models writes tool calls.

    Attributes:
        name: the name of the dialect.
        calls: the function that reads the tool calls of a reply.
        marks: strings that give the dialect away: a chat template whose source has one of them
            writes this dialect. () if the dialect has no such string.
        thoughts: finds the reasoning in a reply. None if reasoning simply stands between tags,
            such as <think> and </think>.
        short_ids: whether the id of a call must have exactly nine letters and digits.
    """

    name: str
    calls: Reader
    marks: tuple[str, ...] = ()
    thoughts: reasoning.ThoughtReader | None = None
    short_ids: bool = False


HERMES = Dialect("hermes", json_calls.hermes)
# The order matters: the first dialect that fits is taken. HERMES is also the fallback.
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
_MAY_BEGIN_CALL_OR_THOUGHT = re.compile(r"[<\[{]")  # a mark, a list or an object
_QUESTION = "What is the weather?"
_CALL = ParsedCall("get_weather", {"city": "Bern", "days": 3})
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
    """What a model wrote in one turn.

    Attributes:
        message: the reply as a chat message: role and content, and reasoning_content and tool_calls
            if the reply has some.
        invalid_calls: one text for each invalid tool call, saying why: the call cannot be read,
            names a tool that does not exist, or has arguments that break the tool's schema.
    """

    message: ChatMessage
    invalid_calls: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReplyReader:
    """Reads the replies of one model.

    Attributes:
        dialect: the form in which the model writes tool calls.
        thoughts: finds the reasoning in a reply.
    """

    dialect: Dialect
    thoughts: reasoning.ThoughtReader

    def read(self, text: str, tools: Sequence[ToolSchema]) -> Reply:
        """Turn the text of a completion into an assistant message.

        The reasoning becomes `reasoning_content`, the tool calls become `tool_calls` in OpenAI's
        form, and the rest becomes `content`. Calls are taken out of the content only if `tools` is
        not empty and every call can be read. The reply also lists what is wrong with the calls.
        """
        thought, text_without_thought = self.thoughts.take_off(text)
        parsed = self.dialect.calls(text_without_thought, tools)
        # If one call cannot be read, all stay in the content, where the environment sees them; so
        # do calls in a conversation without tools.
        leaves_calls_in_content = parsed.faults or (parsed.calls and not tools)
        content = text_without_thought if leaves_calls_in_content else parsed.content
        message: ChatMessage = {"role": "assistant", "content": content}
        if thought is not None:
            message["reasoning_content"] = thought
        if not tools:
            return Reply(message)
        if parsed.calls and not parsed.faults:
            message["tool_calls"] = [
                self._as_openai(call, number) for number, call in enumerate(parsed.calls, start=1)
            ]
        return Reply(message, (*parsed.faults, *_argument_faults(parsed.calls, tools)))

    def certain(self, text: str, tools: Sequence[ToolSchema]) -> str:
        """Return the beginning of an unfinished reply that is content whatever follows, for
        streaming.

        With `tools`, this is the text before the first character that may begin a call or a
        thought; without `tools`, it is the whole text, including tags of reasoning. In a dialect
        with channels (gpt-oss, Muse) it is "", since only the headers of a reply tell what is
        content.
        """
        if self.dialect.thoughts is not None:  # the dialects with channels
            return ""
        return _MAY_BEGIN_CALL_OR_THOUGHT.split(text, maxsplit=1)[0] if tools else text

    def _as_openai(self, call: ParsedCall, number: int) -> JsonObject:
        """Return a call in OpenAI's form. A call that the model gave no id gets one made of
        `number`, the call's place in the reply, counted from 1."""
        made_id = f"call{number:05}" if self.dialect.short_ids else f"call_{number}"
        return {
            "id": call.id or made_id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }


def _argument_faults(calls: Sequence[ParsedCall], tools: Sequence[ToolSchema]) -> list[str]:
    """Explain which of the calls, all of them readable, are invalid: one text for each call that
    names no existing tool or breaks the tool's schema."""
    faults = [fault_of(call, tools) for call in calls]
    return [fault for fault in faults if fault]


def reader_of(chat: ChatFormat) -> ReplyReader:
    """Return the reader for the replies of a model with this chat template.

    Its dialect is the first one that reads a call back which the template wrote. If there is none,
    it is the first dialect one of whose marks stands in the template's source; failing that,
    Hermes.
    """
    source = chat.tool_template or chat.template
    by_tags = reasoning.tagged_thoughts(reasoning.tags_of(chat.template + chat.tool_template))
    dialect = _first_that_reads(_written_turns(chat), by_tags)
    # Where the template writes no calls, `ChatFormat` writes them into the content, in Hermes'
    # form. So a call of that form tells nothing of the model unless the template has <tool_call>,
    # and its marks tell more.
    if dialect is None or (dialect is HERMES and "<tool_call>" not in source):
        dialect = _first_with_mark(source)
    return ReplyReader(dialect, dialect.thoughts or by_tags)


def _first_that_reads(turns: Sequence[str], by_tags: reasoning.ThoughtReader) -> Dialect | None:
    """Return the first dialect that reads the call `_CALL` back from one of these turns, or None.

    `by_tags` removes the reasoning from the turn if the dialect has no reasoning reader of its own.
    """
    for dialect in DIALECTS:
        thoughts = dialect.thoughts or by_tags
        if any(_reads_the_call(dialect, thoughts, turn) for turn in turns):
            return dialect
    return None


def _first_with_mark(source: str) -> Dialect:
    """Return the first dialect with a mark in `source` (the text of a chat template), or else
    Hermes."""
    for dialect in DIALECTS:
        if any(mark in source for mark in dialect.marks):
            return dialect
    return HERMES


def _reads_the_call(dialect: Dialect, thoughts: reasoning.ThoughtReader, turn: str) -> bool:
    """Tell whether a dialect reads exactly the call `_CALL`, and no other, from an assistant's
    turn. `thoughts` removes the reasoning from the turn first."""
    _thought, text_without_thought = thoughts.take_off(turn)
    parsed = dialect.calls(text_without_thought, [_TOOL])
    calls = [(call.name, call.arguments) for call in parsed.calls]
    return calls == [(_CALL.name, _CALL.arguments)] and not parsed.faults


def _written_turns(chat: ChatFormat) -> list[str]:
    """Have the chat template write the assistant's turn that makes the call `_CALL`.

    The turn is written twice, with the arguments given as an object and as JSON text, because some
    templates accept only one of these forms. Forms that the template refuses are left out.
    """
    object_form = {"name": _CALL.name, "arguments": _CALL.arguments}
    text_form = {"name": _CALL.name, "arguments": json.dumps(_CALL.arguments)}
    turns = [_written_turn(chat, object_form), _written_turn(chat, text_form)]
    return [turn for turn in turns if turn is not None]


def _written_turn(chat: ChatFormat, function: JsonObject) -> str | None:
    """Return the assistant's turn with one call, as the chat template writes it.

    `function` holds the name and the arguments of the call. The token that ends the turn is cut
    off. Returns None if the template refuses the conversation.
    """
    question: ChatMessage = {"role": "user", "content": _QUESTION}
    call = {"id": "call00001", "type": "function", "function": function}
    message: ChatMessage = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        prompt = chat.text([question], [_TOOL], prompt=True)
        whole = chat.text([question, message], [_TOOL], prompt=False)
    except (TemplateError, UserError):
        return None
    if whole.startswith(prompt):
        return _up_to_last(whole[len(prompt) :], chat.stop_texts)
    # The template opens a finished turn in another way than the prompt does, so here the turn is
    # what follows the question.
    return _up_to_last(whole.rpartition(_QUESTION)[2], chat.stop_texts)


def _up_to_last(text: str, stops: Sequence[str]) -> str:
    """Return the text up to the last occurrence of any of the `stops`, or all of it if none
    occurs."""
    stop_positions = [text.rfind(stop) for stop in stops if stop in text]
    return text[: max(stop_positions)] if stop_positions else text
