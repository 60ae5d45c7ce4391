"""Forward passes of a base whose layers are sharded over the ranks, in step.

A pass gathers every layer from all ranks, so all must do as many passes, of the same kind and in
the same order, however much each has to read. Before a pass a rank says which kind it wants, and
all learn the largest that anybody does: who wanted less does an empty pass of that kind first. Who
has nothing to do stays idle, which is to do the passes of the others, until all are.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import Protocol

import torch
from torch import distributed

from engine.worker.core import pulse


class Turn(IntEnum):
    """What a rank wants to do next: a pass has a backward pass too, or only reads."""

    IDLE = 0
    READ = 1
    TRAIN = 2


class EmptyPasses(Protocol):
    """A network that can do a pass for the sake of other ranks.

    Attributes:
        take_turn: called before each pass of its own, with whether a backward pass follows.
    """

    take_turn: Callable[[bool], None]

    def empty_pass(self, *, trains: bool) -> None:
        """Run one token through the layers, and back where it `trains`; no gradient changes."""
        ...


def together(call: Callable[[], None]) -> None:
    """Do this rank's side of a collective call."""
    call()


class Lockstep:
    """The passes of this rank, in step with those of the others.

    Args:
        network: whose layers are sharded.
        group: the ranks that hold them; its calls are those of gloo, on the CPU.
        collectively: does a collective call, with the errors that this side has for it.
        before: called before anything is agreed on: rank 0 tells the others to come.
    """

    def __init__(
        self,
        network: EmptyPasses,
        group: "distributed.ProcessGroup",
        collectively: Callable[[Callable[[], None]], None] = together,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """Keep what the passes need; the class describes the arguments."""
        self.network = network
        self.group = group
        self._collectively = collectively
        self._before = before

    def turn(self, trains: bool) -> None:
        """Come to a pass of this rank: the caller does it next, with its backward pass where it
        `trains`, before anything else."""
        self._before()
        wanted = Turn.TRAIN if trains else Turn.READ
        while (agreed := self._agree(wanted)) != wanted:
            self.network.empty_pass(trains=agreed == Turn.TRAIN)

    def idle(self) -> None:
        """Do the passes of the other ranks until all of them are idle."""
        while (agreed := self._agree(Turn.IDLE)) != Turn.IDLE:
            self.network.empty_pass(trains=agreed == Turn.TRAIN)

    def _agree(self, wanted: Turn) -> Turn:
        """The most that any rank wants."""
        pulse.beat()
        most = torch.tensor([int(wanted)])

        def agree() -> None:
            distributed.all_reduce(most, distributed.ReduceOp.MAX, group=self.group)

        self._collectively(agree)
        return Turn(int(most))
