"""One pass of the cross-entropy over the rows of an SFT step."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from engine.worker.core.batch import Row
from engine.worker.network.policy import Policy
from engine.worker.update.losses import cross_entropy
from engine.worker.update.pending import Pending


class SupervisedSums(NamedTuple):
    """What a pass came to: the loss in nats per token, and how many microbatches there were."""

    loss: float
    microbatches: int


class SupervisedPass:
    """Forward and backward over the rows of one step; a `BatchPass` (update/memory_retry.py).

    Attributes:
        supervised_tokens: how many tokens of the batch are trained.
    """

    def __init__(
        self,
        policy: Policy,
        batch: Sequence[Row],
        *,
        packing: bool,
        supervised_tokens: int | None = None,
    ) -> None:
        """Prepare passes over the rows in `batch`, which add to the gradients of `policy`.

        Args:
            packing: several rows go through the model together; without it each goes alone.
            supervised_tokens: what the loss is divided by, where `batch` is a part of a larger one;
                None: the supervised tokens of `batch`.
        """
        self.policy = policy
        self.batch = batch
        self.packing = packing
        if supervised_tokens is None:
            supervised_tokens = sum(sum(row.loss_mask) for row in batch)
        self.supervised_tokens = supervised_tokens

    def run(self, token_limit: int) -> Pending[SupervisedSums]:
        """Add the gradients of the batch's loss, the mean over all its supervised tokens, to the
        adapter, in microbatches of at most `token_limit` tokens."""
        losses: list[torch.Tensor] = []
        microbatches = self._split(token_limit)
        for rows in microbatches:
            logprobs, _ = self.policy.logprobs(self.policy.collate(rows))
            microbatch_loss = cross_entropy(logprobs, self.supervised_tokens).sum()
            microbatch_loss.backward()
            losses.append(microbatch_loss.detach())
        count = len(microbatches)
        return Pending(torch.stack(losses).double(), lambda each: SupervisedSums(sum(each), count))

    def is_finest(self, token_limit: int) -> bool:
        """Whether with `token_limit` every row already goes alone, so that a smaller limit would
        change nothing."""
        return len(self._split(token_limit)) == len(self.batch)

    def _split(self, token_limit: int) -> list[list[Row]]:
        """The rows in microbatches of at most `token_limit` tokens; one row each if not packing."""
        if not self.packing:
            return [[row] for row in self.batch]
        groups = self.policy.split(self.batch, token_limit)
        return [[self.batch[i] for i in indices] for indices in groups]
