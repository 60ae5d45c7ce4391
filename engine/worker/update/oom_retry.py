"""A step that ran out of memory is done again in smaller microbatches.

The loss is divided by the whole batch's tokens, so the gradient is the same sum however the batch
is split: half the tokens at once and twice the passes is the same update within rounding. Model,
lengths and groups stay as they were asked for.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from engine.worker.core.failures import HINTS, WorkerFailure, out_of_memory

HALVINGS = 5  # of a run; a 32nd of what the memory was reckoned to hold: something else is too big
KEY = "memory_halvings"  # in what checkpoints carry: a resumed run splits its batches as before

Found = TypeVar("Found")


def tokens_at_once(budget: int, extra: dict[str, Any]) -> int:
    """What is left of a microbatch's token budget after the halvings so far; at least 1."""
    return max(1, budget >> int(extra.get(KEY, 0)))


def until_it_fits(
    attempt: Callable[[int], Found],
    *,
    budget: int,
    extra: dict[str, Any],
    clear: Callable[[], None],
    tell: Callable[[int, str], None],
    finest: Callable[[int], bool] = lambda _: False,
) -> Found:
    """What `attempt(tokens)` returns, with half the tokens each time memory runs out.

    Args:
        attempt: goes forward and backward in microbatches of at most that many tokens.
        budget: tokens at once before any halving.
        extra: counts the halvings of the run, for good.
        clear: drops the gradients an unfinished attempt left.
        tell: says that from now on so many tokens go at once, and what the failure said.
        finest: whether at so many tokens every row goes alone already, so that fewer tokens would
            only do the same again.

    Raises:
        WorkerFailure: kind oom, after `HALVINGS` of them or where nothing can be split.
    """
    while True:
        tokens = tokens_at_once(budget, extra)
        chance = _chance()
        try:
            return attempt(tokens)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            said = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        # Outside of the except block: the traceback keeps the activations of the attempt alive.
        if finest(tokens):
            raise WorkerFailure(
                "oom",
                "Memory ran out although every row went through the model alone.",
                evidence=said,
                hint=HINTS["oom"],
            )
        if extra.get(KEY, 0) >= HALVINGS:
            raise WorkerFailure(
                "oom",
                f"Memory ran out although no more than {tokens} tokens went through the model at "
                f"once, after {HALVINGS} halvings.",
                evidence=said,
                hint=HINTS["oom"],
            )
        extra[KEY] = extra.get(KEY, 0) + 1
        clear()
        _restore(chance)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        tell(tokens_at_once(budget, extra), said)


def _chance() -> list[torch.Tensor]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *cuda]


def _restore(chance: list[torch.Tensor]) -> None:
    torch.set_rng_state(chance[0])
    if len(chance) > 1:
        torch.cuda.set_rng_state_all(chance[1:])
