"""Does a step again in smaller microbatches if memory ran out.

The loss is divided by the whole batch's tokens, so the gradient is the same sum however the batch
is split: half the tokens at once and twice the passes is the same update within rounding. Model,
lengths and groups stay as the user asked.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from engine.worker.core.failures import HINTS, WorkerFailure, out_of_memory
from engine.worker.core.job import LoopState

# The most halvings in a run. If a 32nd of the estimated tokens does not fit either, something else
# than the number of tokens is too large.
MAX_HALVINGS = 5
# The key under which the loop's state counts halvings. Checkpoints store the state, so that a
# resumed run splits its batches as before.
HALVINGS_KEY = "memory_halvings"

Sums = TypeVar("Sums", covariant=True)


class BatchPass(Protocol[Sums]):
    """A pass forward and backward over the batch of one step."""

    def run(self, token_limit: int) -> Sums:
        """Add the gradients of the whole batch to the parameters' gradients, at most `token_limit`
        tokens at a time. Returns sums of the pass, such as its loss."""
        ...

    def is_finest(self, token_limit: int) -> bool:
        """Whether `token_limit` already puts every row into a microbatch of its own, so that a
        smaller limit would change nothing."""
        ...


def tokens_at_once(budget: int, state: LoopState) -> int:
    """Return the most tokens of a microbatch: `budget`, halved as often as the loop's state counts
    halvings, but at least 1."""
    halvings = int(state.get(HALVINGS_KEY, 0))
    return max(1, budget >> halvings)  # a shift by n halves n times


@dataclass(frozen=True)
class MemoryRetry:
    """Runs a pass over a batch. Each time memory runs out, runs it again with half the tokens at
    once.

    Attributes:
        budget: tokens at once before any halving.
        state: counts the halvings of the whole run; they are never undone.
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
            WorkerFailure: kind oom, if memory still runs out after `MAX_HALVINGS` halvings, or with
                every row alone.
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
            # This stands after the except block, because inside that the traceback keeps the memory
            # of the pass's activations in use.
            every_row_alone = batch_pass.is_finest(token_limit)
            self._halve(token_limit, message, every_row_alone=every_row_alone)
            _restore_random_state(random_state)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self.report(tokens_at_once(self.budget, self.state), message)

    def _halve(self, token_limit: int, message: str, *, every_row_alone: bool) -> None:
        """Halve the token limit, by counting one more halving in the state, and drop the gradients
        of the unfinished pass. `token_limit` is the limit at which memory ran out, `message` the
        error's.

        Raises:
            WorkerFailure: kind oom, if every row already went alone, or after MAX_HALVINGS
                halvings.
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
    """Return the states of torch's random generators: the CPU's first, then one for each GPU. If
    this process uses no GPU, there is only the first."""
    gpu_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *gpu_states]


def _restore_random_state(random_state: list[torch.Tensor]) -> None:
    """Restore torch's generators to a state that `_random_state` returned, so that a repeated pass
    draws the same dropout."""
    cpu_state, *gpu_states = random_state
    torch.set_rng_state(cpu_state)
    if gpu_states:
        torch.cuda.set_rng_state_all(gpu_states)
