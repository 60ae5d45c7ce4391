"""One pass of the cross-entropy loss over the rows of an SFT step."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from engine.worker.core.batch import Row
from engine.worker.network.policy import Policy
from engine.worker.update.losses import cross_entropy
from engine.worker.update.pending import Pending


class SupervisedSums(NamedTuple):
    """The result of a pass: the loss in nats per token, and the number of microbatches."""

    loss: float
    microbatches: int


class SupervisedPass:
    """A pass forward and backward over the rows of one step; a `BatchPass`
    (update/memory_retry.py).

    Attributes:
        supervised_tokens: the number of trained tokens, by which the loss is divided.
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
            packing: several rows go through the model together; otherwise each row goes alone.
            supervised_tokens: what the loss is divided by if `batch` is a part of a larger batch;
                None: the number of trained tokens in `batch`.
        """
        self.policy = policy
        self.batch = batch
        self.packing = packing
        if supervised_tokens is None:
            supervised_tokens = sum(sum(row.loss_mask) for row in batch)
        self.supervised_tokens = supervised_tokens

    def run(self, token_limit: int) -> Pending[SupervisedSums]:
        """Add the gradients of the batch's loss (the mean over all its trained tokens) to the
        adapter's gradients, in microbatches of at most `token_limit` tokens. Returns the pending
        loss and the number of microbatches."""
        losses: list[torch.Tensor] = []
        microbatches = self._split(token_limit)
        for rows in microbatches:
            logprobs, _ = self.policy.logprobs(self.policy.collate(rows))
            microbatch_loss = cross_entropy(logprobs, self.supervised_tokens).sum()
            microbatch_loss.backward()
            losses.append(microbatch_loss.detach())

        def sums_from_numbers(numbers: list[float]) -> SupervisedSums:
            """Add up the losses of the microbatches, once the host has read them."""
            return SupervisedSums(sum(numbers), len(microbatches))

        return Pending(torch.stack(losses).double(), sums_from_numbers)

    def is_finest(self, token_limit: int) -> bool:
        """Whether `token_limit` already puts every row into a microbatch of its own, so that a
        smaller limit would change nothing."""
        return len(self._split(token_limit)) == len(self.batch)

    def _split(self, token_limit: int) -> list[list[Row]]:
        """Divide the rows into microbatches of at most `token_limit` tokens, or of one row each if
        packing is off."""
        if not self.packing:
            return [[row] for row in self.batch]
        microbatches: list[list[Row]] = []
        for row_indices in self.policy.split(self.batch, token_limit):
            microbatches.append([self.batch[index] for index in row_indices])
        return microbatches
