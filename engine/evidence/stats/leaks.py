"""Every training row that teaches a held-out task, with the task: what to drop."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from engine.evidence.stats.overlap import HeldOut, Match


def leaking_pairs(
    train: Sequence[Mapping[str, Any]], exam: Sequence[Mapping[str, Any]], budget_s: float
) -> list[Match]:
    """The training rows that teach a task of the exam, in their order, each with one such task.

    Rows that merely resemble a task are left out (`Match.spoils`). After `budget_s` seconds no
    further row is compared.

    Args:
        train, exam: stored task rows; the exam's are held out or dev.
    """
    deadline = time.monotonic() + budget_s
    index = HeldOut(exam, deadline=time.monotonic() + budget_s / 2)
    pairs = []
    for row in train:
        if time.monotonic() > deadline:
            break
        spoiling = [match for match in index.matches(row) if match.spoils]
        if spoiling:
            pairs.append(min(spoiling, key=lambda match: (match.rank, match.heldout)))
    return pairs


def asked_once(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[bool]:
    """Whether to keep each row of the exam so that every question is asked once: the first row of
    each key that names a side of its own, else the first at all.

    Args:
        rows: with the split that each names under "split", None for none.
        keys: the same for rows that ask the same question.
    """
    kept_row: dict[str, int] = {}
    for number, (row, key) in enumerate(zip(rows, keys, strict=True)):
        if key not in kept_row or (_names_exam(row) and not _names_exam(rows[kept_row[key]])):
            kept_row[key] = number
    return [kept_row[key] == number for number, key in enumerate(keys)]


def _names_exam(row: Mapping[str, Any]) -> bool:
    """Whether a row says of itself that it is held out or dev."""
    return row.get("split") not in (None, "", "train", "training")
