"""Ranks with different passes to do end up doing the same kinds in the same order."""

import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.worker.ranks.lockstep import Lockstep, Turn

KINDS = st.sampled_from([Turn.READ, Turn.TRAIN])


class Passes:
    """A network that writes down its passes, its own and empty ones alike."""

    def __init__(self) -> None:
        self.done: list[Turn] = []
        self.empty = 0

    def take_turn(self, _trains: bool) -> None: ...

    def empty_pass(self, *, trains: bool) -> None:
        self.empty += 1
        self.done.append(Turn.TRAIN if trains else Turn.READ)


class Threads(Lockstep):
    """Ranks that are threads of this process."""

    def __init__(self, rank: int, said: dict[int, Turn], barrier: threading.Barrier) -> None:
        self.passes = Passes()
        super().__init__(self.passes, None)  # pyright: ignore[reportArgumentType]
        self.rank, self.said, self.barrier = rank, said, barrier

    def _agree(self, wanted: Turn) -> Turn:
        self.said[self.rank] = wanted
        self.barrier.wait(5)
        most = max(self.said.values())
        self.barrier.wait(5)  # nobody says the next before all have read
        return most


def done_by(work: list[list[Turn]]) -> list[Passes]:
    """What each rank has done once all are idle, which have this much to do."""
    said: dict[int, Turn] = {}
    barrier = threading.Barrier(len(work))
    ranks = [Threads(rank, said, barrier) for rank in range(len(work))]

    def run(rank: Threads, turns: list[Turn]) -> None:
        for turn in turns:
            rank.turn(turn is Turn.TRAIN)
            rank.passes.done.append(turn)
        rank.idle()

    threads: list[Any] = [
        threading.Thread(target=run, args=pair) for pair in zip(ranks, work, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    return [rank.passes for rank in ranks]


@settings(deadline=None, max_examples=25)
@given(st.lists(st.lists(KINDS, max_size=5), min_size=1, max_size=3))
def test_all_ranks_do_the_same_kinds_of_passes_in_the_same_order(work: list[list[Turn]]) -> None:
    passes = done_by(work)
    assert all(rank.done == passes[0].done for rank in passes)


@pytest.mark.parametrize(
    ("work", "empty"),
    [
        ([[Turn.READ] * 3, [Turn.READ]], [0, 2]),
        ([[Turn.TRAIN], []], [0, 1]),
        # The one that wants to read goes along with the other first, and reads alone afterwards.
        ([[Turn.READ], [Turn.TRAIN]], [1, 1]),
    ],
)
def test_no_rank_does_more_empty_passes_than_others_have_of_their_own(
    work: list[list[Turn]], empty: list[int]
) -> None:
    assert [rank.empty for rank in done_by(work)] == empty
