"""Decides which tasks a step plays, and which tasks replace its groups with equal rewards.

By default the steps go through the tasks epoch by epoch, each epoch in an order shuffled by the
seed. With `curriculum = "rollouts"` the run's own groups decide: a task whose group earned
different rewards is likely to teach something again; a task that all answers solved, or none did,
is not. Such a task keeps a small weight, since the policy changes, and observations count less with
every step. Which tasks a step gets depends on the seed, the step and the groups of earlier steps;
these are kept in the checkpoint, so that a resumed run plays the same tasks.
"""

import math
import random
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from engine.records.settings import GRPOSettings
from engine.worker.core.job import LoopState
from engine.worker.core.trajectory import Group
from envs.json_types import TaskRow


class TaskOrder(Protocol):
    """Chooses tasks, by their indices among the tasks that are trained on."""

    def tasks_of_step(self, step: int) -> list[int]:
        """Return the indices of the `prompts_per_step` tasks of step `step` (from 1)."""
        ...

    def fresh_tasks(
        self, step: int, round_number: int, limit: int, used: Collection[int]
    ) -> list[int]:
        """Return at most `limit` tasks to replace groups with equal rewards in round
        `round_number` (from 1) of a step. None of them is in `used`, the tasks that the step has
        already played."""
        ...

    def record(self, step: int, groups: Sequence[Group]) -> None:
        """Learn from every group that step `step` played."""
        ...


def task_order(tasks: Sequence[TaskRow], settings: GRPOSettings, state: LoopState) -> TaskOrder:
    """Make the order that the settings ask for. What it learns from groups is kept in `state`,
    which checkpoints contain."""
    if settings.curriculum == "rollouts":
        return RolloutOrder(tasks, settings, state)
    return ShuffledOrder(len(tasks), settings.prompts_per_step, settings.seed)


@dataclass(frozen=True)
class ShuffledOrder:
    """Goes through the tasks epoch by epoch, each in a shuffled order that depends on the seed
    only."""

    count: int  # how many tasks there are
    per_step: int
    seed: int

    def tasks_of_step(self, step: int) -> list[int]:
        """Return the indices of the tasks that step `step` (from 1) plays."""
        return shuffled_tasks(step, self.count, self.per_step, self.seed)

    def fresh_tasks(
        self, step: int, round_number: int, limit: int, used: Collection[int]
    ) -> list[int]:
        """Return the indices of at most `limit` tasks outside `used`, to replace groups in which
        all rewards are equal. The choice depends on the seed, the step and the round
        (`round_number`, from 1)."""
        order = list(range(self.count))
        random.Random(f"{self.seed}-{step}-{round_number}").shuffle(order)
        return [index for index in order if index not in used][:limit]

    def record(self, step: int, groups: Sequence[Group]) -> None:
        """Do nothing: rewards do not change this order."""


def shuffled_tasks(step: int, count: int, per_step: int, seed: int) -> list[int]:
    """Return the indices of the `per_step` tasks (of `count`) that step `step` (from 1) plays.

    The steps go through the tasks epoch by epoch. The order of each epoch is a shuffle that depends
    on the seed and the epoch. A step may play the end of one epoch and the start of the next.
    """
    first_position = (step - 1) * per_step
    indices = []
    for position in range(first_position, first_position + per_step):
        epoch, index = divmod(position, count)
        indices.append(_shuffled(count, f"{seed}-{epoch}")[index])
    return indices


@lru_cache(maxsize=4)
def _shuffled(count: int, seed: str) -> tuple[int, ...]:
    """Return the numbers below `count` in an order that depends only on `seed`."""
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return tuple(order)


# The smallest weight of a task; one that is sure to teach has 1. It is not 0, as policies change.
LEAST_WEIGHT = 0.05
# The share of a step's places that go to unseen tasks, as long as there are any. So every task is
# tried, and the other places already go to tasks that teach.
UNSEEN_PLACES = 0.5
# An observed group counts half as much after the steps of so many passes over the tasks...
PASSES_TO_FADE = 2
# ...but not before so many steps: with few tasks, a pass takes only a step or two.
LEAST_STEPS_TO_FADE = 8
_PRIOR = 0.5  # imagined answers of each kind before the first real one (Jeffreys' prior of a share)


