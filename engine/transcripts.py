"""Rollouts as a reader can take them in: clean texts within a number of characters."""

from collections.abc import Mapping, Sequence
from typing import Any

from engine.clean import Redactor, clip
from engine.curves import number, short
from engine.evidence.results import content_of

Turn = dict[str, str]
_LEAST_PER_TURN = 60
_MOST_TOKENS = 1500
_MOST_METRICS = 20


def rollout_item(
    redact: Redactor,
    row: Mapping[str, Any],
    chars: int,
    *,
    prompt: bool = True,
    tokens: bool = False,
) -> dict[str, Any]:
    """One rollout or evaluation row as a result shows it, its texts within `chars`.

    The prompt gives way to the answer, which keeps at least two thirds of the room.
    """
    item: dict[str, Any] = {"task": clip(redact.text(str(row.get("task"))), 120)}
    for name in ("group", "member", "attempt", "model", "half"):
        item[name] = redact.value(row.get(name))
    for name in ("reward", "success", "advantage", "loss"):
        item[name] = _plain(row.get(name))
    item |= {"stop_reason": row.get("stop_reason"), "length": row.get("tokens")}
    if row.get("metrics"):
        item["metrics"] = {
            clip(redact.text(str(name)), 60): _plain(value)
            for name, value in list(row["metrics"].items())[:_MOST_METRICS]
        }
    if row.get("error"):
        item["error"] = clip(redact.text(str(row["error"])), 400)
    asked = turns_of(redact, row.get("prompt"))
    said = turns_of(redact, row.get("messages"))
    if not said and row.get("completion") is not None:
        said = [{"role": "assistant", "content": redact.text(str(row["completion"]))}]
    if prompt and asked:
        room = max(chars - min(length_of(said), chars * 2 // 3), 40)
        item["prompt"] = within(asked, room)
        chars = max(chars - length_of(item["prompt"]), 40)
    if len(said) == 1:
        item["completion"] = clip(said[0]["content"], chars)
    elif said:
        item["turns"] = within(said, chars)
    if tokens:
        item["tokens"] = _tokens(row)
    return {name: value for name, value in item.items() if value is not None}


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


def _tokens(row: Mapping[str, Any]) -> dict[str, Any]:
    """Ids with their loss mask (1: trained). Training keeps them for the first groups only."""
    ids, mask = row.get("ids"), row.get("loss_mask")
    if not isinstance(ids, list) or not isinstance(mask, list):
        why = 'only the first groups of a training step keep theirs: where="group == 0"'
        return {"kept": False, "why": why}
    prompt = row.get("prompt_ids") or []
    kept = {
        "prompt_ids": prompt[-_MOST_TOKENS // 4 :],
        "ids": ids[:_MOST_TOKENS],
        "loss_mask": [int(bool(value)) for value in mask[:_MOST_TOKENS]],
    }
    cut = len(prompt) - len(kept["prompt_ids"]) + len(ids) - len(kept["ids"])
    return kept | ({"tokens_cut": cut} if cut else {})


def _plain(value: Any) -> Any:
    """A number in few digits; a word or a yes as it is; anything else as None."""
    if isinstance(value, bool | str):
        return value
    found = number(value)
    return found if found is None or isinstance(found, int) else short(found)
