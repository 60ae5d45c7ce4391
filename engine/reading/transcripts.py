"""Rollouts as a reader can take them in: clean texts within a number of characters."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.core.errors import UserError
from engine.evidence.stats.results import content_of
from engine.home.curves import number, short
from engine.home.sanitize import Redactor, clip, json_chars
from engine.models import tokens as tokenizers
from engine.records.run_config import RunConfig, TrainConfig

Turn = dict[str, str]
Decode = Callable[[list[int]], str]
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
    decode: Decode | None = None,
) -> dict[str, Any]:
    """One rollout or evaluation row as a result shows it, its texts within `chars`.

    The prompt gives way to the answer, which keeps at least two thirds of the room. With `tokens`
    also the ids and their loss mask, and as texts where `decode` can read them.
    """
    item: dict[str, Any] = {"task": clip(redact.text(str(row.get("task"))), 120)}
    for name in ("step", "group", "member", "attempt", "model", "half"):
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
        item["tokens"] = _tokens(redact, row, decode)
    return {name: value for name, value in item.items() if value is not None}


def squeezed(item: dict[str, Any], chars: int) -> dict[str, Any]:
    """One rollout or group in at most `chars`: shorter texts, then fewer metrics and members."""
    for room in (600, 300, 150, 80):
        if json_chars(item) <= chars:
            return item
        item = _shortened(item, room)
    for holder in (item, *item.get("members", [])):
        if json_chars(item) > chars:
            holder.pop("metrics", None)
    members = item.get("members", [])
    while json_chars(item) > chars and len(members) > 1:
        over = json_chars(item) - chars
        gone = max(1, min(len(members) - 1, over * len(members) // json_chars(members)))
        del members[len(members) - gone :]
        item["members_left_out"] = item.get("members_left_out", 0) + gone
    return item


def _shortened(value: Any, room: int) -> Any:
    if isinstance(value, str):
        return clip(value, room)
    if isinstance(value, list):
        numbers = bool(value) and isinstance(value[0], int)
        return [_shortened(item, room) for item in (value[:room] if numbers else value)]
    if isinstance(value, dict):
        return {name: _shortened(item, room) for name, item in value.items()}
    return value


def decoder_of(config: RunConfig | None) -> Decode | None:
    """Ids as text by the base model's own tokenizer; None where its files are gone."""
    if not isinstance(config, TrainConfig):
        return None
    try:
        backend = tokenizers.load(Path(config.base.path)).backend
    except (UserError, OSError, ValueError):
        return None
    return lambda ids: str(backend.decode(ids, skip_special_tokens=False))


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


def pieces(
    redact: Redactor,
    ids: Sequence[int],
    mask: Sequence[int],
    decode: Decode,
    *,
    most: int = 24,
    chars: int = 300,
) -> list[dict[str, Any]]:
    """Stretches of tokens that are trained or not, in order, as {"text", "trained", "tokens"}; at
    most `most` of them, each text within `chars`."""
    found: list[dict[str, Any]] = []
    start = 0
    for at in range(1, len(ids) + 1):
        if at == len(ids) or bool(mask[at]) != bool(mask[start]):
            text = clip(redact.text(decode(list(ids[start:at]))), chars)
            found.append({"text": text, "trained": bool(mask[start]), "tokens": at - start})
            start = at
    if len(found) > most:
        gone = sum(piece["tokens"] for piece in found[most:])
        found = [*found[:most], {"text": "…", "trained": False, "tokens": gone}]
    return found


def _tokens(redact: Redactor, row: Mapping[str, Any], decode: Decode | None) -> dict[str, Any]:
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
    if decode is not None:
        whole = [*kept["prompt_ids"], *kept["ids"]]
        kept["pieces"] = pieces(
            redact, whole, [0] * len(kept["prompt_ids"]) + kept["loss_mask"], decode
        )
    return kept | ({"tokens_cut": cut} if cut else {})


def _plain(value: Any) -> Any:
    """A number in few digits; a word or a yes as it is; anything else as None."""
    if isinstance(value, bool | str):
        return value
    found = number(value)
    return found if found is None or isinstance(found, int) else short(found)
