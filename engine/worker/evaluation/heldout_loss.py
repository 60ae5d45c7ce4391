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
        losses: dict[str, float] = {}  # summed cross-entropy of each task
        tokens: dict[str, int] = {}  # how many of its tokens are supervised
        for members in policy.base.network.split([r.row for r in rows], budget):
            microbatch = [rows[i] for i in members]
            sums = _summed_losses(policy, [row.row for row in microbatch])
            for row, (row_loss, row_tokens) in zip(microbatch, sums, strict=True):
                losses[row.task_id] = losses.get(row.task_id, 0.0) + row_loss
                tokens[row.task_id] = tokens.get(row.task_id, 0) + row_tokens
        return [
            MeasuredLoss(task, loss, weight=tokens[task], tokens=tokens[task])
            for task, loss in losses.items()
        ]


def _summed_losses(policy: Policy, rows: Sequence[Row]) -> list[tuple[float, int]]:
    """For each row (its cross-entropy summed over its supervised tokens, the number of these). All
    rows go through the model together."""
    network = policy.base.network
    batch = network.collate(rows)
    logprobs, _ = network.logprobs(batch, policy.adapter)
    row_of_token = batch.row.cpu()
    sums = torch.zeros(len(rows)).index_add(0, row_of_token, -logprobs.cpu())
    counts = torch.bincount(row_of_token, minlength=len(rows))
    return list(zip(sums.tolist(), counts.tolist(), strict=True))
