"""Rollouts as a reader can take them in: clean texts within a number of characters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.core.errors import UserError
from engine.evidence.stats.results import content_of
from engine.home.sanitize import Redactor, clip, json_chars
from engine.models import tokens as tokenizers
from engine.records.lines.answer import Answer
from engine.records.lines.curves import short
from engine.records.lines.trajectory_record import TrajectoryRecord
from engine.records.run_config import RunConfig, TrainConfig
from envs.json_types import ChatMessage

Turn = dict[str, str]
Decode = Callable[[list[int]], str]
_LEAST_PER_TURN = 60
_MOST_TOKENS = 1500
_MOST_METRICS = 20


@dataclass(frozen=True)
class Texts:
    """How much of a row is shown.

    Attributes:
        chars: for the prompt and the answer together; the answer keeps at least two thirds.
        prompt: whether the prompt is shown.
        tokens: also the ids and their loss mask, and as texts where `decode` can read them.
    """

    chars: int
    prompt: bool = True
    tokens: bool = False
    decode: Decode | None = None


# Of a row what is shown as it is, where it has it, and what is shown in few digits.
_PLACE = ("step", "group", "member", "attempt", "model", "half")
_SCORES = ("reward", "success", "advantage", "loss")


def rollout_item(redact: Redactor, row: Answer, texts: Texts) -> dict[str, Any]:
    """One rollout or evaluation row as a result shows it."""
    item: dict[str, Any] = {"task": clip(redact.text(row.task), 120)}
    for name in _PLACE:
        item[name] = redact.value(getattr(row, name, None))
    for name in _SCORES:
        item[name] = _few_digits(getattr(row, name, None))
    item |= {"stop_reason": row.stop_reason, "length": length_in_tokens(row)}
    if row.metrics:
        item["metrics"] = {
            clip(redact.text(name), 60): _few_digits(value)
            for name, value in list(row.metrics.items())[:_MOST_METRICS]
        }
    if row.error:
        item["error"] = clip(redact.text(row.error), 400)
    asked = turns_of(redact, row.prompt)
    answer = turns_of(redact, row.messages)
    if not answer and row.completion is not None:
        answer = [{"role": "assistant", "content": redact.text(row.completion)}]
    chars = texts.chars
    if texts.prompt and asked:
        room = max(chars - min(length_of(answer), chars * 2 // 3), 40)
        item["prompt"] = within(asked, room)
        chars = max(chars - length_of(item["prompt"]), 40)
    if len(answer) == 1:
        item["completion"] = clip(answer[0]["content"], chars)
    elif answer:
        item["turns"] = within(answer, chars)
    if texts.tokens:
        item["tokens"] = _tokens(redact, row, texts.decode)
    return {name: value for name, value in item.items() if value is not None}


def length_in_tokens(row: Answer) -> int | None:
    """Tokens that the model wrote, None where the file does not say."""
    return row.tokens if "tokens" in row.model_fields_set else None


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


def turns_of(redact: Redactor, messages: str | Sequence[ChatMessage] | None) -> list[Turn]:
    """{"role", "content"} of each message, cleaned and redacted, tool calls written out."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return [
        {"role": str(turn.get("role", "")), "content": redact.text(content_of(turn))}
        for turn in messages or ()
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


def _tokens(redact: Redactor, row: Answer, decode: Decode | None) -> dict[str, object]:
    """Ids with their loss mask (1: trained). Training keeps them for the first groups only."""
    rollout = row if isinstance(row, TrajectoryRecord) else None
    if rollout is None or rollout.ids is None or rollout.loss_mask is None:
        why = 'only the first groups of a training step keep theirs: where="group == 0"'
        return {"kept": False, "why": why}
    prompt = rollout.prompt_ids or []
    prompt_ids = prompt[-_MOST_TOKENS // 4 :]
    ids = rollout.ids[:_MOST_TOKENS]
    mask = [int(bool(value)) for value in rollout.loss_mask[:_MOST_TOKENS]]
    shown: dict[str, object] = {"prompt_ids": prompt_ids, "ids": ids, "loss_mask": mask}
    if decode is not None:
        whole = [*prompt_ids, *ids]
        shown["pieces"] = pieces(redact, whole, [0] * len(prompt_ids) + mask, decode)
    cut = len(prompt) - len(prompt_ids) + len(rollout.ids) - len(ids)
    return shown | ({"tokens_cut": cut} if cut else {})


def _few_digits(value: float | bool | None) -> float | bool | None:
    """A number in few digits; a yes or no as it is."""
    return value if value is None or isinstance(value, bool) else short(value)
