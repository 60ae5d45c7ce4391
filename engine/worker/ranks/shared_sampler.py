"""A sampler that samples on several ranks (processes of a run), as rank 0 uses it.

Either all ranks sample, rank 0 included, or some ranks only sample, and produce the next batch
while the others train. A completion's random numbers follow from its number and its prompt's number
in the whole call (network/sampler.py), so it does not matter which rank samples it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from engine.worker.core import pulse
from engine.worker.core.trajectory import Completion
from engine.worker.network.sampler import OnCompletion, Sampler, SamplingParams
from engine.worker.ranks import collective
from engine.worker.ranks.leader import Ranks
from engine.worker.ranks.messages import Ended, Generate, Load, ReleaseMemory
from engine.worker.ranks.shares import cut


class SharedSampler:
    """Samples with `sampler` and with the samplers of the other ranks; see the protocol `Sampler`.

    Without a `sampler`, only the ranks that do nothing else sample (`samples_elsewhere`), on the
    orders of one thread of rank 0.
    """

    def __init__(self, sampler: Sampler | None, ranks: Ranks) -> None:
        """Sample on all ranks of `ranks` that sample. `sampler` is the one of this rank; None if
        this rank trains while others sample."""
        self.sampler = sampler
        self.ranks = ranks
        self.name = sampler.name if sampler else "torch"
        self.samples_elsewhere = self.samples_beside_training = sampler is None
        self._loaded: tuple[Any, int] | None = None  # adapter and version of ranks elsewhere

    def load(self, adapter: Any) -> None:
        """Make all ranks sample with this adapter from now on, or with the base alone if it is
        None. The weights are sent to the other ranks unless these have them already."""
        if self.sampler is not None:
            self.sampler.load(adapter)
        version = (adapter, adapter.version) if adapter is not None else None
        if adapter is None:
            self.ranks.carry_out(Load("base"), self.ranks.samplers)
        # Ranks that train as well have the policy's present weights after each step.
        elif self.sampler is not None and self.ranks.have_weights_of(adapter):
            self.ranks.carry_out(Load("policy"), self.ranks.samplers)
        # Ranks that only sample keep what they were sent last.
        elif self.sampler is not None or version != self._loaded:
            broadcast_weights = partial(collective.broadcast_weights, adapter)
            self.ranks.carry_out(
                Load("handed on"), self.ranks.samplers, collective_call=broadcast_weights
            )
        self._loaded = version

    def generate(
        self,
        prompts: Sequence[list[int]],
        n: int,
        params: SamplingParams,
        done: OnCompletion | None = None,
    ) -> list[list[Completion]]:
        """Sample `n` completions of each prompt on all sampling ranks, and return them in the order
        of the prompts. `done` is called in this thread with each completion as it ends, also with
        those of other ranks: (index of the prompt, number among its completions, completion)."""
        call = _SharedCall(prompts, n, params, done, self.ranks)
        return call.sample(self.sampler)

    def stream(self, prompt: list[int], params: SamplingParams) -> Iterator[int]:
        """Sample one completion and yield its ids: one by one as this rank draws them, or, if this
        rank does not sample, after another rank has finished the completion."""
        if self.sampler is None:
            ((completion,),) = self.generate([prompt], 1, params)
            return iter(completion.ids)
        return self.sampler.stream(prompt, params)

    def release_memory(self) -> None:
        """Release the memory that no rank needs until its sampler's next call. Ranks that only
        sample keep theirs."""
        if self.sampler is not None:
            self.sampler.release_memory()
            self.ranks.carry_out(ReleaseMemory(), self.ranks.samplers)

    def close(self) -> None:
        """Close the sampler of this rank. Those of other ranks end with their processes."""
        if self.sampler is not None:
            self.sampler.close()


def _part_of_each_rank(ranks: Ranks, count: int) -> dict[int, range]:
    """Divide the numbers 0 to `count` - 1 of the completions among the ranks that sample. Returns
    the range of each rank, by its number. Ranks that sample none are left out."""
    rank_0 = [] if ranks.samples_beside else [0]  # rank 0 does not sample if others only sample
    members = [*rank_0, *ranks.samplers]
    parts = cut([1.0] * count, len(members))
    return {rank: part for rank, part in zip(members, parts, strict=True) if part}


class _SharedCall:
    """One call of `SharedSampler.generate`; `__init__` takes the same arguments."""

    def __init__(
        self,
        prompts: Sequence[list[int]],
        n: int,
        params: SamplingParams,
        done: OnCompletion | None,
        ranks: Ranks,
    ) -> None:
        """Divide `n` completions of each prompt among the ranks that sample; nothing is sampled
        yet. `done` is called with each completion: (index of the prompt, number among its
        completions, completion)."""
        self.prompts = prompts
        self.params = params
        self.done = done
        self.ranks = ranks
        # (number of the prompt, number among its completions) of each completion to sample.
        self.places = [(prompt, member) for prompt in range(len(prompts)) for member in range(n)]
        self.parts = _part_of_each_rank(ranks, len(self.places))  # ranges of `places`
        self.completions: dict[tuple[int, int], Completion] = {}
        self.helpers = [rank for rank in self.parts if rank > 0]
        self.n = n

    def sample(self, sampler: Sampler | None) -> list[list[Completion]]:
        """Sample rank 0's part with `sampler` while the others sample theirs. Returns the
        completions of each prompt, in the order of the prompts."""
        for rank in self.helpers:
            self.ranks.tell(rank, self._order_of(self.parts[rank]))
        # With a sharded base, ranks without a part must do empty passes along with the others.
        self.ranks.accompany(self.helpers)
        if sampler is not None and 0 in self.parts:
            order = self._order_of(self.parts[0])
            sampler.generate(order.prompts, 1, order.params, self._on_completion)
        for rank in self.helpers:
            self._record_rest(rank)
        return [
            [self.completions[prompt, member] for member in range(self.n)]
            for prompt in range(len(self.prompts))
        ]

    def _on_completion(self, index: int, _member: int, completion: Completion) -> None:
        """Record a completion of rank 0, and those that other ranks have finished in the meantime.
        `index` is the completion's number in rank 0's part. Called by rank 0's sampler."""
        self._record(0, index, completion)
        for rank in self.helpers:
            for ended in self.ranks.answers_so_far(rank, Ended):
                self._record(rank, ended.index, ended.completion)

    def _order_of(self, part: range) -> Generate:
        """Make the order to one rank to sample the completions with the numbers in `part`.

        A completion's random numbers follow from its place in the whole batch: (number of the
        prompt, number among the prompt's completions). The order names these places, so the result
        does not depend on how many ranks share the work.
        """
        places = [self.places[number] for number in part]
        places_of_prompts = self.params.places
        if places_of_prompts:  # this call itself samples only a part of a larger batch
            places_in_batch = tuple(places_of_prompts[prompt] for prompt, _ in places)
        else:
            places_in_batch = tuple(places)
        prompts = [self.prompts[prompt] for prompt, _ in places]
        return Generate(prompts, replace(self.params, places=places_in_batch))

    def _record(self, rank: int, index: int, completion: Completion) -> None:
        """Record completion number `index` of a rank's part, and report it to the caller of
        `generate`."""
        prompt, member = self.places[self.parts[rank][index]]
        self.completions[prompt, member] = completion
        if self.done is not None:
            self.done(prompt, member, completion)

    def _record_rest(self, rank: int) -> None:
        """Wait until a rank has sampled all of its part, and record each completion as it comes."""
        while True:
            answer = self.ranks.answer(rank)
            if not isinstance(answer, Ended):  # the rank says that it is done
                return
            self._record(rank, answer.index, answer.completion)
            pulse.beat()  # a sign of life
