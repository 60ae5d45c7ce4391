"""Which rows of a large dataset are held out: the rule of `engine/core/split.py`, read from hashes,
with a limit on how many rows are held out."""

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine.core.split import HELDOUT_LEAST, HELDOUT_SHARE
from engine.environments.indexed.columns import portions
from engine.environments.indexed.scan import HELDOUT, TRAIN

CHOSEN_MOST = 2_000  # rows that are held out where the rows do not say it
NAMED_MOST = 10_000  # rows that are kept of a held-out side that the rows name
# The side that a row gets. OUTSIDE: its prompt is held out, but it is not among those asked.
IN_TRAIN, IN_HELDOUT, OUTSIDE = 0, 1, 2


@dataclass
class Sides:
    """The side of each row, in order, how it came about ("rows", "hash" or "mixed"), and warnings.

    `distinct_prompts` counts the different prompts of the training rows.
    """

    of_row: bytearray
    source: str
    distinct_prompts: int = 0
    warnings: list[str] = field(default_factory=list)

    def count(self, side: int) -> int:
        return self.of_row.count(side)


def decide(prompts: Sequence[int], named: bytes) -> Sides:
    """Decide the side of every row.

    Args:
        prompts: the hash of each row's prompt; the first 64 bits of `prompt_key`.
        named: what each row says of its side: UNSAID, TRAIN or HELDOUT.
    """
    unsaid = named.count(0)
    source = "hash" if unsaid == len(named) else "mixed" if unsaid else "rows"
    sides = Sides(bytearray(len(prompts)), source)
    names_heldout = HELDOUT in named
    chooser = _Chooser(NAMED_MOST if names_heldout else _heldout_target(prompts, named))
    moved = 0
    for low, high in portions(len(prompts)):
        positions = array("Q", (place for place, key in enumerate(prompts) if low <= key < high))
        sides.distinct_prompts += len({prompts[place] for place in positions})
        if names_heldout:
            held = {prompts[place] for place in positions if named[place] == HELDOUT}
            asked = chooser.choose(Counter(prompts[p] for p in positions if prompts[p] in held))
        else:
            said = {prompts[place] for place in positions if named[place] == TRAIN}
            free = Counter(prompts[p] for p in positions if prompts[p] not in said)
            held = asked = chooser.choose(free)
        for place in positions:
            if prompts[place] in held:
                moved += named[place] == TRAIN
                sides.of_row[place] = IN_HELDOUT if prompts[place] in asked else OUTSIDE
        sides.distinct_prompts -= len(held)
    # Otherwise every prompt has more rows than shall be held out.
    if not names_heldout and not chooser.taken and chooser.smallest and chooser.seen > 1:
        _hold_out(sides, prompts, chooser.smallest[1])
        sides.distinct_prompts -= 1
    sides.warnings += _warnings(sides, named, moved)
    return sides


class _Chooser:
    """Takes prompts in the order of their hashes until `limit` rows are held out; a prompt whose
    rows would exceed it is passed over.

    Attributes:
        taken: rows held out so far.
        seen: prompts looked at.
        smallest: (rows, hash) of the prompt with the fewest rows.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self.seen = 0
        self.smallest: tuple[int, int] | None = None

    def choose(self, rows_of_prompt: Counter[int]) -> set[int]:
        """The prompts to hold out among these, whose hashes follow those of earlier calls."""
        chosen: set[int] = set()
        self.seen += len(rows_of_prompt)
        if rows_of_prompt:
            fewest = min((count, key) for key, count in rows_of_prompt.items())
            self.smallest = min(self.smallest or fewest, fewest)
        if self.taken == self.limit:
            return chosen
        for key in sorted(rows_of_prompt):
            if self.taken + rows_of_prompt[key] <= self.limit:
                chosen.add(key)
                self.taken += rows_of_prompt[key]
        return chosen


def _heldout_target(prompts: Sequence[int], named: bytes) -> int:
    """How many rows to hold out where no row says it: 20 % of those that name no side, at least 50
    of them or half, at most CHOSEN_MOST; none where there are fewer than two prompts."""
    named_train: set[int] = set()
    if TRAIN in named:
        named_train = {key for key, side in zip(prompts, named, strict=True) if side == TRAIN}
    # A prompt that one of its rows names is decided, whatever its other rows say.
    free: Iterable[int] = (key for key in prompts if key not in named_train)
    first = next(iter(free), None)
    if first is None or all(key == first for key in free):
        return 0
    total = sum(key not in named_train for key in prompts) if named_train else len(prompts)
    return min(CHOSEN_MOST, max(math.ceil(HELDOUT_SHARE * total), min(HELDOUT_LEAST, total // 2)))


def _hold_out(sides: Sides, prompts: Sequence[int], chosen: int) -> None:
    """Hold out the rows of one prompt, NAMED_MOST of them at most."""
    asked = 0
    for place, key in enumerate(prompts):
        if key == chosen:
            sides.of_row[place] = IN_HELDOUT if asked < NAMED_MOST else OUTSIDE
            asked += 1


def _warnings(sides: Sides, named: bytes, moved: int) -> list[str]:
    """What the author of the dataset should know of the sides; `moved`: rows that say train and
    share their prompt with a held-out row."""
    warnings = []
    if moved:
        warnings.append(
            f"{moved} training rows have the prompt of a held-out row and are held out with it"
        )
    outside = sides.count(OUTSIDE)
    if outside:
        asked = sides.count(IN_HELDOUT)
        warnings.append(
            f"{asked + outside} rows are held out; a sample of {asked} is asked, and nothing of "
            "the others is trained on"
        )
    if not sides.count(IN_HELDOUT):
        reason = "every row says train" if TRAIN in named else "there are too few prompts"
        warnings.append(f"no row is held out ({reason}): no verdict can be given")
    if not sides.count(IN_TRAIN):
        warnings.append("every row is held out: there is nothing to train on")
    return warnings
