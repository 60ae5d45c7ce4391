"""Which tasks a GRPO step plays, and by which policy.

A step plays the next tasks of a seeded order. With `resample_uniform` the groups whose members
earned alike are then replaced by fresh tasks, for at most so many rounds (dynamic sampling of
DAPO, arXiv 2503.14476, with a cap). With `async_sampling` the next batch is sampled while the
policy trains on this one, by the policy as it was before: one step off, never more.
"""

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache

from engine.records.settings import GRPOSettings
from engine.worker.core.trajectory import Group, Trajectory
from engine.worker.network.policy import Policy
from engine.worker.network.sampler import Sampler, SamplingParams
from engine.worker.rollouts.advantages import assign
from engine.worker.rollouts.collect import RolloutContext, Times, collect
from engine.worker.rollouts.shaping import penalise_thinking
from envs.json_types import TaskRow


@dataclass(frozen=True)
class RolloutBatch:
    """The batch of a step: `groups` to train on, `dropped` ones that were replaced."""

    groups: list[Group]
    dropped: list[Group]
    times: Times

    @property
    def members(self) -> list[Trajectory]:
        """Every trajectory that was sampled."""
        return [t for group in self.groups + self.dropped for t in group.members]


class Collector:
    """Plays whole steps.

    Args:
        tasks: the train rows in use.
    """

    def __init__(
        self,
        tasks: Sequence[TaskRow],
        context: RolloutContext,
        sampler: Sampler,
        settings: GRPOSettings,
    ) -> None:
        self.tasks = tasks
        self.context = context
        self.sampler = sampler
        self.settings = settings

    def batch(self, step: int, policy_step: int) -> RolloutBatch:
        """The batch of step `step`, advantages assigned, by what the sampler has loaded.

        Args:
            policy_step: steps done by the policy that samples; written into every trajectory.
        """
        settings, count = self.settings, len(self.tasks)
        chosen = tasks_of_step(step, count, settings.prompts_per_step, settings.seed)
        groups, times = self._round(chosen, step, 0)
        dropped: list[Group] = []
        used = set(chosen)
        for number in range(1, settings.resample_uniform + 1):
            uniform = [index for index, group in enumerate(groups) if group.uniform]
            fresh = fresh_tasks((step, number), count, len(uniform), used, settings.seed)
            if not fresh:
                break
            used |= set(fresh)
            fresh_groups, more = self._round(fresh, step, number)
            times = times + more
            for index, group in zip(uniform, fresh_groups, strict=False):
                dropped.append(groups[index])
                groups[index] = group
        assign(groups, settings.advantage)
        for group in groups + dropped:
            for trajectory in group.members:
                trajectory.policy_step = policy_step
        return RolloutBatch(groups, dropped, times)

    def _round(self, chosen: Sequence[int], step: int, number: int) -> tuple[list[Group], Times]:
        """Play the chosen tasks; `number` counts the rounds of a step, so that each draws
        otherwise."""
        settings = self.settings
        params = SamplingParams.drawn(settings, settings.seed * 1_000_003 + step)
        params = replace(params, seed=params.seed + number * 2**52)
        groups, times = collect(
            [self.tasks[i] for i in chosen],
            settings.group_size,
            self.context,
            self.sampler,
            params,
        )
        if settings.thinking_length_penalty > 0:
            penalise_thinking(
                groups,
                settings.thinking_length_penalty,
                settings.max_tokens,
                opened=self.context.renderer.opens_thought,
                decode=self.context.renderer.completion_text,
            )
        return groups, times


def tasks_of_step(step: int, count: int, wanted: int, seed: int) -> list[int]:
    """Which `wanted` of `count` tasks step `step` (from 1) plays: the seeded order of one epoch
    after another."""
    first = (step - 1) * wanted
    picked = []
    for position in range(first, first + wanted):
        epoch, index = divmod(position, count)
        picked.append(_order(count, f"{seed}-{epoch}")[index])
    return picked


@lru_cache(maxsize=4)
def _order(count: int, seed: str) -> tuple[int, ...]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return tuple(order)


def fresh_tasks(
    place: tuple[int, int], count: int, wanted: int, used: set[int], seed: int
) -> list[int]:
    """At most `wanted` of `count` tasks that are not `used`; the seed and the `place` (step, round)
    decide which."""
    step, number = place
    order = list(range(count))
    random.Random(f"{seed}-{step}-{number}").shuffle(order)
    return [index for index in order if index not in used][:wanted]


class BatchSource:
    """Hands the loop its batches.

    Args:
        last: the run's last step; nothing is sampled for a step beyond it.
    """

    def __init__(self, collector: Collector, policy: Policy, last: int) -> None:
        self.collector = collector
        self.policy = policy
        self.last = last
        self._next: tuple[int, RolloutBatch] | None = None
        self._frozen = None
        if collector.settings.async_sampling:
            self._frozen = policy.base.network.new_adapter(policy.adapter.spec, 0)

    def batch(self, step: int) -> RolloutBatch:
        """The batch of `step`: the one sampled ahead, else by the policy as it is now.

        The first batch of an attempt is always of the second kind, so what a resumed run samples
        follows from its checkpoint alone.
        """
        ready, self._next = self._next, None
        if ready is not None and ready[0] == step:
            return ready[1]
        sampler = self.collector.sampler
        sampler.load(self.policy.adapter)
        batch = self.collector.batch(step, step - 1)
        sampler.release_memory()  # the update comes next
        return batch

    @contextmanager
    def sampling_ahead(self, step: int) -> Iterator[None]:
        """Around the update of the step before `step`: with `async_sampling` the batch of `step`
        is sampled meanwhile, by a copy of the policy as it is on entry."""
        if self._frozen is None or step > self.last:
            yield
            return
        self._frozen.load(self.policy.adapter.state())
        self.collector.sampler.load(self._frozen)
        if not self._can_share_process():
            self._next = step, self.collector.batch(step, step - 2)
            yield
            return
        with ThreadPoolExecutor(1, "sampling") as thread:
            sampled = thread.submit(self.collector.batch, step, step - 2)
            yield
            self._next = step, sampled.result()

    def _can_share_process(self) -> bool:
        """Whether sampling and training can share this process at one time. Two threads must not
        share PEFT's switch between adapters, nor a GPU while its kernels are being recorded; such a
        batch is sampled before the update instead, with the same result."""
        network = self.policy.base.network
        own_on_cpu = network.forward == "own" and network.device.type == "cpu"
        return self.collector.sampler.name == "vllm" or own_on_cpu
