"""The loss of held-out conversations, for runs that learn from rows."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.worker.core.batch import Row
from engine.worker.network.policy import Policy


@dataclass(frozen=True)
class MeasuredLoss:
    """The loss of one held-out task.

    Attributes:
        total: the sum over its terms, whose number is `weight`: its tokens, or one for a pair.
        tokens: how many tokens have a loss.
    """

    task_id: str
    total: float
    weight: int
    tokens: int

    @property
    def loss(self) -> float:
        return self.total / max(1, self.weight)


class HeldoutLoss(Protocol):
    """The held-out conversations of a run, and how their loss is measured."""

    def measure(
        self, policy: Policy, tasks: Collection[str], budget: int
    ) -> Sequence[MeasuredLoss]:
        """The losses of those conversations that belong to `tasks`, with at most `budget` tokens in
        a forward pass. Gradients and random state do not change."""
        ...


@dataclass(frozen=True)
class LossRow:
    """A held-out conversation, or one of the rows it is split into, to measure the loss on."""

    task_id: str
    row: Row


@dataclass(frozen=True)
class CrossEntropy:
    """The mean cross-entropy over the supervised tokens of conversations (SFT)."""

    rows: Sequence[LossRow]

    @torch.no_grad()
    def measure(
        self, policy: Policy, tasks: Collection[str], budget: int
    ) -> Sequence[MeasuredLoss]:
        """The loss of each conversation whose task is in `tasks`; see `HeldoutLoss`. Its weight is
        the number of supervised tokens in all its rows."""
        rows = [row for row in self.rows if row.task_id in tasks]
        network = policy.base.network
        losses: dict[str, float] = {}  # summed cross-entropy of each task
        tokens: dict[str, int] = {}
        for members in network.split([r.row for r in rows], budget):
            batch = network.collate([rows[i].row for i in members])
            logprobs, _ = network.logprobs(batch, policy.adapter)
            # For each row of the microbatch: its summed cross-entropy, and its supervised tokens.
            sums = torch.zeros(len(members)).index_add(0, batch.row.cpu(), -logprobs.cpu())
            counts = torch.bincount(batch.row.cpu(), minlength=len(members))
            for position, index in enumerate(members):
                task = rows[index].task_id
                losses[task] = losses.get(task, 0.0) + float(sums[position])
                tokens[task] = tokens.get(task, 0) + int(counts[position])
        return [
            MeasuredLoss(task, loss, weight=tokens[task], tokens=tokens[task])
            for task, loss in losses.items()
        ]
