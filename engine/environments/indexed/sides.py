"""Decides which rows of a large dataset are held out. The rule is that of `engine/core/split.py`,
applied to hashes of prompts, with a limit on how many rows are held out."""

import math
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from engine.core.split import HELDOUT_LEAST, HELDOUT_SHARE
from engine.environments.indexed.columns import hash_ranges
from engine.environments.indexed.scan import HELDOUT, TRAIN, UNSAID

CHOSEN_MOST = 2_000  # the most rows that are held out if no row names the held-out side
# The most rows that models are judged on if rows name the held-out side; more would take too long.
NAMED_MOST = 10_000
# The side that a row gets. OUTSIDE: the prompt of the row is held out, so the row is not trained
# on, but it is also not among the held-out rows that models are judged on.
IN_TRAIN, IN_HELDOUT, OUTSIDE = 0, 1, 2


@dataclass
class Sides:
    """How the rows of a dataset are divided.

    Attributes:
        of_row: the side of each row, in order: IN_TRAIN, IN_HELDOUT or OUTSIDE.
        source: how the sides were decided: "rows" (every row names its side), "hash" (no row does)
            or "mixed".
        distinct_prompts: how many different prompts the training rows have.
        warnings: what the author of the dataset should know.
    """

    of_row: bytearray
    source: str
    distinct_prompts: int = 0
    warnings: list[str] = field(default_factory=list)

    def count(self, side: int) -> int:
        """Return how many rows are on `side`: IN_TRAIN, IN_HELDOUT or OUTSIDE."""
        return self.of_row.count(side)


def decide(prompts: Sequence[int], named_sides: bytes) -> Sides:
    """Decide for every row of a dataset whether it is held out or trained on. All rows with the
    same prompt are held out, or none is.

    If some rows name the held-out side, exactly their prompts are held out. Otherwise some prompts
    are chosen among those that no row names for training.

    Args:
        prompts: the hash of each row's prompt: the first 64 bits of `prompt_key`.
        named_sides: the side that each row names, one byte per row: UNSAID, TRAIN or HELDOUT.
    """
    sides = Sides(bytearray(len(prompts)), _source(named_sides))
    names_heldout = HELDOUT in named_sides
    row_limit = NAMED_MOST if names_heldout else _heldout_target(prompts, named_sides)
    chooser = _Chooser(row_limit)
    # The prompts are taken range by range of their hashes, so that sets of them stay small.
    for low, high in hash_ranges(len(prompts)):
        rows = array("Q", (row for row, key in enumerate(prompts) if low <= key < high))
        _decide_portion(sides, rows, prompts, named_sides, chooser)
    if not names_heldout and not chooser.taken_rows:
        # Each prompt has more rows than should be held out in all, so none was chosen.
        _hold_out_smallest(sides, prompts, chooser)
    sides.warnings += _warnings(sides, named_sides)
    return sides


def _decide_portion(
    sides: Sides,
    rows: Sequence[int],
    prompts: Sequence[int],
    named_sides: bytes,
    chooser: "_Chooser",
) -> None:
    """Decide the sides of some rows of the dataset.

    The sides are written into `sides.of_row`, and the training prompts are added to the count
    `sides.distinct_prompts`.

    Args:
        sides: the sides of all rows; changed in place.
        rows: the positions of these rows. If a row is among them, so are all with its prompt.
        prompts: the hash of the prompt of every row of the dataset.
        named_sides: the side that every row names.
        chooser: chooses the prompts that models are judged on.
    """
    candidates = _candidates(rows, prompts, named_sides)
    # Hash of a candidate prompt -> number of its rows.
    row_counts = Counter(prompts[row] for row in rows if prompts[row] in candidates)
    evaluated_prompts = chooser.choose(row_counts)
    # If rows name held-out prompts, all of these are kept out of the training, even those that
    # models are not judged on because there are too many.
    heldout_prompts = candidates if HELDOUT in named_sides else evaluated_prompts
    for row in rows:
        prompt = prompts[row]
        if prompt in heldout_prompts:
            sides.of_row[row] = IN_HELDOUT if prompt in evaluated_prompts else OUTSIDE
    all_prompts = {prompts[row] for row in rows}
    sides.distinct_prompts += len(all_prompts) - len(heldout_prompts)  # the others are training


def _hold_out_smallest(sides: Sides, prompts: Sequence[int], chooser: "_Chooser") -> None:
    """Hold out the prompt with the fewest rows, unless it is the only one to choose from.

    This is for the case that every prompt has more rows than should be held out. `chooser.smallest`
    is (number of rows, hash of the prompt), or None if there is no prompt.
    """
    if chooser.smallest and chooser.seen_prompts > 1:
        _rows, prompt = chooser.smallest
        _hold_out(sides, prompts, prompt)
        sides.distinct_prompts -= 1


def _candidates(rows: Sequence[int], prompts: Sequence[int], named_sides: bytes) -> set[int]:
    """Return the hashes of those prompts of `rows` that may be held out.

    If any row of the dataset names the held-out side, these are the prompts of rows that do.
    Otherwise these are the prompts that no row names for training.

    `rows` are positions. `prompts` and `named_sides` hold the hash of the prompt and the named side
    of every row of the dataset.
    """
    if HELDOUT in named_sides:
        return {prompts[row] for row in rows if named_sides[row] == HELDOUT}
    all_prompts = {prompts[row] for row in rows}
    named_for_training = {prompts[row] for row in rows if named_sides[row] == TRAIN}
    return all_prompts - named_for_training


