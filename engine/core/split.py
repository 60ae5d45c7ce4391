"""Decides which rows are for training, for choosing checkpoints (dev), and held out.

A row may name its side; otherwise a hash of its prompt decides. Rows of one family (the same
prompt, or the same `group`) always get the same side.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

HELDOUT_SHARE = 0.2  # the share of rows that is held out if the rows name no side
HELDOUT_LEAST = 50  # the least rows that are held out; if there are fewer than 100, half of them
REPEATED_FROM = 9  # a push warns if ten held-out rows have fewer different prompts than this
# Name of a side in a row -> the side.
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
    "dev": "dev",
    "development": "dev",
}
# A family whose rows name several sides gets the first of these that is among them.
_STRICTEST_FIRST = ("heldout", "dev", "train")


class UnknownSplit(ValueError):
    """A row names a split that is not in `NAMES`."""


@dataclass(frozen=True)
class Split:
    """The side of each row, in order, and how it was decided."""

    sides: list[str]  # "train", "dev" or "heldout"
    source: str  # "rows" (all name a side), "hash" (of the prompt; none does) or "mixed"
    warnings: list[str] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """Return side -> number of rows; "dev" is left out if it has no rows."""
        counts = Counter(self.sides)
        dev = {"dev": counts["dev"]} if counts["dev"] else {}
        return {"train": counts["train"], **dev, "heldout": counts["heldout"]}


def split_rows(rows: Sequence[Mapping[str, Any]], dev_share: float = 0.0) -> Split:
    """Decide for every row its side: "train", "dev" (chooses checkpoints) or "heldout".

    The result depends on the rows' content, not on their order. All rows of a family (rows with the
    same prompt or group, see `family_keys`) get the same side: "heldout" if one of them names it,
    else "dev" if one of them names it. If there are dev rows but no held-out rows, the dev rows are
    held out, because a verdict needs held-out rows.

    Args:
        rows: each has "id", "prompt" (messages), and perhaps "split" and "group".
        dev_share: if no row names "dev", this share of the rows is taken from the training side
            for it.

    Raises UnknownSplit if a row names a split that is not in `NAMES`.
    """
    keys = family_keys(rows)
    named_sides = [_named_side(row) for row in rows]
    side_of_family = _side_of_families(keys, named_sides, dev_share)
    warnings: list[str] = []
    all_sides = set(side_of_family.values())
    if "dev" in all_sides and "heldout" not in all_sides:
        side_of_family = _with_dev_held_out(side_of_family)
        warnings.append(_ONLY_DEV)
    sides = [side_of_family[key] for key in keys]
    heldout_prompts = [
        prompt_key(row["prompt"])
        for row, side in zip(rows, sides, strict=True)
        if side == "heldout"
    ]
    warnings += [*_side_warnings(named_sides, sides), *_repetition_warning(heldout_prompts)]
    return Split(sides, _source(named_sides), warnings)


_ONLY_DEV = (
    "no row is held out beside the dev rows, so those are held out: one half of them chooses the "
    "checkpoint, the verdict is read on the other; add held-out rows to keep the two apart"
)


def _with_dev_held_out(side_of_family: Mapping[str, str]) -> dict[str, str]:
    """Return the sides of the families with "heldout" in place of "dev"."""
    dev_families = [key for key, side in side_of_family.items() if side == "dev"]
    return {**side_of_family, **dict.fromkeys(dev_families, "heldout")}


def family_keys(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return for each row the key of its family.

    Rows with the same prompt or the same "group" have the same key, also if they are connected only
    through other rows. The key of a row without a group is that of its prompt.

    Args:
        rows: each has "prompt" (messages), and perhaps "group" ("" means no group).
    """
    prompts = [prompt_key(row["prompt"]) for row in rows]
    # A union-find forest: key of a prompt or group -> smaller key of the same family.
    parents: dict[str, str] = {}
    for prompt, row in zip(prompts, rows, strict=True):
        if row.get("group"):
            prompt_root = _root(parents, prompt)
            group_root = _root(parents, _group_key(row["group"]))
            if prompt_root != group_root:
                parents[max(prompt_root, group_root)] = min(prompt_root, group_root)
    return [_root(parents, prompt) for prompt in prompts]


