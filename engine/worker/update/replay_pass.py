"""GRPO's pass over a batch, with a supervised pass over replayed rows (the rows of setting
`keep`)."""

from collections.abc import Sequence

import torch

from engine.worker.core.batch import Row
from engine.worker.update.memory_retry import BatchPass
from engine.worker.update.pending import Pending
from engine.worker.update.policy_update import PassSums, PolicyPass
from engine.worker.update.supervised import SupervisedPass


class PassWithReplay:
    """GRPO's pass over a batch, and then a supervised pass over replayed rows; a `BatchPass`
    (memory_retry.py). The gradients of both add up.

    Attributes:
        first: does GRPO's part: `policy_pass`, or all ranks (processes) of the run together. The
            replayed rows are few, and rank 0 alone reads them.
        replayed_rows: those of this step.
        replay_loss: the loss of the replayed rows in the last pass, in nats per token; None if
            there are none.
    """

    def __init__(self, policy_pass: PolicyPass, replayed_rows: Sequence[Row]) -> None:
        """Prepare both passes: `policy_pass` over the batch, and a supervised one over the
        `replayed_rows`. Without such rows there is only GRPO's pass."""
        self.policy_pass = policy_pass
        self.first: BatchPass[Pending[list[PassSums]]] = policy_pass
        self.replay_loss: float | None = None
        self.replayed_rows = replayed_rows
        self._replay = SupervisedPass(policy_pass.policy, replayed_rows, packing=True)

    def run(self, token_limit: int) -> Pending[list[PassSums]]:
        """Add the gradients of both passes, in microbatches of at most `token_limit` tokens.
        Returns the pending sums of GRPO's pass. Reading them also sets `replay_loss`: the numbers
        of both passes are one tensor, so that the device is waited for once."""
        grpo = self.first.run(token_limit)
        if not self.replayed_rows:
            return grpo
        replayed = self._replay.run(token_limit)
        grpo_count = len(grpo.numbers)

        def read_both(numbers: list[float]) -> list[PassSums]:
            """Set `replay_loss` and return GRPO's sums, from the numbers of both passes: GRPO's
            come first, the replayed rows' after them."""
            self.replay_loss = replayed.from_numbers(numbers[grpo_count:]).loss
            return grpo.from_numbers(numbers[:grpo_count])

        return Pending(torch.cat([grpo.numbers, replayed.numbers]), read_both, grpo.loss_of)

    def is_finest(self, token_limit: int) -> bool:
        """Whether `token_limit` already puts every row of both passes into a microbatch of its
        own."""
        return self.policy_pass.is_finest(token_limit) and self._replay.is_finest(token_limit)
