"""Conversations as a reader can take them in: clean turns within a number of characters."""

from collections.abc import Mapping, Sequence
from typing import Any

from engine.clean import Redactor, clip
from engine.evidence.results import content_of

Turn = dict[str, str]
_LEAST_PER_TURN = 60


def turns_of(redact: Redactor, messages: Any) -> list[Turn]:
    """{"role", "content"} of each message, cleaned and redacted, tool calls written out."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list):
        return []
    return [
        {"role": str(turn.get("role", "")), "content": redact.text(content_of(turn))}
        for turn in messages
        if isinstance(turn, Mapping)
    ]


def length_of(turns: Sequence[Turn]) -> int:
    """Characters of all contents."""
    return sum(len(turn["content"]) for turn in turns)


def within(turns: Sequence[Turn], chars: int) -> list[Turn]:
    """The turns in at most about `chars`: long ones cut, and of very many the middle left out."""
    most = max(2, chars // _LEAST_PER_TURN)
    shown = list(turns)
    if len(shown) > most:
        tail = most // 2
        note = {"role": "note", "content": f"[{len(shown) - most} messages left out]"}
        shown = [*shown[: most - tail], note, *shown[len(shown) - tail :]]
    if length_of(shown) <= chars:
        return shown
    cap = _fair_share([len(turn["content"]) for turn in shown], chars)
    return [turn | {"content": clip(turn["content"], cap)} for turn in shown]


def _fair_share(lengths: Sequence[int], total: int) -> int:
    """The cap at which these lengths, each cut at the cap, add up to `total`."""
    rest = total
    for done, length in enumerate(sorted(lengths)):
        share = rest // (len(lengths) - done)
        if length > share:
            return max(share, 20)
        rest -= length
    return max(lengths, default=0)
