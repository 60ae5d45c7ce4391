"""Reads replies of several messages, each in a channel, as gpt-oss (Harmony) and Muse write them.

A message is a header, `<|message|>` and its text, up to one of the marks that end it. A completion
begins inside the header of its first message, because the prompt ends with `<|start|>assistant`.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.models.dialects.reading import (
    Malformed,
    ParsedCall,
    ParsedCalls,
    arguments_from,
    json_value,
    shown,
    skip_space,
)
from engine.models.dialects.tagged_calls import tagged_call
from engine.models.reasoning import Span, ThoughtReader
from envs.json_types import ToolSchema

_END = re.compile(r"<\|(?:end|return|call|eom|eot)\|>")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_ATEM_NAME = re.compile(r'\s*<atem:invoke name="([^"]+)">')
_ATEM_ARGUMENT = re.compile(
    r'\s*<atem:parameter name="([^"]+)">(.*?)</atem:parameter>'
    r"(?=\s*<atem:parameter|\s*</atem:invoke>)",
    re.DOTALL,
)


@dataclass(frozen=True)
class _Message:
    """One message of a reply.

    Attributes:
        source: the message as it was written, with header and marks.
        channel: the channel, such as "analysis", "commentary" or "final"; "" if the header names
            none.
        recipient: whom the message is for, such as "user" or "functions.search"; "" if the header
            names nobody.
        text: the text of the message.
        start: how many characters of the reply stand before `text`.
    """

    source: str
    channel: str
    recipient: str
    text: str
    start: int


def harmony(text: str, _unused_tools: Sequence[ToolSchema]) -> ParsedCalls:
    """Read the tool calls of a reply as gpt-oss writes them (its format is called Harmony), such as

    `<|start|>assistant to=functions.name<|channel|>commentary json<|message|>{...}<|call|>`

    The recipient (`to=`) may also stand after the channel. A message without a recipient, or to the
    user or the assistant, is content. A call that cannot be read becomes a fault. These calls can
    be read without the schemas of the tools.
    """
    contents: list[str] = []
    calls: list[ParsedCall] = []
    faults: list[str] = []
    for message in _messages(text):
        if not message.recipient or message.recipient in ("user", "assistant"):
            contents.append(message.text)
            continue
        try:
            calls.append(_call_of(message))
        except Malformed as fault:
            faults.append(str(fault))
    content = "\n".join(text for text in contents if text)
    return ParsedCalls(content, tuple(calls), tuple(faults))


def _call_of(message: _Message) -> ParsedCall:
    """Return the tool call in a message whose recipient is a function, such as `functions.search`.

    Raises Malformed if the message holds anything but one JSON object of arguments.
    """
    name = message.recipient.removeprefix("functions.")
    value, end = json_value(message.text, position=0)
    if skip_space(message.text, end) < len(message.text):
        raise Malformed(f"text after the arguments of {name}: {shown(message.text[end:])}")
    return ParsedCall(name, arguments_from(value, name))


def muse(text: str, tools: Sequence[ToolSchema]) -> ParsedCalls:
    """Read the tool calls of a reply as models of the family Muse write them, for example

    ` to=name<|message|><atem:function_calls><atem:invoke name="name">...`

    A message to the user, or without a recipient, is content if it holds no call. A call that
    cannot be read becomes a fault. The schemas of `tools` say which type an argument has.
    """
    contents: list[str] = []
    calls: list[ParsedCall] = []
    faults: list[str] = []
    for message in _messages(text):
        first_call = message.text.find("<atem:invoke")
        if first_call < 0 and message.recipient in ("", "user"):
            contents.append(message.text)
            continue
        try:
            # A message to a tool without that mark (-1) is read from 0, which raises Malformed.
            calls += _atem_calls(message.text, max(first_call, 0), tools)
        except Malformed as fault:
            faults.append(str(fault))
    content = "\n".join(text for text in contents if text)
    return ParsedCalls(content, tuple(calls), tuple(faults))


def _atem_calls(text: str, position: int, tools: Sequence[ToolSchema]) -> list[ParsedCall]:
    """Read the calls in a Muse message, each between `<atem:invoke ...>` and `</atem:invoke>`.

    The first call must begin at `position`. The schemas of `tools` say which type an argument has.
    Raises Malformed if a call cannot be read or has no closing tag.
    """
    calls: list[ParsedCall] = []
    while position >= 0:  # -1 after the last one
        call, position = tagged_call(text, position, _ATEM_NAME, _ATEM_ARGUMENT, tools)
        position = skip_space(text, position)
        if not text.startswith("</atem:invoke>", position):
            raise Malformed(f"</atem:invoke> should follow, not {shown(text[position:])}")
        calls.append(call)
        position = text.find("<atem:invoke", position)
    return calls


def _messages(text: str) -> list[_Message]:
    """Split a reply into its messages. Text without a header counts as a message of its own."""
    messages = []
    end = 0  # where the current message ends, in characters of the reply
    for source in re.split(r"(?=<\|start\|>)", text):
        end += len(source)
        if not source.strip():
            continue
        header, mark, body = source.partition("<|message|>")
        if not mark:  # without the mark there is no header, and all is the message's text
            header = ""
            body = source.removeprefix("<|start|>assistant")
        messages.append(
            _Message(
                source=source,
                channel=_first_group(_CHANNEL, header),
                recipient=_first_group(_RECIPIENT, header),
                text=_END.split(body)[0],
                start=end - len(body),
            )
        )
    return messages


def _first_group(pattern: re.Pattern[str], text: str) -> str:
    """Return what group 1 of the pattern matches first in the text, or "" if nothing matches."""
    match = pattern.search(text)
    return match.group(1) if match else ""


def _thought_reader(is_thought: Callable[[_Message], bool]) -> ThoughtReader:
    """Make the reader of reasoning for a family that writes each thought as a message of its own.

    `is_thought` tells whether a message is a thought. A thought that was cut short counts as well.
    """

    def take_off(text: str) -> tuple[str | None, str]:
        """Split a reply into (its thoughts, the text of its other messages). Returns (None, the
        whole reply) if it has no thoughts."""
        messages = _messages(text)
        thoughts = [message.text.strip() for message in messages if is_thought(message)]
        other_text = "".join(message.source for message in messages if not is_thought(message))
        return ("\n".join(thoughts), other_text) if thoughts else (None, text)

    def spans(text: str, _opened: bool) -> list[Span]:
        """Return (start, end) of each thought in a reply, in characters. `_opened` (whether the
        prompt opened a thought) is ignored: no prompt of these families does."""
        thoughts = [message for message in _messages(text) if is_thought(message)]
        return [(message.start, message.start + len(message.text)) for message in thoughts]

    return ThoughtReader(take_off, spans)


# A thought is a message in the channel `analysis`. With a recipient it is a tool call instead.
HARMONY_THOUGHTS = _thought_reader(lambda part: part.channel == "analysis" and not part.recipient)
# A thought is a message that the model writes to itself.
MUSE_THOUGHTS = _thought_reader(lambda part: part.recipient == "self")
