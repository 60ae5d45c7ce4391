"""Every training row that teaches a held-out task, with the task: what to drop."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from engine.evidence.overlap.overlap import HeldOut, Match


def leaking_pairs(
    train: Sequence[Mapping[str, Any]], exam: Sequence[Mapping[str, Any]], budget_s: float
) -> list[Match]:
    """The training rows that teach a task of the exam, in their order, each with one such task.

    Rows that merely resemble a task are left out (`Match.spoils`). After `budget_s` seconds no
    further row is compared.

    Args:
        train, exam: stored task rows; the exam's are held out or dev.
    """
    started_at = time.monotonic()
    index_deadline, deadline = started_at + budget_s / 2, started_at + budget_s
    index = HeldOut(exam, index_deadline)
    pairs = []
    for row in train:
        if time.monotonic() > deadline:
            break
        spoiling = [match for match in index.matches(row) if match.spoils]
        if spoiling:
            strongest = min(spoiling, key=lambda match: (match.rank, match.heldout))
            pairs.append(strongest)
    return pairs


def asked_once(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[bool]:
    """For each row of the exam whether to keep it, so that every question is asked once.

    Of the rows that ask the same question, the first that says of itself that it is held out or dev
    is kept, else the first at all.

    Args:
        rows: with the split that each names under "split", None for none.
        keys: one for each row; rows that ask the same question have the same key.
    """
    kept_index: dict[str, int] = {}  # by key
    for index, (row, key) in enumerate(zip(rows, keys, strict=True)):
        kept_row = rows[kept_index[key]] if key in kept_index else None
        if kept_row is None or (_names_exam(row) and not _names_exam(kept_row)):
            kept_index[key] = index
    return [kept_index[key] == index for index, key in enumerate(keys)]


def _names_exam(row: Mapping[str, Any]) -> bool:
    """Whether a row says of itself that it is held out or dev."""
    return row.get("split") not in (None, "", "train", "training")
