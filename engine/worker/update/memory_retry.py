"""A step that ran out of memory is done again in smaller microbatches.

The loss is divided by the whole batch's tokens, so the gradient is the same sum however the batch
is split: half the tokens at once and twice the passes is the same update within rounding. Model,
lengths and groups stay as they were asked for.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from engine.worker.core.failures import HINTS, WorkerFailure, out_of_memory
from engine.worker.core.job import LoopState

HALVINGS = 5  # of a run; a 32nd of what the memory was reckoned to hold: something else is too big
KEY = "memory_halvings"  # in what checkpoints carry: a resumed run splits its batches as before

Sums = TypeVar("Sums", covariant=True)


class BatchPass(Protocol[Sums]):
    """A pass forward and backward over the batch of a step."""

    def run(self, tokens: int) -> Sums:
        """Gradients of the whole batch, in microbatches of at most `tokens`."""
        ...

    def is_finest(self, tokens: int) -> bool:
        """Whether at so many tokens every row goes alone, so that fewer would change nothing."""
        ...


def tokens_at_once(budget: int, state: LoopState) -> int:
    """What is left of a microbatch's token budget after the halvings so far; at least 1."""
    return max(1, budget >> int(state.get(KEY, 0)))


@dataclass(frozen=True)
class MemoryRetry:
    """Runs a pass, with half the tokens each time memory runs out.

    Attributes:
        budget: tokens at once before any halving.
        state: counts the halvings of the run, for good.
        clear: drops the gradients that an unfinished pass left.
        tell: is told how many tokens go at once from now on, and what the failure said.
    """

    budget: int
    state: LoopState
    clear: Callable[[], None]
    tell: Callable[[int, str], None]

    def run(self, batch_pass: BatchPass[Sums]) -> Sums:
        """What `batch_pass` returns once it fits.

        Raises WorkerFailure: kind oom, after `HALVINGS` of them or where nothing can be split.
        """
        while True:
            tokens = tokens_at_once(self.budget, self.state)
            random_state = _random_state()
            try:
                return batch_pass.run(tokens)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                message = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
            # Outside of the except block: the traceback keeps the pass's activations alive.
            self._halve(tokens, message, alone=batch_pass.is_finest(tokens))
            _restore(random_state)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self.tell(tokens_at_once(self.budget, self.state), message)

    def _halve(self, tokens: int, message: str, *, alone: bool) -> None:
        """Count one halving and drop half-made gradients. Raises WorkerFailure (oom) where none is
        left."""
        if alone:
            raise WorkerFailure(
                "oom",
                "Memory ran out although every row went through the model alone.",
                evidence=message,
                hint=HINTS["oom"],
            )
        if self.state.get(KEY, 0) >= HALVINGS:
            raise WorkerFailure(
                "oom",
                f"Memory ran out although no more than {tokens} tokens went through the model at "
                f"once, after {HALVINGS} halvings.",
                evidence=message,
                hint=HINTS["oom"],
            )
        self.state[KEY] = self.state.get(KEY, 0) + 1
        self.clear()


def _random_state() -> list[torch.Tensor]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *cuda]


def _restore(random_state: list[torch.Tensor]) -> None:
    torch.set_rng_state(random_state[0])
    if len(random_state) > 1:
        torch.cuda.set_rng_state_all(random_state[1:])
