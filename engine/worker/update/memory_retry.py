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

# In a run. If a 32nd of the estimated tokens does not fit either, the number of tokens is not what
# is too large.
MAX_HALVINGS = 5
# Where the state counts the halvings. Checkpoints hold it, so that a resumed run splits as before.
HALVINGS_KEY = "memory_halvings"

Sums = TypeVar("Sums", covariant=True)


class BatchPass(Protocol[Sums]):
    """A pass forward and backward over the batch of a step."""

    def run(self, token_limit: int) -> Sums:
        """Compute the gradients of the whole batch, at most `token_limit` tokens at a time."""
        ...

    def is_finest(self, token_limit: int) -> bool:
        """Whether with `token_limit` every row already goes alone, so that a smaller limit would
        change nothing."""
        ...


def tokens_at_once(budget: int, state: LoopState) -> int:
    """The most tokens of a microbatch: `budget` after the halvings that `state` counts."""
    return max(1, budget >> int(state.get(HALVINGS_KEY, 0)))  # a shift by n halves n times


@dataclass(frozen=True)
class MemoryRetry:
    """Runs a pass over a batch, again with half the tokens at once each time memory runs out.

    Attributes:
        budget: tokens at once before any halving.
        state: counts the halvings of the whole run; they are never taken back.
        clear_gradients: called to drop the gradients of an unfinished pass.
        report: called after each halving with the new limit of tokens at once and the error's
            message.
    """

    budget: int
    state: LoopState
    clear_gradients: Callable[[], None]
    report: Callable[[int, str], None]

    def run(self, batch_pass: BatchPass[Sums]) -> Sums:
        """Run `batch_pass` and return its result. Whenever memory runs out, run it again with half
        the tokens per microbatch.

        Raises:
            WorkerFailure: kind oom, when memory still runs out after `MAX_HALVINGS` halvings, or
                with every row alone.
        """
        while True:
            token_limit = tokens_at_once(self.budget, self.state)
            random_state = _random_state()
            try:
                return batch_pass.run(token_limit)
            except (RuntimeError, MemoryError) as error:  # torch's own errors are RuntimeErrors
                if not out_of_memory(error):
                    raise
                text = str(error).strip() or type(error).__name__
                message = text.splitlines()[0][:300]  # torch's messages are long
            # After the except block: within it the traceback keeps the pass's activations alive.
            every_row_alone = batch_pass.is_finest(token_limit)
            self._halve(token_limit, message, every_row_alone=every_row_alone)
            _restore_random_state(random_state)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self.report(tokens_at_once(self.budget, self.state), message)

    def _halve(self, token_limit: int, message: str, *, every_row_alone: bool) -> None:
        """Halve the token limit, by counting one more halving in the state, and drop the gradients
        of the unfinished pass. `token_limit` and `message`: the limit at which memory ran out, and
        the error.

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
        halvings = self.state.get(HALVINGS_KEY, 0)
        if halvings >= MAX_HALVINGS:
            raise WorkerFailure(
                "oom",
                f"Memory ran out although no more than {token_limit} tokens went through the model "
                f"at once, after {MAX_HALVINGS} halvings.",
                evidence=message,
                hint=HINTS["oom"],
            )
        self.state[HALVINGS_KEY] = halvings + 1
        self.clear_gradients()


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