def _group_key(group: str) -> str:
    """Return the key of a group, which never equals the key of a prompt."""
    return hashlib.sha256(b"group:" + str(group).encode()).hexdigest()


def _root(parents: dict[str, str], key: str) -> str:
    """Return the smallest key of the family to which `key` belongs.

    All keys on the way to it then point to it directly, so that later calls are fast.
    """
    path = []
    while key in parents:
        path.append(key)
        key = parents[key]
    parents.update(dict.fromkeys(path, key))
    return key


def _side_warnings(named_sides: Sequence[str | None], sides: Sequence[str]) -> list[str]:
    """Return warnings about rows that changed their side, and about a side without rows.

    Args:
        named_sides: for each row the side that it names, None if it names none.
        sides: for each row the side that it got.
    """
    warnings: list[str] = []
    moves = Counter(zip(named_sides, sides, strict=True))  # (named side, side) -> number of rows
    if moves["train", "heldout"] and "heldout" in named_sides:
        warnings.append(
            f"{moves['train', 'heldout']} training rows have the prompt of a held-out row (or its "
            "group) and are held out with it"
        )
    if moves["train", "dev"] and "dev" in named_sides:
        warnings.append(
            f"{moves['train', 'dev']} training rows have the prompt of a dev row (or its group) "
            "and are not trained on"
        )
    if moves["dev", "heldout"] and "heldout" in named_sides:
        warnings.append(
            f"{moves['dev', 'heldout']} dev rows have the prompt of a held-out row (or its group) "
            "and are held out with it"
        )
    if "heldout" not in sides:
        reason = "every row says train" if "train" in named_sides else "there are too few prompts"
        warnings.append(f"no row is held out ({reason}): no verdict can be given")
    if "train" not in sides:
        warnings.append(
            "every row is held out: there is nothing to train on, this is an exam to evaluate on"
        )
    return warnings


def _source(named_sides: Sequence[str | None]) -> str:
    """Return what decided the sides: "rows" if every row names one, "hash" if none does, else
    "mixed"."""
    unnamed_count = named_sides.count(None)
    if unnamed_count == len(named_sides):
        return "hash"
    return "mixed" if unnamed_count else "rows"


def _side_of_families(
    keys: Sequence[str], named_sides: Sequence[str | None], dev_share: float
) -> dict[str, str]:
    """Return family key -> side: the side that the family's rows name, or else one by its hash.

    Args:
        keys: for each row the key of its family.
        named_sides: for each row the side that it names, None if it names none.
        dev_share: see `split_rows`.
    """
    side_of_family = _named_side_of_families(keys, named_sides)
    undecided_keys = [key for key in keys if key not in side_of_family]
    if "heldout" in named_sides:  # some rows are held out, so those that name no side are trained
        side_of_family |= dict.fromkeys(undecided_keys, "train")
    else:
        side_of_family |= _split_by_hash(undecided_keys)
    if dev_share > 0 and "dev" not in named_sides:
        side_of_family |= _dev_by_hash(keys, side_of_family, dev_share)
    return side_of_family


def _named_side_of_families(
    keys: Sequence[str], named_sides: Sequence[str | None]
) -> dict[str, str]:
    """Return family key -> the side that the rows of the family name.

    If the rows disagree, "heldout" wins, then "dev". A family is left out if none of its rows names
    a side.

    Args:
        keys: for each row the key of its family.
        named_sides: for each row the side that it names, None if it names none.
    """
    side_of_family: dict[str, str] = {}
    for side in reversed(_STRICTEST_FIRST):  # reversed, so that the strictest overwrites the others
        pairs = zip(keys, named_sides, strict=True)
        families = [key for key, named_side in pairs if named_side == side]
        side_of_family |= dict.fromkeys(families, side)
    return side_of_family


