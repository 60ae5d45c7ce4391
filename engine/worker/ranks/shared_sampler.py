"""A sampler that samples on all ranks; rank 0's side.

A completion's random numbers follow from the numbers of its prompt and of itself in the whole call
(network/sampler.py), so it does not matter which rank samples it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from engine.worker.core import pulse
from engine.worker.core.trajectory import Completion
from engine.worker.network.sampler import Done as OnCompletion
from engine.worker.network.sampler import Sampler, SamplingParams
from engine.worker.ranks import collective
from engine.worker.ranks.leader import Ranks
from engine.worker.ranks.messages import Ended, Generate, Load, ReleaseMemory
from engine.worker.ranks.shares import cut


class SharedSampler:
    """Samples with `sampler` and with those of the other ranks; see `Sampler`."""

    def __init__(self, sampler: Sampler, ranks: Ranks) -> None:
        self.sampler = sampler
        self.ranks = ranks
        self.name = sampler.name

    def load(self, adapter: Any) -> None:
        """See `Sampler`. The weights travel unless the other ranks have them already."""
        self.sampler.load(adapter)
        if adapter is None:
            self.ranks.carry_out(Load("base"))
        elif self.ranks.have(adapter):
            self.ranks.carry_out(Load("policy"))
        else:
            self.ranks.carry_out(Load("handed on"), beside=lambda: collective.hand_on(adapter))

    def generate(
        self,
        prompts: Sequence[list[int]],
        n: int,
        params: SamplingParams,
        done: OnCompletion | None = None,
    ) -> list[list[Completion]]:
        """See `Sampler`; `done` is called in this thread, for completions of other ranks too."""
        call = _Call(prompts, n, params, done, self.ranks)
        return call.sample(self.sampler)

    def stream(self, prompt: list[int], params: SamplingParams) -> Iterator[int]:
        """See `Sampler`; one completion is sampled here alone."""
        return self.sampler.stream(prompt, params)

    def release_memory(self) -> None:
        """See `Sampler`."""
        self.sampler.release_memory()
        self.ranks.carry_out(ReleaseMemory())

    def close(self) -> None:
        """Close the sampler of this rank; the others go with their processes."""
        self.sampler.close()


class _Call:
    """One call of `SharedSampler.generate`, whose arguments it takes."""

    def __init__(
        self,
        prompts: Sequence[list[int]],
        n: int,
        params: SamplingParams,
        done: OnCompletion | None,
        ranks: Ranks,
    ) -> None:
        self.prompts = prompts
        self.params = params
        self.done = done
        self.ranks = ranks
        # (prompt, completion) of everything that is sampled.
        self.places = [(prompt, member) for prompt in range(len(prompts)) for member in range(n)]
        self.parts = cut([1.0] * len(self.places), ranks.count)
        self.completions: dict[tuple[int, int], Completion] = {}
        self.helpers = [rank for rank, part in enumerate(self.parts) if part and rank > 0]
        self.n = n

    def sample(self, sampler: Sampler) -> list[list[Completion]]:
        """Sample rank 0's part with `sampler` while the others sample theirs."""
        for rank in self.helpers:
            self.ranks.tell(rank, self._order(self.parts[rank]))
        order = self._order(self.parts[0])

        def on_completion(index: int, _member: int, completion: Completion) -> None:
            self._take(0, index, completion)
            for rank in self.helpers:  # what has come from elsewhere meanwhile
                for ended in self.ranks.come_so_far(rank, Ended):
                    self._take(rank, ended.index, ended.completion)

        sampler.generate(order.prompts, 1, order.params, on_completion)
        for rank in self.helpers:
            self._take_rest(rank)
        return [
            [self.completions[prompt, member] for member in range(self.n)]
            for prompt in range(len(self.prompts))
        ]

    def _order(self, part: range) -> Generate:
        """What a rank is told to sample."""
        places = [self.places[i] for i in part]
        numbers = self.params.places
        if numbers:  # this call is a part of a larger one itself
            places_in_batch = tuple(numbers[prompt] for prompt, _ in places)
        else:
            places_in_batch = tuple(places)
        prompts = [self.prompts[prompt] for prompt, _ in places]
        return Generate(prompts, replace(self.params, places=places_in_batch))

    def _take(self, rank: int, index: int, completion: Completion) -> None:
        """Note completion number `index` of a rank, and tell the caller."""
        prompt, member = self.places[self.parts[rank][index]]
        self.completions[prompt, member] = completion
        if self.done is not None:
            self.done(prompt, member, completion)

    def _take_rest(self, rank: int) -> None:
        """Wait until a rank has sampled all of its part."""
        while isinstance(answer := self.ranks.answer(rank), Ended):
            self._take(rank, answer.index, answer.completion)
            pulse.beat()
