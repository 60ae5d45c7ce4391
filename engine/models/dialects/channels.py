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
        whole: its text with header and marks.
        channel: analysis, commentary, final; "" where the header names none.
        recipient: whom it is for; "" where the header names nobody.
        text: what it says.
        start: how many characters of the reply stand before `text`.
    """

    whole: str
    channel: str
    recipient: str
    text: str
    start: int


def harmony(text: str, _tools: Sequence[ToolSchema]) -> Found:
    """`<|start|>assistant to=functions.name<|channel|>commentary json<|message|>{...}<|call|>`; the
    recipient may also stand after the channel. What is said in the other channels is content."""
    said: list[str] = []
    calls: list[FoundCall] = []
    faults: list[str] = []
    for part in _parts(text):
        if not part.recipient or part.recipient in ("user", "assistant"):
            said.append(part.text)
            continue
        name = part.recipient.removeprefix("functions.")
        try:
            value, at = json_value(part.text, 0)
            if skip_space(part.text, at) < len(part.text):
                raise Malformed(f"text after the arguments of {name}: {shown(part.text[at:])}")
            calls.append(FoundCall(name, arguments_from(value, name)))
        except Malformed as fault:
            faults.append(str(fault))
    return Found("\n".join(each for each in said if each), tuple(calls), tuple(faults))


def muse(text: str, tools: Sequence[ToolSchema]) -> Found:
    """` to=name<|message|><atem:function_calls><atem:invoke name="name">...`; what is for the user
    is content."""
    said: list[str] = []
    calls: list[FoundCall] = []
    faults: list[str] = []
    for part in _parts(text):
        at = part.text.find("<atem:invoke")
        if at < 0 and part.recipient in ("", "user"):
            said.append(part.text)
            continue
        try:
            calls += _atem_calls(part.text, max(at, 0), tools)
        except Malformed as fault:
            faults.append(str(fault))
    return Found("\n".join(each for each in said if each), tuple(calls), tuple(faults))


def _atem_calls(text: str, at: int, tools: Sequence[ToolSchema]) -> list[FoundCall]:
    """Every `<atem:invoke>` from `at` on. Raises Malformed."""
    calls: list[FoundCall] = []
    while at >= 0:
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
    end = 0  # of the part, in characters of the reply
    for whole in re.split(r"(?=<\|start\|>)", text):
        end += len(whole)
        if not whole.strip():
            continue
        header, mark, body = whole.partition("<|message|>")
        if not mark:
            header, body = "", whole.removeprefix("<|start|>assistant")
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        parts.append(
            _Part(
                whole=whole,
                channel=channel.group(1) if channel else "",
                recipient=recipient.group(1) if recipient else "",
                text=_END.split(body)[0],
                start=end - len(body),
            )
        )
    return parts


def _thoughts(is_thought: Callable[[_Part], bool]) -> ThoughtReader:
    """The reader of a family whose thoughts are messages of their own, those of `is_thought`. A
    thought that was cut is a thought as well; no prompt opens one."""

    def take_off(text: str) -> tuple[str | None, str]:
        parts = _parts(text)
        thoughts = [part.text.strip() for part in parts if is_thought(part)]
        rest = "".join(part.whole for part in parts if not is_thought(part))
        return ("\n".join(thoughts), rest) if thoughts else (None, text)

    def spans(text: str, _opened: bool) -> list[Span]:
        thoughts = [part for part in _parts(text) if is_thought(part)]
        return [(part.start, part.start + len(part.text)) for part in thoughts]

    return ThoughtReader(take_off, spans)


# The channel `analysis`; where it names a recipient, it is a call.
HARMONY_THOUGHTS = _thoughts(lambda part: part.channel == "analysis" and not part.recipient)
# What the model writes to itself.
MUSE_THOUGHTS = _thoughts(lambda part: part.recipient == "self")
