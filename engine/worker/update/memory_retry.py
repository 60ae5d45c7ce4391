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

# Most halvings in a run. A 32nd of the estimated tokens does not fit either then, so it is not the
# number of tokens that is too large.
HALVINGS = 5
# Where the state, which checkpoints hold, counts the halvings: a resumed run splits as before.
KEY = "memory_halvings"

Sums = TypeVar("Sums", covariant=True)


class BatchPass(Protocol[Sums]):
    """A pass forward and backward over the batch of a step."""

    def run(self, tokens: int) -> Sums:
        """Compute the gradients of the whole batch, in microbatches of at most `tokens`."""
        ...

    def is_finest(self, tokens: int) -> bool:
        """Whether in microbatches of at most `tokens` tokens every row already goes alone, so that
        a smaller limit would change nothing."""
        ...


def tokens_at_once(budget: int, state: LoopState) -> int:
    """The most tokens of a microbatch: `budget`, halved as often as `state` counts, at least 1."""
    return max(1, budget >> int(state.get(KEY, 0)))


@dataclass(frozen=True)
class MemoryRetry:
    """Runs a pass over a batch, again with half the tokens at once each time memory runs out.

    Attributes:
        budget: tokens at once before any halving.
        state: counts the halvings of the whole run; they are never taken back.
        clear: called to drop the gradients that an unfinished pass left.
        tell: called after each halving with the new number of tokens at once and the error's
            message.
    """

    budget: int
    state: LoopState
    clear: Callable[[], None]
    tell: Callable[[int, str], None]

    def run(self, batch_pass: BatchPass[Sums]) -> Sums:
        """Run `batch_pass` and return its result. Whenever memory runs out, run it again with half
        the tokens per microbatch.

        Raises:
            WorkerFailure: kind oom, when memory still runs out after `HALVINGS` halvings, or with
                every row alone.
        """
        while True:
            tokens = tokens_at_once(self.budget, self.state)
            random_state = _random_state()
            try:
                return batch_pass.run(tokens)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                # The first line is enough: torch's messages are long.
                message = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
            # Outside the except block: inside, the traceback keeps the pass's activations alive.
            self._halve(tokens, message, every_row_alone=batch_pass.is_finest(tokens))
            _restore_random_state(random_state)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self.tell(tokens_at_once(self.budget, self.state), message)

    def _halve(self, tokens: int, message: str, *, every_row_alone: bool) -> None:
        """Count one more halving of the token limit and drop the gradients of the unfinished pass.

        Args:
            tokens: the limit in the pass that failed.
            message: the first line of its error.
            every_row_alone: whether every row already went alone in that pass.

        Raises:
            WorkerFailure: kind oom, when the batch cannot be split further.
        """
        if every_row_alone:
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
    """The state of torch's random generators: the CPU's first, then one for each GPU in use."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *cuda]


def _restore_random_state(random_state: list[torch.Tensor]) -> None:
    """Restore the generators to a state that `_random_state` returned, so that a repeated pass
    draws the same dropout."""
    torch.set_rng_state(random_state[0])
    if len(random_state) > 1:  # after the CPU's come those of the GPUs
        torch.cuda.set_rng_state_all(random_state[1:])
