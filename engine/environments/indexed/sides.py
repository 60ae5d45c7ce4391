"""Which rows of a large dataset are held out: the rule of `engine/core/split.py`, read from hashes,
with a limit on how many rows are held out."""

import math
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from engine.core.split import HELDOUT_LEAST, HELDOUT_SHARE
from engine.environments.indexed.columns import portions
from engine.environments.indexed.scan import HELDOUT, TRAIN, UNSAID

CHOSEN_MOST = 2_000  # rows that are held out where the rows do not say it
# Rows that models are asked, and judged on, at most, where the rows name the held-out side.
NAMED_MOST = 10_000
# The side that a row gets. OUTSIDE: its prompt is held out, so it is not trained on, but it is not
# among the held-out rows that are asked either.
IN_TRAIN, IN_HELDOUT, OUTSIDE = 0, 1, 2


@dataclass
class Sides:
    """How the rows of a dataset are divided.

    Attributes:
        of_row: the side of each row, in order.
        source: what decided: "rows" (all name a side), "hash" (none does) or "mixed".
        distinct_prompts: how many different prompts the training rows have.
        warnings: what the author of the dataset should know.
    """

    of_row: bytearray
    source: str
    distinct_prompts: int = 0
    warnings: list[str] = field(default_factory=list)

    def count(self, side: int) -> int:
        """How many rows are on `side`."""
        return self.of_row.count(side)


def decide(prompts: Sequence[int], named_sides: bytes) -> Sides:
    """Decide the side of every row; all rows of a prompt get the same one.

    Where rows name the held-out side, their prompts are held out and no others. Else some prompts
    are chosen among those of which no row names the training side.

    Args:
        prompts: the hash of each row's prompt; the first 64 bits of `prompt_key`.
        named_sides: the side that each row names: UNSAID, TRAIN or HELDOUT.
    """
    sides = Sides(bytearray(len(prompts)), _source(named_sides))
    names_heldout = HELDOUT in named_sides
    chooser = _Chooser(NAMED_MOST if names_heldout else _heldout_target(prompts, named_sides))
    for low, high in portions(len(prompts)):  # ranges of hashes, so that sets of them stay small
        rows = array("Q", (row for row, key in enumerate(prompts) if low <= key < high))
        _decide_portion(sides, rows, prompts, named_sides, chooser)
    if not names_heldout and not chooser.taken_rows:
        # Every prompt has more rows than shall be held out.
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
    """Decide the sides of some of the dataset's rows.

    They are written into `sides.of_row`, and the training prompts are counted in
    `sides.distinct_prompts`.

    Args:
        sides: the sides of all rows; changed in place.
        rows: the positions of these rows; all rows with the same prompt are among them.
        prompts: the hash of the prompt of every row of the dataset.
        named_sides: the side that every row names.
        chooser: it chooses the prompts that are held out.
    """
    candidates = _candidates(rows, prompts, named_sides)
    row_counts = Counter(prompts[row] for row in rows if prompts[row] in candidates)  # by prompt
    evaluated_prompts = chooser.choose(row_counts)
    # Of the prompts that rows name as held out, only so many are asked in evaluations; the others
    # are not trained on either.
    heldout_prompts = candidates if HELDOUT in named_sides else evaluated_prompts
    for row in rows:
        prompt = prompts[row]
        if prompt in heldout_prompts:
            sides.of_row[row] = IN_HELDOUT if prompt in evaluated_prompts else OUTSIDE
    all_prompts = {prompts[row] for row in rows}
    sides.distinct_prompts += len(all_prompts) - len(heldout_prompts)  # those of training rows


def _hold_out_smallest(sides: Sides, prompts: Sequence[int], chooser: "_Chooser") -> None:
    """Hold out the prompt with the fewest rows. To be called where every prompt has more rows than
    shall be held out. Nothing is held out if there is only one prompt to choose from.

    `chooser.smallest` is (number of rows, prompt), None without prompts.
    """
    if chooser.smallest and chooser.seen_prompts > 1:
        _rows, prompt = chooser.smallest
        _hold_out(sides, prompts, prompt)
        sides.distinct_prompts -= 1