def _source(named_sides: bytes) -> str:
    """Return how the sides are decided: "rows" if every row names its side, "hash" if none does,
    else "mixed". `named_sides` holds the side that each row names.
    """
    unnamed_rows = named_sides.count(UNSAID)
    if unnamed_rows == len(named_sides):
        return "hash"
    return "mixed" if unnamed_rows else "rows"


class _Chooser:
    """Takes prompts in the order of their hashes until `row_limit` rows are held out. A prompt
    whose rows would exceed the limit is skipped.

    Attributes:
        taken_rows: rows held out so far.
        seen_prompts: how many prompts there were to choose from so far.
        smallest: (rows, hash) of the prompt with the fewest rows; None before the first.
    """

    def __init__(self, row_limit: int) -> None:
        """Start with nothing chosen; at most `row_limit` rows will be held out."""
        self.row_limit = row_limit
        self.taken_rows = 0
        self.seen_prompts = 0
        self.smallest: tuple[int, int] | None = None

    def choose(self, rows_of_prompt: Counter[int]) -> set[int]:
        """Return which of these prompts to hold out; `rows_of_prompt` maps the hash of a prompt to
        the number of its rows.

        Prompts are taken in the order of their hashes, which is a random order. So the hashes must
        be larger than those of earlier calls. `seen_prompts` and `smallest` are updated.
        """
        chosen: set[int] = set()
        self.seen_prompts += len(rows_of_prompt)
        if rows_of_prompt:
            fewest = min((count, key) for key, count in rows_of_prompt.items())
            self.smallest = min(self.smallest or fewest, fewest)
        if self.taken_rows == self.row_limit:  # no prompt has room any more
            return chosen
        for key in sorted(rows_of_prompt):
            if self.taken_rows + rows_of_prompt[key] <= self.row_limit:
                chosen.add(key)
                self.taken_rows += rows_of_prompt[key]
        return chosen


def _heldout_target(prompts: Sequence[int], named_sides: bytes) -> int:
    """Return how many rows to hold out if no row names the held-out side.

    Only free rows may be held out: those whose prompt no row names for training. The result is the
    share HELDOUT_SHARE of them, but at least HELDOUT_LEAST (or half of them if there are few), and
    at most CHOSEN_MOST. It is 0 if the free rows have fewer than two different prompts.

    `prompts` and `named_sides` hold the hash of the prompt and the named side of every row.
    """
    named_train: set[int] = set()
    if TRAIN in named_sides:
        named_train = {key for key, side in zip(prompts, named_sides, strict=True) if side == TRAIN}
    # True if no row is free, or if all free rows have the same prompt.
    if _are_equal(key for key in prompts if key not in named_train):
        return 0
    free_rows = len(prompts)
    if named_train:
        free_rows = sum(key not in named_train for key in prompts)
    share = math.ceil(HELDOUT_SHARE * free_rows)
    least_rows = min(HELDOUT_LEAST, free_rows // 2)
    return min(CHOSEN_MOST, max(share, least_rows))


def _are_equal(numbers: Iterator[int]) -> bool:
    """Return whether all numbers are equal, or there are none. Reading stops at the first
    difference."""
    first = next(numbers, None)
    return all(number == first for number in numbers)


def _hold_out(sides: Sides, prompts: Sequence[int], prompt: int) -> None:
    """Hold out all rows of one prompt, given by its hash. Models are judged on its first NAMED_MOST
    rows; the others are not used. `prompts` holds the hash of every row's prompt."""
    rows_of_prompt = (row for row, key in enumerate(prompts) if key == prompt)
    for held_out_before, row in enumerate(rows_of_prompt):
        sides.of_row[row] = IN_HELDOUT if held_out_before < NAMED_MOST else OUTSIDE


def _count_moved_rows(sides: Sides, named_sides: bytes) -> int:
    """Count the rows that name the training side but are held out, because another row with the
    same prompt names the held-out side. `named_sides` holds the side that each row names.
    """
    if TRAIN not in named_sides:
        return 0
    pairs = zip(sides.of_row, named_sides, strict=True)
    return sum(name == TRAIN and side != IN_TRAIN for side, name in pairs)


def _warnings(sides: Sides, named_sides: bytes) -> list[str]:
    """Return warnings for the author of the dataset about the sides that were decided.

    `named_sides` holds the side that each row names.
    """
    warnings = []
    moved_rows = _count_moved_rows(sides, named_sides)
    if moved_rows:
        warnings.append(
            f"{moved_rows} training rows have the prompt of a held-out row and are held out with it"
        )
    unused = sides.count(OUTSIDE)
    if unused:
        evaluated = sides.count(IN_HELDOUT)
        warnings.append(
            f"{evaluated + unused} rows are held out; a sample of {evaluated} is asked, and "
            "nothing of the others is trained on"
        )
    if not sides.count(IN_HELDOUT):
        reason = "every row says train" if TRAIN in named_sides else "there are too few prompts"
        warnings.append(f"no row is held out ({reason}): no verdict can be given")
    if not sides.count(IN_TRAIN):
        warnings.append("every row is held out: there is nothing to train on")
    return warnings