def _repetition_warning(heldout_keys: Sequence[str]) -> list[str]:
    """Return a warning if more than one in ten held-out rows repeats another's prompt; else [].

    Args:
        heldout_keys: the prompt keys of the held-out rows.
    """
    distinct = len(set(heldout_keys))
    # There are at least `REPEATED_FROM` different prompts for every ten rows. The comparison uses
    # whole numbers to avoid rounding errors.
    if distinct * 10 >= len(heldout_keys) * REPEATED_FROM:
        return []
    plural = "s" if distinct > 1 else ""
    return [
        f"{len(heldout_keys)} held-out rows, {distinct} different prompt{plural}: rows "
        "of one prompt are one question, and a verdict is worth no more than its questions; "
        "give the rows prompts of their own"
    ]


def prompt_key(prompt: Sequence[Mapping[str, Any]]) -> str:
    """Return a hash that is equal for equal prompts; white space around a message's text is
    ignored."""
    plain = [{**message, "content": str(message.get("content", "")).strip()} for message in prompt]
    text = json.dumps(plain, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(b"split:" + text.encode()).hexdigest()


def _named_side(row: Mapping[str, Any]) -> str | None:
    """Return the side that a row's "split" names, "train", "dev" or "heldout"; None if it is empty.

    Raises UnknownSplit if the name is not in `NAMES`.
    """
    name = row.get("split")
    if name is None or name == "":
        return None
    side = NAMES.get(str(name).strip().lower())
    if side is None:
        raise UnknownSplit(f"row {row['id']!r} names the split {name!r}")
    return side


def _split_by_hash(keys: Sequence[str]) -> dict[str, str]:
    """Choose a side for every family, so that about `HELDOUT_SHARE` of the rows are held out.

    `keys` holds for each row the key of its family. Returns family key -> "train" or "heldout".
    """
    row_counts = Counter(keys)
    sides = dict.fromkeys(row_counts, "train")
    if len(row_counts) < 2:  # holding out the only family would leave nothing to train on
        return sides
    heldout_keys = _families_up_to(_wanted_heldout_rows(len(keys)), row_counts)
    if not heldout_keys:  # every family has more rows than shall be held out: take the smallest
        fewest_rows = min(row_counts.values())
        heldout_keys = [min(key for key, count in row_counts.items() if count == fewest_rows)]
    return sides | dict.fromkeys(heldout_keys, "heldout")


def _dev_by_hash(
    keys: Sequence[str], side_of_family: Mapping[str, str], dev_share: float
) -> dict[str, str]:
    """Choose families of the training side that become dev, with about `dev_share` of all rows.

    At least one family stays for training. Returns family key -> "dev" for the chosen families.

    Args:
        keys: for each row the key of its family.
        side_of_family: family key -> the side so far.
        dev_share: the wanted share of all rows.
    """
    row_counts = Counter(key for key in keys if side_of_family[key] == "train")
    wanted_rows = min(math.ceil(dev_share * len(keys)), row_counts.total() - 1)
    return dict.fromkeys(_families_up_to(wanted_rows, row_counts), "dev")


def _families_up_to(wanted_rows: int, row_counts: Mapping[str, int]) -> list[str]:
    """Return the keys of families that have `wanted_rows` rows together, or a little fewer.

    The families are taken in the order of their keys. These are hashes, so the choice looks random.
    A family that would exceed `wanted_rows` is skipped. `row_counts` maps the key of a family to
    the number of its rows.
    """
    chosen: list[str] = []
    rows = 0
    for key in sorted(row_counts):
        if rows + row_counts[key] <= wanted_rows:
            chosen.append(key)
            rows += row_counts[key]
    return chosen


def _wanted_heldout_rows(total: int) -> int:
    """Return how many of `total` rows shall be held out.

    The number is `HELDOUT_SHARE` of the rows, but at least `HELDOUT_LEAST`, or half of the rows if
    that is fewer.
    """
    least_rows = min(HELDOUT_LEAST, total // 2)
    return max(math.ceil(HELDOUT_SHARE * total), least_rows)
