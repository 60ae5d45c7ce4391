"""Which rows are held out: what the rows say, else a hash of their prompts. Never both sides."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

HELDOUT_SHARE = 0.2  # of the rows, where the rows do not say a side
HELDOUT_LEAST = 50  # rows, or half of them where there are fewer than 100
REPEATED_FROM = 9  # a push warns when fewer of ten held-out rows have a prompt of their own
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
    """A row names a split that is none of NAMES."""


@dataclass(frozen=True)
class Split:
    """The side of each row, in order, and how it came about."""

    sides: list[str]
    source: str  # "rows" (they say it), "hash" (of the prompt) or "mixed"
    warnings: list[str] = field(default_factory=list)


def split_rows(rows: Sequence[Mapping[str, Any]]) -> Split:
    """The side of every row: train or heldout. It depends on the rows' content, not on their order.

    Rows with equal prompts always share a side; where some of them are held out by name, all are.
    Rows that name no side train if any row is held out by name. Else they are split by a hash of
    the prompt: 20 % are held out, but at least 50 rows, or half of them where there are fewer than
    100. Raises UnknownSplit for a name that means no side.

    Args:
        rows: each with "id", "prompt" (messages) and, if it names a side, "split".
    """
    keys = [prompt_key(row["prompt"]) for row in rows]
    named_sides = [_named_side(row) for row in rows]
    warnings: list[str] = []
    side_of_prompt = _sides_by_name(keys, named_sides)
    moved = sum(
        side is not None and side_of_prompt[key] != side
        for key, side in zip(keys, named_sides, strict=True)
    )
    if moved:
        warnings.append(
            f"{moved} training rows have the prompt of a held-out row and are held out with it"
        )
    unnamed_keys = [key for key, side in zip(keys, named_sides, strict=True) if side is None]
    undecided_keys = [key for key in unnamed_keys if key not in side_of_prompt]
    if "heldout" in named_sides:
        chosen_side = dict.fromkeys(undecided_keys, "train")
    else:
        chosen_side = _split_by_hash(undecided_keys)
    sides = [side_of_prompt.get(key) or chosen_side[key] for key in keys]
    if "heldout" not in sides:
        reason = "every row says train" if "train" in named_sides else "there are too few prompts"
        warnings.append(f"no row is held out ({reason}): no verdict can be given")
    if "train" not in sides:
        warnings.append("every row is held out: there is nothing to train on")
    warnings += _repetition_warning(
        [key for key, side in zip(keys, sides, strict=True) if side == "heldout"]
    )
    source = "hash" if len(unnamed_keys) == len(rows) else "mixed" if unnamed_keys else "rows"
    return Split(sides, source, warnings)


def _sides_by_name(keys: Sequence[str], named_sides: Sequence[str | None]) -> dict[str, str]:
    """The side of every prompt key of which some row names a side; a side of None is no name."""
    side_of_prompt: dict[str, str] = {}
    for key, side in zip(keys, named_sides, strict=True):
        if side == "heldout":  # held out wins: a test row must not be trained on
            side_of_prompt[key] = "heldout"
        elif side == "train":
            side_of_prompt.setdefault(key, "train")
    return side_of_prompt


def _repetition_warning(heldout: Sequence[str]) -> list[str]:
    """A warning if many held-out rows share their prompt with another one; [] if few do.

    Args:
        heldout: the prompt keys of the held-out rows.
    """
    distinct = len(set(heldout))
    if distinct * 10 >= len(heldout) * REPEATED_FROM:
        return []
    plural = "s" if distinct > 1 else ""
    return [
        f"{len(heldout)} held-out rows, {distinct} different prompt{plural}: rows "
        "of one prompt are one question, and a verdict is worth no more than its questions; "
        "give the rows prompts of their own"
    ]


def prompt_key(prompt: Sequence[Mapping[str, Any]]) -> str:
    """A hash of a prompt's messages. White space around a message makes no difference."""
    plain = [{**message, "content": str(message.get("content", "")).strip()} for message in prompt]
    text = json.dumps(plain, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(b"split:" + text.encode()).hexdigest()


def _named_side(row: Mapping[str, Any]) -> str | None:
    """The side that a row names; None if it names none. Raises UnknownSplit for a name that means
    no side."""
    name = row.get("split")
    if name is None or name == "":
        return None
    side = NAMES.get(str(name).strip().lower())
    if side is None:
        raise UnknownSplit(f"row {row['id']!r} names the split {name!r}")
    return side


def _split_by_hash(keys: Sequence[str]) -> dict[str, str]:
    """Choose a side for every key: key -> side.

    Whole groups of equal keys are held out, in the order of the hashes, until the share is reached.
    A group that would exceed the share is passed over; if all would, the smallest is taken.

    `keys` has one prompt key per row. Nothing is held out where all rows have the same prompt.
    """
    rows_of_key: dict[str, int] = {}
    for key in keys:
        rows_of_key[key] = rows_of_key.get(key, 0) + 1
    total = len(keys)
    heldout_target = max(math.ceil(HELDOUT_SHARE * total), min(HELDOUT_LEAST, total // 2))
    sides = dict.fromkeys(rows_of_key, "train")
    if len(rows_of_key) < 2:
        return sides
    heldout_count = 0
    ordered_keys = sorted(rows_of_key)
    for key in ordered_keys:
        if heldout_count + rows_of_key[key] <= heldout_target:
            sides[key] = "heldout"
            heldout_count += rows_of_key[key]
    if not heldout_count:  # every group is larger than the share
        sides[min(ordered_keys, key=lambda key: (rows_of_key[key], key))] = "heldout"
    return sides