def _candidates(rows: Sequence[int], prompts: Sequence[int], named_sides: bytes) -> set[int]:
    """Return the prompts of `rows` that may be held out, by their hashes.

    If any row of the dataset names the held-out side, they are the prompts of rows that do. Else
    they are the prompts of which no row names the training side.

    `rows` are positions; `prompts` has the hash of each row's prompt, `named_sides` the side it
    names.
    """
    if HELDOUT in named_sides:
        return {prompts[row] for row in rows if named_sides[row] == HELDOUT}
    return {prompts[row] for row in rows} - {
        prompts[row] for row in rows if named_sides[row] == TRAIN
    }


def _source(named_sides: bytes) -> str:
    """Return "rows" if every row names its side, "hash" if none does, else "mixed".

    `named_sides` has the side that each row names.
    """
    unsaid = named_sides.count(UNSAID)
    if unsaid == len(named_sides):
        return "hash"
    return "mixed" if unsaid else "rows"


class _Chooser:
    """Takes prompts in the order of their hashes until `row_limit` rows are held out; a prompt
    whose rows would exceed the limit is passed over.

    Attributes:
        taken_rows: rows held out so far.
        seen_prompts: how many prompts there were to choose from so far.
        smallest: (rows, hash) of the prompt with the fewest rows; None before the first.
    """

    def __init__(self, row_limit: int) -> None:
        """Start with nothing chosen; about `row_limit` rows are to be held out."""
        self.row_limit = row_limit
        self.taken_rows = 0
        self.seen_prompts = 0
        self.smallest: tuple[int, int] | None = None

    def choose(self, rows_of_prompt: Counter[int]) -> set[int]:
        """The prompts to hold out among the keys of `rows_of_prompt` (hash of a prompt -> number of
        its rows). All hashes must be larger than those of earlier calls, so that prompts are taken
        in the order of their hashes, which is a random one. Also notes how many prompts there were
        (`seen_prompts`) and which has the fewest rows (`smallest`).
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
    """Return how many rows to hold out where no row names the held-out side.

    Only free rows may be held out: those whose prompt no row names for training. The result is a
    share of them (HELDOUT_SHARE), but at least HELDOUT_LEAST, or half of them where there are few,
    and at most CHOSEN_MOST. It is 0 where the free rows have fewer than two different prompts.

    `prompts` has the hash of each row's prompt, `named_sides` the side that each row names.
    """
    named_train: set[int] = set()
    if TRAIN in named_sides:
        named_train = {key for key, side in zip(prompts, named_sides, strict=True) if side == TRAIN}
    # No row is free, or all free rows have the same prompt.
    if _are_equal(key for key in prompts if key not in named_train):
        return 0
    free_rows = len(prompts)
    if named_train:
        free_rows = sum(key not in named_train for key in prompts)
    share = math.ceil(HELDOUT_SHARE * free_rows)
    least_rows = min(HELDOUT_LEAST, free_rows // 2)
    return min(CHOSEN_MOST, max(share, least_rows))


def _are_equal(numbers: Iterator[int]) -> bool:
    """Whether all numbers are the same, or there are none; reads only up to the first other one."""
    first = next(numbers, None)
    return all(number == first for number in numbers)


def _hold_out(sides: Sides, prompts: Sequence[int], prompt: int) -> None:
    """Hold out the rows of the prompt with the hash `prompt`: models are judged on its first
    NAMED_MOST rows; the others are used for nothing. `prompts` has the hash of each row."""
    rows_of_prompt = (row for row, key in enumerate(prompts) if key == prompt)
    for number, row in enumerate(rows_of_prompt):
        sides.of_row[row] = IN_HELDOUT if number < NAMED_MOST else OUTSIDE


def _count_moved_rows(sides: Sides, named_sides: bytes) -> int:
    """Count the rows that name the training side but are not trained on.

    A row with the same prompt names the held-out side. `named_sides` has the side that each row
    names.
    """
    if TRAIN not in named_sides:
        return 0
    pairs = zip(sides.of_row, named_sides, strict=True)
    return sum(name == TRAIN and side != IN_TRAIN for side, name in pairs)


def _warnings(sides: Sides, named_sides: bytes) -> list[str]:
    """List what the author of the dataset should know of the sides that were decided.

    `named_sides` has the side that each row names.
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
