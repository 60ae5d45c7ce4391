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
from typing import Any

from engine.worker.components import sampling
from engine.worker.core.trajectory import Group
from engine.worker.network.policy import Policy
from engine.worker.network.sampler import Sampler
from engine.worker.rollouts.advantages import assign
from engine.worker.rollouts.collect import Stage, Times, collect
from engine.worker.rollouts.shaping import penalise_thinking


@dataclass(frozen=True)
class Played:
    """The batch of a step: `groups` to train on, `dropped` ones that were replaced."""

    groups: list[Group]
    dropped: list[Group]
    times: Times


class Player:
    """Plays whole steps.

    Args:
        tasks: the train rows in use.
        settings: the resolved settings of the run.
    """

    def __init__(
        self,
        tasks: Sequence[dict[str, Any]],
        stage: Stage,
        sampler: Sampler,
        settings: dict[str, Any],
    ) -> None:
        self.tasks = tasks
        self.stage = stage
        self.sampler = sampler
        self.settings = settings

    def play(self, step: int, policy_step: int) -> Played:
        """The batch of step `step`, advantages assigned, by what the sampler has loaded.

        Args:
            policy_step: steps done by the policy that samples; written into every trajectory.
        """
        chosen = tasks_of_step(step, len(self.tasks), self.settings)
        groups, times = self._round(chosen, step, 0)
        dropped: list[Group] = []
        used = set(chosen)
        for number in range(1, self.settings["resample_uniform"] + 1):
            stale = [at for at, group in enumerate(groups) if group.uniform]
            fresh = fresh_tasks(step, number, len(self.tasks), len(stale), used, self.settings)
            if not fresh:
                break
            used |= set(fresh)
            again, more = self._round(fresh, step, number)
            times = times + more
            for at, group in zip(stale, again, strict=False):
                dropped.append(groups[at])
                groups[at] = group
        assign(groups, self.settings["advantage"])
        for group in groups + dropped:
            for trajectory in group.members:
                trajectory.policy_step = policy_step
        return Played(groups, dropped, times)

    def _round(self, chosen: Sequence[int], step: int, number: int) -> tuple[list[Group], Times]:
        settings = self.settings
        params = sampling(settings, greedy=False, seed=settings["seed"] * 1_000_003 + step)
        params = replace(params, seed=params.seed + number * 2**52)
        groups, times = collect(
            [self.tasks[i] for i in chosen],
            settings["group_size"],
            self.stage,
            self.sampler,
            params,
        )
        if settings["thinking_length_penalty"] > 0:
            penalise_thinking(
                groups,
                settings["thinking_length_penalty"],
                settings["max_tokens"],
                opened=self.stage.renderer.opens_thought,
                decode=self.stage.renderer.completion_text,
            )
        return groups, times


def tasks_of_step(step: int, count: int, settings: dict[str, Any]) -> list[int]:
    """Which tasks step `step` (from 1) plays: the seeded order of one epoch after another."""
    wanted = settings["prompts_per_step"]
    first = (step - 1) * wanted
    picked = []
    for at in range(first, first + wanted):
        epoch, index = divmod(at, count)
        picked.append(_order(count, f"{settings['seed']}-{epoch}")[index])
    return picked


@lru_cache(maxsize=4)
def _order(count: int, seed: str) -> tuple[int, ...]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return tuple(order)


def fresh_tasks(
    step: int, number: int, count: int, wanted: int, used: set[int], settings: dict[str, Any]
) -> list[int]:
    """At most `wanted` tasks the step has not played yet; seed, step and round decide which."""
    order = list(range(count))
    random.Random(f"{settings['seed']}-{step}-{number}").shuffle(order)
    return [index for index in order if index not in used][:wanted]


class Feed:
    """Hands the loop its batches.

    Args:
        last: the run's last step; nothing is sampled for a step beyond it.
    """

    def __init__(self, player: Player, policy: Policy, last: int) -> None:
        self.player = player
        self.policy = policy
        self.last = last
        self._next: tuple[int, Played] | None = None
        self._frozen = None
        if player.settings["async_sampling"]:
            self._frozen = policy.base.network.new_adapter(policy.adapter.spec, 0)

    def batch(self, step: int) -> Played:
        """The batch of `step`: the one sampled ahead, else by the policy as it is now.

        The first batch of an attempt is always of the second kind, so what a resumed run samples
        follows from its checkpoint alone.
        """
        ready, self._next = self._next, None
        if ready is not None and ready[0] == step:
            return ready[1]
        sampler = self.player.sampler
        sampler.load(self.policy.adapter)
        played = self.player.play(step, step - 1)
        sampler.rest()  # the update comes next
        return played

    @contextmanager
    def ahead(self, step: int) -> Iterator[None]:
        """Around the update of the step before `step`: with `async_sampling` the batch of `step`
        is sampled meanwhile, by a copy of the policy as it is on entry."""
        if self._frozen is None or step > self.last:
            yield
            return
        self._frozen.load(self.policy.adapter.state())
        self.player.sampler.load(self._frozen)
        if not self._beside():
            self._next = step, self.player.play(step, step - 2)
            yield
            return
        with ThreadPoolExecutor(1, "sampling") as thread:
            playing = thread.submit(self.player.play, step, step - 2)
            yield
            self._next = step, playing.result()

    def _beside(self) -> bool:
        """Whether sampling and training can share this process at one time. Two threads must not
        share PEFT's switch between adapters, nor a GPU while its kernels are being recorded; such a
        batch is sampled before the update instead, with the same result."""
        network = self.policy.base.network
        own_on_cpu = network.forward == "own" and network.device.type == "cpu"
        return self.player.sampler.name == "vllm" or own_on_cpu
