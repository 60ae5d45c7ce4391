"""A pass over a batch by all ranks (processes of a run), as rank 0 runs it.

Each rank adds the gradients of its part to its own copy of the adapter. Nothing is exchanged before
the optimizer step, whose all-reduce turns them into the gradients of the whole batch.
"""

from typing import Any

import torch

from engine.worker.core.failures import out_of_memory
from engine.worker.ranks.leader import Ranks
from engine.worker.ranks.messages import Begin, Done, OutOfMemory, Run
from engine.worker.ranks.parts import Shareable, merged, parts_of
from engine.worker.update.pending import Pending
from engine.worker.update.policy_update import PolicyPass


class SharedPass:
    """Passes over the batch of one step; a `BatchPass` (update/memory_retry.py)."""

    def __init__(self, ranks: Ranks, batch_pass: Shareable, seed: int) -> None:
        """Send each rank its part of the batch in `batch_pass`. `seed` decides the dropout that the
        other ranks draw; rank 0 draws from its own generator."""
        self.ranks = ranks
        self.batch_pass = batch_pass
        self.seed = seed
        self.passes = 0
        parts = parts_of(batch_pass, ranks.count)
        assert parts[0] is not None  # rank 0 gets the first item of any batch
        self.first_part = parts[0].on(batch_pass.policy)
        self.helpers: list[int] = []  # the other ranks that have a part
        for rank, part in enumerate(parts[1:], start=1):
            if part is not None:
                self.helpers.append(rank)
                ranks.tell(rank, Begin(part))

    def run(self, token_limit: int) -> Pending[Any]:
        """Add the gradients of all parts, at most `token_limit` tokens at a time on each rank.
        Returns what `batch_pass.run` would return.

        Raises torch.OutOfMemoryError if memory ran out on any rank, after all ranks have ended the
        pass.
        """
        # Only GRPO may pass over a batch several times.
        first = self.batch_pass.is_first_pass if isinstance(self.batch_pass, PolicyPass) else True
        self._start_helpers(token_limit, first=first)
        # The result of rank 0's part, or a message that memory ran out there.
        own_result: Pending[Any] | str
        try:
            own_result = self._run_first_part(token_limit, first=first)
        except (RuntimeError, MemoryError) as error:  # torch's own errors are RuntimeErrors
            # With a sharded base the other ranks wait for layers from this one, so a pass that
            # failed here cannot be given up and repeated.
            if not out_of_memory(error) or self.ranks.lockstep is not None:
                raise
            own_result = str(error) or type(error).__name__
        # Waited for even if memory ran out here: the others must have ended the pass before an
        # error is raised, because the pass is then repeated.
        results, memory_error = self._results_of_helpers()
        if isinstance(own_result, str):
            raise torch.OutOfMemoryError(own_result)
        if memory_error:
            raise torch.OutOfMemoryError(memory_error)
        pending = own_result

        def from_numbers(numbers: list[float]) -> Any:
            """Merge rank 0's result, once its numbers are read, with the other ranks' results."""
            return merged(self.batch_pass, [pending.from_numbers(numbers), *results])

        return Pending(pending.numbers, from_numbers, pending.loss_of)

    def _start_helpers(self, token_limit: int, *, first: bool) -> None:
        """Tell the other ranks to begin a pass over their parts, each with a seed of its own and
        with at most `token_limit` tokens at a time. `first` says whether it is the first pass over
        this batch."""
        self.passes += 1
        for rank in self.helpers:
            # The seeds of all ranks and passes of a step are far apart, because the seeds of steps
            # are neighbouring numbers.
            seed = self.seed + (rank << 40) + (self.passes << 32)
            self.ranks.tell(rank, Run(token_limit, first, seed))
        self.ranks.accompany(self.helpers)

    def _results_of_helpers(self) -> tuple[list[Any], str]:
        """Wait until the other ranks have ended the pass. Returns (their results, in the order of
        the ranks; the first message that memory ran out, or "")."""
        results: list[Any] = []
        memory_error = ""
        for rank in self.helpers:
            answer = self.ranks.answer(rank)
            if isinstance(answer, OutOfMemory):
                memory_error = memory_error or f"rank {rank}: {answer.message}"
            elif isinstance(answer, Done):
                results.append(answer.result)
        return results, memory_error

    def _run_first_part(self, token_limit: int, *, first: bool) -> Pending[Any]:
        """Run the pass over rank 0's part of the batch (`first_part`), with at most `token_limit`
        tokens at a time. `first` says whether it is the first pass over this batch. Returns the
        pending sums of this part alone.

        Of a `PolicyPass`, the pass over the whole batch then has the microbatches of this part.
        """
        part, whole = self.first_part, self.batch_pass
        # Both are passes of one class. Only a `PolicyPass` keeps a state between the passes over a
        # batch; the loop (grpo.py) sets and reads that of `whole`, which is not run itself.
        if isinstance(part, PolicyPass) and isinstance(whole, PolicyPass):
            part.is_first_pass = first
            pending = part.run(token_limit)
            whole.microbatches = part.microbatches  # the loop counts them for its metrics
            return pending
        return part.run(token_limit)

    def is_finest(self, token_limit: int) -> bool:
        """Tell whether `token_limit` already puts every item of the batch into a microbatch of its
        own, so that a smaller limit would change nothing."""
        return self.batch_pass.is_finest(token_limit)
