"""The order in which queued runs start: fair between owners, by priority, and without starvation.

Each owner has a line of runs. The next run of all is the first of the line of whoever has used the
least lately; what it will take is then counted as used, so owners take turns. Two things count like
hours not used: a priority, and the time that a run has waited. Hours used fade (`HALF_LIFE_H`) and
are bounded by what the machine can give, waiting is not: so every run comes first at some time.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

HALF_LIFE_H = 24.0  # after so many hours, an hour that was used counts as half an hour
LOOK_BACK_S = 7 * HALF_LIFE_H * 3600  # what ended longer ago counts for less than a hundredth
WAITED = 0.1  # an hour of waiting counts as so many hours that were not used
HEAD_START_H = {"high": 4.0, "normal": 0.0, "low": -4.0}
LEAST_H = 0.05  # what a run counts at least: without it, many short runs would count as nothing


class QueuedRun(Protocol):
    """What the order depends on of a run (engine/home/rows.py says what each is)."""

    @property
    def owner(self) -> str: ...
    @property
    def priority(self) -> str: ...
    @property
    def queued(self) -> float: ...
    @property
    def estimated_hours(self) -> float: ...
    @property
    def waits_for(self) -> str: ...


Run = TypeVar("Run", bound=QueuedRun)


def faded_hours(hours: float, ended_ago_s: float) -> float:
    """Return how many of a run's device hours still count `ended_ago_s` seconds after its end: half
    of them after `HALF_LIFE_H` hours, a quarter after twice as long."""
    return hours * 0.5 ** (max(0.0, ended_ago_s) / 3600 / HALF_LIFE_H)


def fair_order(queued: Sequence[Run], used_hours: Mapping[str, float]) -> list[Run]:
    """Return the queued runs in the order in which they should start, fair between owners.

    Args:
        queued: the runs, in the order in which they were queued.
        used_hours: owner -> device hours used lately, faded; 0 for an owner that it lacks.
    """
    lines: dict[str, list[Run]] = {}
    for row in sorted(queued, key=_place_in_line):
        lines.setdefault(row.owner, []).append(row)
    return list(take_turns({owner: [rows] for owner, rows in lines.items()}, used_hours))


def take_turns(
    lines: Mapping[str, Iterable[Iterable[Run]]], used_hours: Mapping[str, float]
) -> Iterator[Run]:
    """Yield queued runs in the order in which they should start.

    Of each line no more is read than the order so far has needed.

    Args:
        lines: owner -> its runs in one or several lines (one for each priority), each in the order
            in which its runs start.
        used_hours: owner -> device hours used lately, faded; 0 for an owner that it lacks.
    """
    merged = {owner: heapq.merge(*own, key=_place_in_line) for owner, own in lines.items()}
    used = {owner: used_hours.get(owner, 0.0) for owner in lines}  # and what starts before counts
    # The first run of each owner as (rank, time queued, owner, run); the smallest starts next. Runs
    # of equal rank start in the order in which they were queued.
    heap: list[tuple[float, float, str, Run]] = []

    def push_next(owner: str) -> None:
        """Put the next run of `owner`, if one is left, among those that may start next."""
        row = next(merged[owner], None)
        if row is not None:
            rank = used[owner] + _place_in_line(row)
            heapq.heappush(heap, (rank, row.queued, owner, row))

    for owner in lines:
        push_next(owner)
    while heap:
        _, _, owner, row = heapq.heappop(heap)
        yield row
        if not row.waits_for:  # a run that waits for another one takes nothing yet
            used[owner] += max(row.estimated_hours, LEAST_H)
        push_next(owner)


def _place_in_line(row: QueuedRun) -> float:
    """Return the rank of a run among those of its owner, in hours that count as used; the run with
    the smallest rank starts first.

    A run that was queued earlier has a smaller rank, by `WAITED` for each hour; a higher priority
    lowers it by `HEAD_START_H`.
    """
    return WAITED * row.queued / 3600 - HEAD_START_H.get(row.priority, 0.0)
