"""Provides the groups that a GRPO step trains on, sampled by the right policy.

`TaskOrder` (task_order.py) decides which tasks a step plays. With `resample_uniform`, groups with
equal rewards are replaced by fresh tasks, in at most so many rounds (dynamic sampling of DAPO,
arXiv 2503.14476, with a cap). With `async_sampling`, the next batch is sampled while the policy
trains on this one; the sampling policy is then exactly one step behind.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from engine.records.settings import GRPOSettings
from engine.worker.core import pulse
from engine.worker.core.trajectory import Group, Trajectory
from engine.worker.network.adapter import Adapter
from engine.worker.network.policy import Policy
from engine.worker.network.sampler import Sampler, SamplingParams
from engine.worker.rollouts.advantages import assign
from engine.worker.rollouts.collect import RolloutContext, Times, collect, fits
from engine.worker.rollouts.rewording import VariedWording
from engine.worker.rollouts.shaping import penalise_thinking
from engine.worker.rollouts.task_order import TaskOrder
from envs.json_types import TaskRow


@dataclass(frozen=True)
class RolloutBatch:
    """The rollouts of a step.

    Attributes:
        groups: the groups to train on.
        dropped: groups with equal rewards that were replaced by fresh groups.
        times: seconds spent on both.
    """

    groups: list[Group]
    dropped: list[Group]
    times: Times

    @property
    def members(self) -> list[Trajectory]:
        """Every sampled trajectory; those of dropped groups come last."""
        return [trajectory for group in self.groups + self.dropped for trajectory in group.members]


@dataclass(frozen=True)
class Collector:
    """Plays the rollouts of whole steps: samples completions for tasks and has them scored.

    `tasks` are the training tasks, `order` decides which of them a step plays, `varied` rewords
    some. The caller loads the policy into `sampler`.
    """

    tasks: Sequence[TaskRow]
    order: TaskOrder
    context: RolloutContext
    sampler: Sampler
    settings: GRPOSettings
    varied: VariedWording | None = None

    def batch(self, step: int, policy_step: int) -> RolloutBatch:
        """Sample and score the rollouts of a step with the policy in the sampler, and assign
        advantages.

        Args:
            step: number of the step, from 1; with the seed it decides tasks and random numbers.
            policy_step: how many steps the sampling policy was trained; noted in every trajectory.
        """
        batch = self._play_step(step)
        assign(batch.groups, self.settings.advantage)
        for trajectory in batch.members:
            trajectory.policy_step = policy_step
        return batch

    def _play_step(self, step: int) -> RolloutBatch:
        """Play the tasks of a step. Groups with equal rewards, whose advantages are 0, are then
        replaced by groups of fresh tasks, in at most `resample_uniform` further rounds (a setting;
        0 for none) or until no unused task is left."""
        task_indices = self.order.tasks_of_step(step)
        groups, times = self._play_round(task_indices, step, round_number=0)
        dropped: list[Group] = []
        used = set(task_indices)
        for round_number in range(1, self.settings.resample_uniform + 1):
            uniform_count = sum(group.uniform for group in groups)
            fresh = self.order.fresh_tasks(step, round_number, uniform_count, used)
            if not fresh:  # no group to replace, or no task left
                break
            used |= set(fresh)
            fresh_groups, round_times = self._play_round(fresh, step, round_number)
            times = times + round_times
            dropped += _replace_uniform(groups, fresh_groups)
        return RolloutBatch(groups, dropped, times)

    def _play_round(
        self, task_indices: Sequence[int], step: int, round_number: int
    ) -> tuple[list[Group], Times]:
        """Play each chosen task `group_size` times, and set the penalty for long thinking if the
        settings have one. Each round of a step, from 0, has another seed. Returns one group per
        task, in order, and the seconds spent."""
        settings = self.settings
        # No run has a million steps, so runs of different seeds never share a step's sampling seed.
        step_seed = settings.seed * 1_000_003 + step
        # 2**52 is far above the sampling seeds of all steps, so no two rounds share one.
        params = SamplingParams.drawn(settings, step_seed + round_number * 2**52)
        tasks = [self.tasks[index] for index in task_indices]
        if self.varied is not None:
            tasks = self.varied.tasks_at(tasks, step, lambda task: fits(task, self.context, params))
        groups, times = collect(tasks, settings.group_size, self.context, self.sampler, params)
        if settings.thinking_length_penalty > 0:
            penalise_thinking(
                groups, settings.thinking_length_penalty, settings.max_tokens, self.context.renderer
            )
        return groups, times


def _replace_uniform(groups: list[Group], fresh_groups: Sequence[Group]) -> list[Group]:
    """Replace the first groups with equal rewards by the fresh groups, in place, and return the
    replaced groups. If there are fewer fresh groups, some groups with equal rewards stay."""
    uniform_indices = [index for index, group in enumerate(groups) if group.uniform]
    replaced: list[Group] = []
    for index, fresh_group in zip(uniform_indices, fresh_groups, strict=False):
        replaced.append(groups[index])
        groups[index] = fresh_group
    return replaced


class BatchSource:
    """Provides the training loop with the batch of each step."""

    def __init__(self, collector: Collector, policy: Policy, last_step: int) -> None:
        """Prepare to sample with `collector` for training `policy`, up to `last_step`. With the
        setting `async_sampling`, the adapter is copied here, unless the sampler is in another
        process."""
        self.collector = collector
        self.policy = policy
        self.last_step = last_step
        # The step that was sampled ahead, and its batch.
        self._sampled_ahead: tuple[int, RolloutBatch] | None = None
        self.load_s = 0.0  # how long the last handover of weights to the sampler took
        self._adapter_copy = None
        if collector.settings.async_sampling and not collector.sampler.samples_elsewhere:
            # Any seed: the initial weights are replaced before the copy is used.
            self._adapter_copy = policy.base.network.new_adapter(policy.adapter.spec, seed=0)

    def batch(self, step: int) -> RolloutBatch:
        """Return the batch of `step`: the one sampled ahead, or else one sampled now with the
        current policy. The first batch of an attempt is always sampled now, so that it depends only
        on the checkpoint. The order of tasks learns from a batch here, before a later batch is
        chosen and before a checkpoint of the step."""
        batch = self._take_or_sample(step)
        self.collector.order.record(step, batch.groups + batch.dropped)
        return batch

    def _take_or_sample(self, step: int) -> RolloutBatch:
        """Return the batch of `step`: the one that was sampled ahead, or else one sampled now."""
        sampled_ahead, self._sampled_ahead = self._sampled_ahead, None  # each is used once
        if sampled_ahead is not None:
            batch_step, batch = sampled_ahead
            if batch_step == step:  # a batch of another step is dropped
                return batch
        rows = self.collector.settings.prompts_per_step * self.collector.settings.group_size
        with pulse.phase("sampling", of=rows):
            self._load(self.policy.adapter)
            batch = self.collector.batch(step, policy_step=step - 1)
            self.collector.sampler.release_memory()  # the update comes next
        return batch

    @contextmanager
    def sampling_ahead(self, step: int) -> Iterator[None]:
        """Context manager for the update of the step before `step`. With the setting
        `async_sampling`, the batch of `step` is sampled during the update, by the policy as it is
        on entry. Without that setting, or if `step` is beyond the last one, it does nothing."""
        if not self.collector.settings.async_sampling or step > self.last_step:
            yield
            return
        if self._adapter_copy is not None:  # the update changes the policy while it is sampled
            self._adapter_copy.load(self.policy.adapter.state())
        self._load(self._adapter_copy or self.policy.adapter)
        policy_step = step - 2  # the copy's last update; that of step - 1 comes next
        # A sampler that cannot run in parallel samples before the update.
        if not self.collector.sampler.samples_beside_training:
            self._sampled_ahead = step, self.collector.batch(step, policy_step)
            yield
            return
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="sampling") as thread:
            future = thread.submit(self.collector.batch, step, policy_step)
            yield
            self._sampled_ahead = step, future.result()

    def _load(self, adapter: Adapter) -> None:
        """Hand the adapter's weights to the sampler, and note the seconds in `load_s`."""
        began = time.monotonic()
        self.collector.sampler.load(adapter)
        self.load_s = time.monotonic() - began
