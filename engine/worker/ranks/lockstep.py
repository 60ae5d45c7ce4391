"""Keeps the forward passes of all ranks in step, for a base whose layers are sharded over them.

A pass gathers every layer from all ranks (processes of the run). So all ranks must do equally many
passes, of the same kind and in the same order, however much each has to compute. Before a pass each
rank says which kind it wants, and all learn the largest kind that any rank wants. A rank that
wanted less does an empty pass of the larger kind first. A rank that has nothing to do is idle: it
does empty passes along with the others until all are idle.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import Protocol

import torch
from torch import distributed

from engine.worker.core import pulse


class Turn(IntEnum):
    """What a rank wants to do next, from least to most: nothing, a forward pass, or a forward and a
    backward pass."""

    IDLE = 0
    READ = 1
    TRAIN = 2


class EmptyPasses(Protocol):
    """A network that can do an empty pass (one whose results are not used) for other ranks.

    Attributes:
        take_turn: called before each pass of the network's own, with whether a backward pass
            follows.
    """

    take_turn: Callable[[bool], None]

    def empty_pass(self, *, trains: bool) -> None:
        """Run one token through the layers, and if `trains` also back. No gradient changes."""
        ...


def run_collectively(call: Callable[[], None]) -> None:
    """Call `call`, this rank's side of a call that all ranks make at the same time. It stands in
    for a function that also translates errors."""
    call()


class Lockstep:
    """Keeps the passes of this rank in step with those of the other ranks."""

    def __init__(
        self,
        network: EmptyPasses,
        group: "distributed.ProcessGroup",
        collectively: Callable[[Callable[[], None]], None] = run_collectively,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare to keep passes in step; nothing is agreed yet.

        Args:
            network: the network whose layers are sharded.
            group: the ranks that hold these layers, connected by gloo on the CPU.
            collectively: makes a collective call and translates its errors.
            before: called before the ranks agree on a pass; rank 0 uses it to tell the others to
                come.
        """
        self.network = network
        self.group = group
        self._collectively = collectively
        self._before = before

    def turn(self, trains: bool) -> None:
        """Wait until all ranks are ready for a forward pass, with a backward pass if `trains`.

        Until then, this rank does empty passes (whose results are not used) along with the others.
        The caller must do its own pass next.
        """
        self._before()
        wanted = Turn.TRAIN if trains else Turn.READ
        agreed = self._agree(wanted)
        while agreed != wanted:  # another rank wants a larger kind of pass
            self.network.empty_pass(trains=agreed == Turn.TRAIN)
            agreed = self._agree(wanted)

    def idle(self) -> None:
        """Do empty passes (whose results are not used) along with the other ranks, until none of
        them wants a pass any more."""
        agreed = self._agree(Turn.IDLE)
        while agreed != Turn.IDLE:
            self.network.empty_pass(trains=agreed == Turn.TRAIN)
            agreed = self._agree(Turn.IDLE)

    def _agree(self, wanted: Turn) -> Turn:
        """Tell the other ranks which kind of pass this rank wants, and return the largest kind that
        any rank wants. All ranks call this at the same time."""
        pulse.beat()  # a sign of life
        largest_kind = torch.tensor([int(wanted)])

        def agree() -> None:
            """Replace `largest_kind` by its maximum over all ranks."""
            distributed.all_reduce(largest_kind, distributed.ReduceOp.MAX, group=self.group)

        self._collectively(agree)
        return Turn(int(largest_kind))
