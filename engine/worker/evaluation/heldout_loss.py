"""The loss on held-out conversations, for runs that learn from rows (SFT and DPO)."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.worker.core import pulse
from engine.worker.core.batch import Row
from engine.worker.network.policy import Policy


@dataclass(frozen=True)
class MeasuredLoss:
    """The loss of one held-out task.

    Attributes:
        total: the sum of the task's loss terms: one per token (SFT), or one per pair (DPO).
        weight: the number of these terms.
        tokens: how many tokens have a loss.
    """

    task_id: str
    total: float
    weight: int
    tokens: int

    @property
    def loss(self) -> float:
        """The mean over the task's loss terms: the loss per token, or the loss of the pair."""
        return self.total / max(1, self.weight)


class HeldoutLoss(Protocol):
    """The held-out conversations of a run, and how their loss is measured."""

    def measure(
        self, policy: Policy, tasks: Collection[str], budget: int
    ) -> Sequence[MeasuredLoss]:
        """Measure the losses of those conversations whose task id is in `tasks`, with at most
        `budget` tokens in a forward pass. Gradients and random state do not change."""
        ...


@dataclass(frozen=True)
class LossRow:
    """A held-out conversation, or one of the rows that it is split into, for measuring the loss."""

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
        """Measure the loss of each conversation whose task id is in `tasks`, with at most `budget`
        tokens in a forward pass (implements `HeldoutLoss`). A conversation's weight is the number
        of supervised tokens in all its rows."""
        rows = [row for row in self.rows if row.task_id in tasks]
        measured: list[MeasuredLoss] = []
        for row_indices in policy.base.network.split([row.row for row in rows], budget):
            measured += _row_losses(policy, [rows[index] for index in row_indices])
            pulse.beat()  # a sign of life
        return _summed_by_task(measured)


def _row_losses(policy: Policy, rows: Sequence[LossRow]) -> list[MeasuredLoss]:
    """Compute the loss of each row in one forward pass. A row's loss is the sum over its supervised
    tokens, and its weight is their number."""
    network = policy.base.network
    batch = network.collate([row.row for row in rows])
    logprobs, _ = network.logprobs(batch, policy.adapter)  # one per supervised token
    row_of_token = batch.row.cpu()
    sums = torch.zeros(len(rows)).index_add(0, row_of_token, -logprobs.cpu())
    counts = torch.bincount(row_of_token, minlength=len(rows))
    return [
        MeasuredLoss(row.task_id, total, weight=count, tokens=count)
        for row, total, count in zip(rows, sums.tolist(), counts.tolist(), strict=True)
    ]


def _summed_by_task(row_losses: Sequence[MeasuredLoss]) -> list[MeasuredLoss]:
    """Sum the losses of each task over its rows; tasks are in the order of their first rows."""
    by_task: dict[str, MeasuredLoss] = {}
    for row in row_losses:
        nothing = MeasuredLoss(row.task_id, total=0.0, weight=0, tokens=0)
        earlier = by_task.get(row.task_id, nothing)
        by_task[row.task_id] = MeasuredLoss(
            row.task_id,
            earlier.total + row.total,
            weight=earlier.weight + row.weight,
            tokens=earlier.tokens + row.tokens,
        )
    return list(by_task.values())