class RolloutOrder:
    """Draws tasks by what the run's own groups earned: tasks that taught something lately come most
    often."""

    def __init__(self, tasks: Sequence[TaskRow], settings: GRPOSettings, state: LoopState) -> None:
        """Continue with what `state` holds under `curriculum`; a new run has nothing there.

        It maps the id of a task to [differing answers, answers, step]. Differing answers earned
        another reward than most of their group. Both counts are as of that step, with earlier
        groups counted less.
        """
        self.ids = [task["id"] for task in tasks]
        self.settings = settings
        self.seen: dict[str, list[float]] = state.setdefault("curriculum", {})
        self._unseen_order = _shuffled(len(tasks), f"{settings.seed}-0")
        steps_of_a_pass = len(tasks) / settings.prompts_per_step
        self.steps_to_fade = max(LEAST_STEPS_TO_FADE, PASSES_TO_FADE * steps_of_a_pass)

    def tasks_of_step(self, step: int) -> list[int]:
        """Return the indices of the tasks that step `step` (from 1) plays.

        Unseen tasks come first, in the shuffled order of a first epoch, but they get at most the
        share `UNSEEN_PLACES` of the step's places if there are others. The others follow in the
        order of a weighted draw.
        """
        per_step = self.settings.prompts_per_step
        seen = self._weighted_draw(step, f"{self.settings.seed}-{step}-curriculum")
        unseen = [index for index in self._unseen_order if self.ids[index] not in self.seen]
        unseen_places = max(math.ceil(UNSEEN_PLACES * per_step), per_step - len(seen))
        in_order = unseen[:unseen_places] + seen + unseen[unseen_places:]
        first_tasks = in_order[:per_step]
        # If there are fewer tasks than places, the tasks repeat.
        return [first_tasks[place % len(first_tasks)] for place in range(per_step)]

    def fresh_tasks(
        self, step: int, round_number: int, limit: int, used: Collection[int]
    ) -> list[int]:
        """Return the indices of at most `limit` tasks outside `used`, to replace groups in which
        all rewards are equal, in round `round_number` (from 1) of the step. Seen tasks are drawn by
        weight; unseen ones follow."""
        seen = self._weighted_draw(step, f"{self.settings.seed}-{step}-{round_number}-curriculum")
        unseen = [index for index in self._unseen_order if self.ids[index] not in self.seen]
        return [index for index in seen + unseen if index not in used][:limit]

    def record(self, step: int, groups: Sequence[Group]) -> None:
        """Add the groups of a step to what is known of their tasks: how many answers there were,
        and how many earned another reward than most of their group. A group that could not be
        scored adds nothing, but its task counts as seen."""
        for group in groups:
            differing, answers = self._counts_in_step(group.task_id, step)
            rewards = group.rewards
            if rewards:
                ((_reward, usual_count),) = Counter(rewards).most_common(1)
                differing += len(rewards) - usual_count
                answers += len(rewards)
            self.seen[group.task_id] = [round(differing, 6), round(answers, 6), step]

    def weight(self, task_id: str, step: int) -> float:
        """Return how often a seen task is drawn in `step`, from LEAST_WEIGHT to 1: the chance that
        the rewards of its next group differ, squared to favour tasks that teach."""
        differing, answers = self._counts_in_step(task_id, step)
        chance = chance_to_differ(differing, answers, self.settings.group_size)
        return max(LEAST_WEIGHT, chance**2)

    def _counts_in_step(self, task_id: str, step: int) -> tuple[float, float]:
        """Return (differing answers, answers) of the task `task_id` as they count in `step`: less
        with every step since they were seen. Returns (0, 0) for a task that was not seen.

        Differing answers earned another reward than most of their group.
        """
        differing, answers, seen_in = self.seen.get(task_id, (0.0, 0.0, step))
        weight_left = 0.5 ** ((step - seen_in) / self.steps_to_fade)
        return differing * weight_left, answers * weight_left

    def _weighted_draw(self, step: int, seed: str) -> list[int]:
        """Return the seen tasks in the order of a weighted draw without replacement.

        (Efraimidis and Spirakis 2006: the largest u ** (1 / weight) comes first, u uniform.)
        """
        rng = random.Random(seed)
        sort_keys: dict[int, float] = {}
        for index, task_id in enumerate(self.ids):
            random_number = rng.random()  # drawn for every task, so that draws belong to tasks
            if task_id in self.seen:
                # The logarithm of the key gives the same order and does not round to 0.
                sort_keys[index] = math.log(max(random_number, 1e-300)) / self.weight(task_id, step)
        return sorted(sort_keys, key=lambda index: -sort_keys[index])


def chance_to_differ(differing: float, answers: float, group_size: int) -> float:
    """Return the chance that the rewards of a new group of `group_size` answers are not all equal.

    So far, `differing` of `answers` earned another reward than most of their group. The true share
    of such answers is unknown, so the chance is averaged over a beta distribution: Jeffreys' prior
    with these counts added.
    """
    rare, usual = differing + _PRIOR, answers - differing + _PRIOR  # the two beta parameters
    all_rare = all_usual = 1.0
    for answers_drawn in range(group_size):
        all_rare *= (rare + answers_drawn) / (rare + usual + answers_drawn)
        all_usual *= (usual + answers_drawn) / (rare + usual + answers_drawn)
    return 1.0 - all_rare - all_usual
