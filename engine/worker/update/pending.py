"""The results of a pass over a batch that are still on the device. The host reads them once per
optimizer step.

On a GPU, each number that the host reads makes it wait until all earlier work is done. Meanwhile it
cannot start new work.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from engine.worker.core.failures import WorkerFailure

Sums = TypeVar("Sums")


def _loss_of(sums: Any) -> float:
    """Return the attribute `loss` of a pass's result. Results without one need another function."""
    return float(sums.loss)


@dataclass(frozen=True)
class Pending(Generic[Sums]):
    """The result of a pass, whose numbers are still on the device.

    Attributes:
        numbers: [n] float64.
        from_numbers: makes the result from these numbers.
        loss_of: returns the loss of the whole batch, given the result.
    """

    numbers: torch.Tensor
    from_numbers: Callable[[list[float]], Sums]
    loss_of: Callable[[Sums], float] = _loss_of

    def read(self) -> Sums:
        """Copy the numbers from the device, which waits until it has computed them, and return the
        result made of them."""
        return self.from_numbers(self.numbers.tolist())


class Reading(Generic[Sums]):
    """Reads a pending result together with one more number from the device, so that the host waits
    once.

    Attributes:
        sums: the result, once it is read.
    """

    sums: Sums

    def __init__(self, pending: Pending[Sums], step: int) -> None:
        """Store the pending result; nothing is read yet. `step` is the number of the optimizer
        step, for an error message."""
        self.pending = pending
        self.step = step

    def __call__(self, number: torch.Tensor) -> float:
        """Wait for the device once, set `sums` to the result, and return the number in `number`, a
        tensor of shape [].

        Raises:
            WorkerFailure: kind nonfinite, if the loss in the result is NaN or infinite.
        """
        numbers = torch.cat([self.pending.numbers, number.detach().double().reshape(1)])
        *result_numbers, last = numbers.tolist()
        self.sums = self.pending.from_numbers(result_numbers)
        loss = self.pending.loss_of(self.sums)
        if not math.isfinite(loss):
            raise WorkerFailure(
                "nonfinite",
                "The loss became NaN or infinite.",
                evidence=f"step {self.step}: loss {loss}",
            )
        return last
