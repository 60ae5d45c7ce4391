"""Which rows are held out: what the rows say, else a hash of their prompts. Never both sides."""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

HELDOUT_SHARE = 0.2  # of the rows, where the rows do not say a side
HELDOUT_LEAST = 50  # rows, or half of them where there are fewer than 100
REPEATED_FROM = 9  # a push warns if ten held-out rows have fewer different prompts than this
# What a row may call its side.
NAMES = {
    "train": "train",
    "training": "train",
    "heldout": "heldout",
    "held_out": "heldout",
    "held-out": "heldout",
    "test": "heldout",
    "eval": "heldout",
    "evaluation": "heldout",
    "validation": "heldout",
    "valid": "heldout",
    "val": "heldout",
    "dev": "heldout",
}


class UnknownSplit(ValueError):
    """A row names a split that is not in `NAMES`."""


@dataclass(frozen=True)
class Split:
    """The side of each row, in order, and what decided it."""

    sides: list[str]
    source: str  # "rows" (all name a side), "hash" (of the prompt; none does) or "mixed"
    warnings: list[str] = field(default_factory=list)


def split_rows(rows: Sequence[Mapping[str, Any]]) -> Split:
    """Decide for every row whether it is for training ("train") or held out ("heldout"). The result
    depends on the rows' content, not on their order.

    Rows with equal prompts get the same side: held out, if any of them names that side. Raises
    UnknownSplit where a row names a split that is not in `NAMES`.

    Args:
        rows: each with "id", "prompt" (messages) and, if it names a side, "split".
    """
    keys = [prompt_key(row["prompt"]) for row in rows]
    named_sides = [_named_side(row) for row in rows]
    side_of_prompt = _named_side_of_prompts(keys, named_sides)
    undecided_keys = [key for key in keys if key not in side_of_prompt]
    if "heldout" in named_sides:  # then rows that name no side are for training
        side_of_prompt |= dict.fromkeys(undecided_keys, "train")
    else:
        side_of_prompt |= _split_by_hash(undecided_keys)
    sides = [side_of_prompt[key] for key in keys]
    heldout_keys = [key for key, side in zip(keys, sides, strict=True) if side == "heldout"]
    warnings = [*_side_warnings(named_sides, sides), *_repetition_warning(heldout_keys)]
    return Split(sides, _source(named_sides), warnings)


def _side_warnings(named_sides: Sequence[str | None], sides: Sequence[str]) -> list[str]:
    """Warnings about rows that changed their side, and about a side without rows.

    Args:
        named_sides: the side that each row names; None where it names none.
        sides: the side that each row got, in the same order.
    """
    warnings: list[str] = []
    moved_count = sum(
        named == "train" and side == "heldout"
        for named, side in zip(named_sides, sides, strict=True)
    )
    if moved_count:
        warnings.append(
            f"{moved_count} training rows have the prompt of a held-out row and are held out with "
            "it"
        )
    if "heldout" not in sides:
        reason = "every row says train" if "train" in named_sides else "there are too few prompts"
        warnings.append(f"no row is held out ({reason}): no verdict can be given")
    if "train" not in sides:
        warnings.append("every row is held out: there is nothing to train on")
    return warnings


def _source(named_sides: Sequence[str | None]) -> str:
    """What decided the sides: "rows" if every row names one, "hash" if none does, else "mixed"."""
    unnamed_count = named_sides.count(None)
    if unnamed_count == len(named_sides):
        return "hash"
    return "mixed" if unnamed_count else "rows"


def _named_side_of_prompts(
    keys: Sequence[str], named_sides: Sequence[str | None]
) -> dict[str, str]:
    """The side that the rows of each prompt name, by prompt key. If they disagree, "heldout" wins.
    A prompt of which no row names a side is left out.

    Args:
        keys: the prompt key of each row.
        named_sides: the side that each row names, in the same order; None where it names none.
    """
    side_of_prompt: dict[str, str] = {}
    for key, side in zip(keys, named_sides, strict=True):
        if side == "heldout":  # a held-out prompt must never be trained on
            side_of_prompt[key] = "heldout"
        elif side == "train":
            side_of_prompt.setdefault(key, "train")
    return side_of_prompt


def _repetition_warning(heldout_keys: Sequence[str]) -> list[str]:
    """One warning if more than one in ten held-out rows repeats the prompt of another; else [].

    Args:
        heldout_keys: the prompt keys of the held-out rows.
    """
    distinct = len(set(heldout_keys))
    # In whole numbers: at least `REPEATED_FROM` different prompts for every ten rows.
    if distinct * 10 >= len(heldout_keys) * REPEATED_FROM:
        return []
    plural = "s" if distinct > 1 else ""
    return [
        f"{len(heldout_keys)} held-out rows, {distinct} different prompt{plural}: rows "
        "of one prompt are one question, and a verdict is worth no more than its questions; "
        "give the rows prompts of their own"
    ]


def prompt_key(prompt: Sequence[Mapping[str, Any]]) -> str:
    """A hash that is equal for equal prompts. White space around a message's text is ignored."""
    plain = [{**message, "content": str(message.get("content", "")).strip()} for message in prompt]
    text = json.dumps(plain, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(b"split:" + text.encode()).hexdigest()


def _named_side(row: Mapping[str, Any]) -> str | None:
    """The side that a row's "split" names, "train" or "heldout"; None where it names none. Raises
    UnknownSplit for a name that is not in `NAMES`."""
    name = row.get("split")
    if name is None or name == "":
        return None
    side = NAMES.get(str(name).strip().lower())
    if side is None:
        raise UnknownSplit(f"row {row['id']!r} names the split {name!r}")
    return side


def _split_by_hash(keys: Sequence[str]) -> dict[str, str]:
    """Choose a side for every prompt, so that about `HELDOUT_SHARE` of the rows are held out.
    Returns "train" or "heldout" by prompt key.

    Args:
        keys: the prompt key of every row; rows with the same prompt have equal keys.
    """
    row_counts = Counter(keys)
    sides = dict.fromkeys(row_counts, "train")
    if len(row_counts) < 2:  # holding out the only prompt would leave nothing to train on
        return sides
    wanted_rows = _wanted_heldout_rows(len(keys))
    heldout_rows = 0
    # The keys are hashes, so sorted they are in random order. A prompt whose rows would be too many
    # is passed over.
    for key in sorted(row_counts):
        if heldout_rows + row_counts[key] <= wanted_rows:
            sides[key] = "heldout"
            heldout_rows += row_counts[key]
    if not heldout_rows:  # every prompt has more rows than shall be held out
        sides[min(row_counts, key=lambda key: (row_counts[key], key))] = "heldout"
    return sides


def _wanted_heldout_rows(total: int) -> int:
    """How many of `total` rows shall be held out: `HELDOUT_SHARE` of them, but at least
    `HELDOUT_LEAST`, or half of the rows where those are fewer."""
    least = min(HELDOUT_LEAST, total // 2)
    return max(math.ceil(HELDOUT_SHARE * total), least)
