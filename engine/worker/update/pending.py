"""What a pass over a batch has left on its device, read by the host once per optimizer step.

On a GPU each number that is asked for makes the host wait until all that was started before is
done, and meanwhile it starts nothing new.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from engine.worker.core.failures import WorkerFailure

Sums = TypeVar("Sums")


def _loss_of(sums: Any) -> float:
    return float(sums.loss)


@dataclass(frozen=True)
class Pending(Generic[Sums]):
    """The result of a pass, of which the numbers are still on the device.

    Attributes:
        numbers: [n] float64.
        of: the result, from those numbers.
        loss_of: the loss of the whole batch, from the result.
    """

    numbers: torch.Tensor
    of: Callable[[list[float]], Sums]
    loss_of: Callable[[Sums], float] = _loss_of

    def read(self) -> Sums:
        """The result; waits for the device."""
        return self.of(self.numbers.tolist())


class Reading(Generic[Sums]):
    """Reads a pending result together with one more number of the device.

    Attributes:
        sums: the result, once it is read.
    """

    sums: Sums

    def __init__(self, pending: Pending[Sums], step: int) -> None:
        """Read nothing yet. `step`: number of the optimizer step, for the message."""
        self.pending = pending
        self.step = step

    def __call__(self, number: torch.Tensor) -> float:
        """Wait for the device once: sets `sums` and returns the number in the tensor [].

        Raises:
            WorkerFailure: kind nonfinite, when the result's loss is NaN or infinite.
        """
        numbers = torch.cat([self.pending.numbers, number.detach().double().reshape(1)])
        *of_result, last = numbers.tolist()
        self.sums = self.pending.of(of_result)
        loss = self.pending.loss_of(self.sums)
        if not math.isfinite(loss):
            raise WorkerFailure(
                "nonfinite",
                "The loss became NaN or infinite.",
                evidence=f"step {self.step}: loss {loss}",
            )
        return last
