"""Which training rows teach a held-out task, so that they can be dropped; and which held-out rows
repeat a question."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from engine.evidence.overlap.overlap import HeldOut, Match


def leaking_pairs(
    train: Sequence[Mapping[str, Any]], exam: Sequence[Mapping[str, Any]], budget_s: float
) -> list[Match]:
    """The training rows that teach a held-out task (a task of the exam), in their order. Each comes
    with the one such task that it matches most strongly.

    Rows that merely resemble a task are left out (`Match.spoils` is false). After `budget_s`
    seconds no further row is compared.

    Args:
        train, exam: stored task rows; those of the exam are held out or dev.
    """
    started_at = time.monotonic()
    # At most half of the time goes to the index, so that some is left for comparing.
    index_deadline, deadline = started_at + budget_s / 2, started_at + budget_s
    index = HeldOut(exam, index_deadline)
    pairs = []
    for row in train:
        if time.monotonic() > deadline:
            break
        spoiling = [match for match in index.matches(row) if match.spoils]
        if spoiling:
            pairs.append(min(spoiling, key=_rank_and_task))
    return pairs


def _rank_and_task(match: Match) -> tuple[tuple[bool, int, str], str]:
    """The sort key that puts the strongest match first; equal ones by the id of the task."""
    return match.rank, match.heldout


def asked_once(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[bool]:
    """Whether to keep each row of the exam, so that every question is asked once.

    Of the rows that ask the same question, the first that names a held-out or dev split itself is
    kept; if none does, the first.

    Args:
        rows: with the split that each names under "split"; None if it names none.
        keys: one for each row; rows that ask the same question have the same key.
    """
    chosen_index: dict[str, int] = {}  # key of a question -> index of the row that is kept
    for index, (row, key) in enumerate(zip(rows, keys, strict=True)):
        if key not in chosen_index:
            chosen_index[key] = index
            continue
        chosen_row = rows[chosen_index[key]]
        if _names_exam(row) and not _names_exam(chosen_row):
            chosen_index[key] = index
    return [chosen_index[key] == index for index, key in enumerate(keys)]


def _names_exam(row: Mapping[str, Any]) -> bool:
    """Whether a row itself names a split other than training, such as held out or dev."""
    return row.get("split") not in (None, "", "train", "training")
