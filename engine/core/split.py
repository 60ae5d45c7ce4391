"""Which rows are held out: what the rows say, else a hash of their prompts. Never both sides."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

HELDOUT_SHARE = 0.2
HELDOUT_LEAST = 50
REPEATED_FROM = 9  # of ten held-out rows so many have a prompt of their own, or a push says so
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
    """A row names a split nobody knows."""


@dataclass(frozen=True)
class Split:
    """The side of each row, in order, and how it came about."""

    sides: list[str]
    source: str  # "rows" (they say it), "hash" (of the prompt) or "mixed"
    warnings: list[str] = field(default_factory=list)


def split_rows(rows: Sequence[Mapping[str, Any]]) -> Split:
    """The side of every row; deterministic in the rows' content and blind to their order.

    Rows of equal prompts share a side. Rows that say no side are split by a hash of the prompt,
    20 % held out but at least 50 rows or half of them; where some rows are held out by name, the
    silent ones train. Raises UnknownSplit.
    """
    keys = [prompt_key(row["prompt"]) for row in rows]
    named_sides = [_side(row) for row in rows]
    warnings: list[str] = []
    fixed: dict[str, str] = {}
    moved = 0
    for key, side in zip(keys, named_sides, strict=True):
        if side == "heldout":  # held out wins: a test row must not be trained on
            fixed[key] = "heldout"
        elif side == "train":
            fixed.setdefault(key, "train")
    for key, side in zip(keys, named_sides, strict=True):
        moved += side is not None and fixed[key] != side
    if moved:
        warnings.append(
            f"{moved} training rows have the prompt of a held-out row and are held out with it"
        )
    silent = [key for key, side in zip(keys, named_sides, strict=True) if side is None]
    loose = [key for key in silent if key not in fixed]
    if "heldout" in named_sides:
        chosen = dict.fromkeys(loose, "train")
    else:
        chosen = _by_hash(loose)
    sides = [fixed.get(key) or chosen[key] for key in keys]
    if "heldout" not in sides:
        every = "every row says train" if "train" in named_sides else "there are too few prompts"
        warnings.append(f"no row is held out ({every}): no verdict can be given")
    if "train" not in sides:
        warnings.append("every row is held out: there is nothing to train on")
    warnings += _repeated([key for key, side in zip(keys, sides, strict=True) if side == "heldout"])
    source = "hash" if len(silent) == len(rows) else "mixed" if silent else "rows"
    return Split(sides, source, warnings)


def _repeated(heldout: Sequence[str]) -> list[str]:
    """What to say of held-out rows that ask the same thing over and over."""
    different = len(set(heldout))
    if different * 10 >= len(heldout) * REPEATED_FROM:
        return []
    return [
        f"{len(heldout)} held-out rows, {different} different prompt{'s'[: different > 1]}: rows "
        "of one prompt are one question, and a verdict is worth no more than its questions; "
        "give the rows prompts of their own"
    ]


def prompt_key(prompt: Sequence[Mapping[str, Any]]) -> str:
    """A hash of a prompt's messages; surrounding white space does not make a prompt another."""
    plain = [{**message, "content": str(message.get("content", "")).strip()} for message in prompt]
    text = json.dumps(plain, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(b"split:" + text.encode()).hexdigest()


def _side(row: Mapping[str, Any]) -> str | None:
    name = row.get("split")
    if name is None or name == "":
        return None
    side = NAMES.get(str(name).strip().lower())
    if side is None:
        raise UnknownSplit(f"row {row['id']!r} names the split {name!r}")
    return side


def _by_hash(keys: Sequence[str]) -> dict[str, str]:
    """Whole groups of equal prompts in the order of their hashes, until enough are held out."""
    counts: dict[str, int] = {}
    for key in keys:
        counts[key] = counts.get(key, 0) + 1
    total = len(keys)
    wanted = max(math.ceil(HELDOUT_SHARE * total), min(HELDOUT_LEAST, total // 2))
    sides = dict.fromkeys(counts, "train")
    if len(counts) < 2:
        return sides
    held = 0
    order = sorted(counts)
    for key in order:
        if held + counts[key] <= wanted:
            sides[key] = "heldout"
            held += counts[key]
    if not held:  # every group is larger than the share: the smallest has to do
        sides[min(order, key=lambda key: (counts[key], key))] = "heldout"
    return sides
