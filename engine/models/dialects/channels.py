"""Replies of several messages, each in a channel: gpt-oss (Harmony) and Muse.

A completion begins inside the first message: the prompt ends with `<|start|>assistant`. A message
is a header, `<|message|>` and its text, up to one of the marks that end it.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.models.dialects.reading import (
    Found,
    FoundCall,
    Malformed,
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
class _Part:
    """One message of a reply.

    Attributes:
        source: the message as it was written, with header and marks.
        channel: analysis, commentary, final; "" where the header names none.
        recipient: whom it is for; "" where the header names nobody.
        text: what it says.
        start: how many characters of the reply stand before `text`.
    """

    source: str
    channel: str
    recipient: str
    text: str
    start: int


def harmony(text: str, _tools: Sequence[ToolSchema]) -> Found:
    """Calls as gpt-oss writes them:

    `<|start|>assistant to=functions.name<|channel|>commentary json<|message|>{...}<|call|>`

    The recipient (`to=`) may also stand after the channel. A message without a recipient, or to the
    user or the assistant, is content. No schema of a tool is needed to read such calls.
    """
    contents: list[str] = []
    calls: list[FoundCall] = []
    faults: list[str] = []
    for part in _parts(text):
        if not part.recipient or part.recipient in ("user", "assistant"):
            contents.append(part.text)
            continue
        try:
            calls.append(_call_of(part))
        except Malformed as fault:
            faults.append(str(fault))
    return Found("\n".join(each for each in contents if each), tuple(calls), tuple(faults))


def _call_of(part: _Part) -> FoundCall:
    """The call in a message to a function. Raises Malformed if the message holds anything but one
    JSON object of arguments."""
    name = part.recipient.removeprefix("functions.")
    value, end = json_value(part.text, at=0)
    if skip_space(part.text, end) < len(part.text):
        raise Malformed(f"text after the arguments of {name}: {shown(part.text[end:])}")
    return FoundCall(name, arguments_from(value, name))


def muse(text: str, tools: Sequence[ToolSchema]) -> Found:
    """Calls as Muse writes them:

    ` to=name<|message|><atem:function_calls><atem:invoke name="name">...`

    A message to the user, or to nobody, that holds no call is content.
    """
    contents: list[str] = []
    calls: list[FoundCall] = []
    faults: list[str] = []
    for part in _parts(text):
        first_call = part.text.find("<atem:invoke")
        if first_call < 0 and part.recipient in ("", "user"):
            contents.append(part.text)
            continue
        try:
            # A message to a tool without that mark (-1) is read from 0, which raises Malformed.
            calls += _atem_calls(part.text, max(first_call, 0), tools)
        except Malformed as fault:
            faults.append(str(fault))
    return Found("\n".join(each for each in contents if each), tuple(calls), tuple(faults))


def _atem_calls(text: str, at: int, tools: Sequence[ToolSchema]) -> list[FoundCall]:
    """The calls of a message of Muse, each between `<atem:invoke ...>` and `</atem:invoke>`. The
    first must begin at `at`. Raises Malformed."""
    calls: list[FoundCall] = []
    while at >= 0:  # -1 after the last one
        call, at = tagged_call(text, at, _ATEM_NAME, _ATEM_ARGUMENT, tools)
        at = skip_space(text, at)
        if not text.startswith("</atem:invoke>", at):
            raise Malformed(f"</atem:invoke> should follow, not {shown(text[at:])}")
        calls.append(call)
        at = text.find("<atem:invoke", at)
    return calls


def _parts(text: str) -> list[_Part]:
    """The messages of a reply. Text without a header is a message of its own."""
    parts = []
    end = 0  # where the current part ends, in characters of the reply
    for source in re.split(r"(?=<\|start\|>)", text):
        end += len(source)
        if not source.strip():
            continue
        header, mark, body = source.partition("<|message|>")
        if not mark:  # without the mark there is no header, and all is the message's text
            header = ""
            body = source.removeprefix("<|start|>assistant")
        parts.append(
            _Part(
                source=source,
                channel=_first_group(_CHANNEL, header),
                recipient=_first_group(_RECIPIENT, header),
                text=_END.split(body)[0],
                start=end - len(body),
            )
        )
    return parts


def _first_group(pattern: re.Pattern[str], text: str) -> str:
    """What group 1 of the pattern finds first in the text; "" if it finds nothing."""
    match = pattern.search(text)
    return match.group(1) if match else ""


def _thought_reader(is_thought: Callable[[_Part], bool]) -> ThoughtReader:
    """The reader of thoughts for a family that writes them as messages of their own.

    `is_thought` says whether a message is a thought. A thought that was cut short counts as well.
    No prompt of such a family opens a thought, so `_opened` (whether it did) is ignored.
    """

    def take_off(text: str) -> tuple[str | None, str]:
        """Split a reply into (its thoughts, the text of its other messages); (None, the whole
        reply) if it has no thoughts."""
        parts = _parts(text)
        thoughts = [part.text.strip() for part in parts if is_thought(part)]
        rest = "".join(part.source for part in parts if not is_thought(part))
        return ("\n".join(thoughts), rest) if thoughts else (None, text)

    def spans(text: str, _opened: bool) -> list[Span]:
        """(start, end) of each thought in a reply, in characters."""
        thoughts = [part for part in _parts(text) if is_thought(part)]
        return [(part.start, part.start + len(part.text)) for part in thoughts]

    return ThoughtReader(take_off, spans)


# The channel `analysis`; where it names a recipient, it is a call.
HARMONY_THOUGHTS = _thought_reader(lambda part: part.channel == "analysis" and not part.recipient)
# What the model writes to itself.
MUSE_THOUGHTS = _thought_reader(lambda part: part.recipient == "self")
