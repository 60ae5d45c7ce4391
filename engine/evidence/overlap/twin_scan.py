"""The twins of two sets of rows, searched in a given time, and a sentence about them."""

import time
from collections.abc import Collection, Iterable, Sequence

from engine.evidence.overlap.twin_texts import Text
from engine.evidence.overlap.twins import TWIN_KINDS, Twin, find_twins

BY_CHANCE = 0.01  # up to this share of the held-out tasks has twins by chance
FEWEST = 2  # fewer twins than these are not worth a warning
MOST_CHARS = 4000  # of a question or an answer that are looked at
ID_CHARS = 60  # of an id in a sentence

# (id, question, answer) of a row. Made one by one, so that reading can stop when time is up.
RowTexts = Iterable[tuple[str, str, str]]


def twins_in_time(
    train: RowTexts,
    heldout: RowTexts,
    *,
    heldout_count: int,
    copied: Collection[str],
    deadline: float,
) -> list[Twin]:
    """Return the held-out tasks that have a twin among the training rows, one twin each.

    Returns [] if the tasks with a twin are so few that chance explains them.

    Args:
        train, heldout: the rows of both sides, in random order. Each side is read for at most a
            quarter of the time that is left.
        heldout_count: how many held-out tasks there are in all.
        copied: ids of held-out tasks that stand in the training rows themselves. They are left out.
        deadline: when the search stops, in seconds of the monotonic clock.
    """
    now = time.monotonic()
    quarter_s = (deadline - now) / 4  # of the time that is left, in seconds
    tasks = _texts_in_time(heldout, now + quarter_s)
    rows = _texts_in_time(train, now + 2 * quarter_s)
    twins = [twin for twin in find_twins(rows, tasks, deadline) if twin.heldout not in copied]
    fewest_twins = max(FEWEST, BY_CHANCE * heldout_count)
    return [] if len(twins) < fewest_twins else twins


def _texts_in_time(rows: RowTexts, deadline: float) -> list[Text]:
    """Read rows as texts until `deadline` (monotonic clock); rows without content are left out."""
    texts: list[Text] = []
    for row_id, question, answer in rows:
        if time.monotonic() > deadline:
            break
        text = Text(row_id, question[:MOST_CHARS], answer[:MOST_CHARS])
        if text.content:  # computed here, so that its time counts against the deadline
            texts.append(text)
    return texts


def counts_by_kind(twins: Sequence[Twin]) -> dict[str, int]:
    """Return how many twins there are of each kind, e.g. {"paraphrase": 3}; no kind with 0."""
    counts = {kind: sum(twin.kind == kind for twin in twins) for kind in TWIN_KINDS}
    return {kind: count for kind, count in counts.items() if count}


def sentence(twins: Sequence[Twin]) -> str:
    """Return the end of a headline that counts the twins and names one; "" without twins."""
    if not twins:
        return ""
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts_by_kind(twins).items())
    task_id, row_id = twins[0].heldout[:ID_CHARS], twins[0].train[:ID_CHARS]
    return (
        f"; {len(twins)} held-out tasks have a twin among the training rows ({kinds}), such as "
        f"{task_id!r} in {row_id!r}"
    )
