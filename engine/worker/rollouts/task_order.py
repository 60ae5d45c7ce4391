"""In which order tasks are played: which tasks a step gets, and which replace its uniform groups.

Usually the steps go through the tasks epoch by epoch, each epoch in an order shuffled by the seed.
With `curriculum = "rollouts"` the run's own groups decide: a task whose group earned different
rewards is likely to teach again, a task that all answers solved, or none did, is not. Such a task
keeps a small weight, since the policy changes, and what was seen of it counts less with every step.
Which tasks a step gets follows from the seed, the step and the groups of the steps before it; these
are kept in the checkpoint, so that a resumed run plays the same tasks.
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
        """The tasks of step `step` (from 1), `prompts_per_step` of them."""
        ...

    def fresh_tasks(
        self, step: int, round_number: int, limit: int, used: Collection[int]
    ) -> list[int]:
        """At most `limit` tasks that replace groups of equal rewards in round `round_number` (from
        1) of a step; none of those in `used`, which the step has played already."""
        ...

    def record(self, step: int, groups: Sequence[Group]) -> None:
        """Take note of every group that step `step` played."""
        ...


def task_order(tasks: Sequence[TaskRow], settings: GRPOSettings, state: LoopState) -> TaskOrder:
    """The order that the settings ask for. What it learns from groups is kept in `state`, which
    checkpoints hold."""
    if settings.curriculum == "rollouts":
        return RolloutOrder(tasks, settings, state)
    return ShuffledOrder(len(tasks), settings.prompts_per_step, settings.seed)


@dataclass(frozen=True)
class ShuffledOrder:
    """Epoch by epoch, each in a shuffled order that follows from the seed alone."""

    count: int  # of the tasks
    per_step: int
    seed: int

    def tasks_of_step(self, step: int) -> list[int]:
        """See `TaskOrder`."""
        return shuffled_tasks(step, self.count, self.per_step, self.seed)

    def fresh_tasks(
        self, step: int, round_number: int, limit: int, used: Collection[int]
    ) -> list[int]:
        """See `TaskOrder`. The choice follows from the seed, the step and the round."""
        order = list(range(self.count))
        random.Random(f"{self.seed}-{step}-{round_number}").shuffle(order)
        return [index for index in order if index not in used][:limit]

    def record(self, step: int, groups: Sequence[Group]) -> None:
        """Nothing is noted: rewards do not change this order."""


def shuffled_tasks(step: int, count: int, per_step: int, seed: int) -> list[int]:
    """The indices of the `per_step` tasks (of `count`) that step `step` (from 1) plays.

    The steps go through the tasks epoch by epoch. The order of each epoch is a shuffle that follows
    from the seed and the epoch; a step may play the end of one epoch and the start of the next.
    """
    first_position = (step - 1) * per_step
    indices = []
    for position in range(first_position, first_position + per_step):
        epoch, index = divmod(position, count)
        indices.append(_shuffled(count, f"{seed}-{epoch}")[index])
    return indices


@lru_cache(maxsize=4)
def _shuffled(count: int, seed: str) -> tuple[int, ...]:
    """Return the numbers below `count` in an order that follows from `seed` alone."""
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return tuple(order)


# A task is never drawn less than this part as often as one that is sure to teach: policies change.
LEAST_WEIGHT = 0.05
# Of the places of a step, what unseen tasks get while there are any: they come before all others
# there, so that every task is tried, and the rest of a step already plays what teaches.
UNSEEN_PLACES = 0.5
# What a group showed counts half as much after the steps of so many passes over the tasks...
PASSES_TO_FADE = 2
# ...and not before so many steps: of few tasks a pass takes a step or two.
LEAST_STEPS_TO_FADE = 8
_PRIOR = 0.5  # answers of each kind taken as seen before the first (Jeffreys' prior of a share)


class RolloutOrder:
    """By what the run's own groups earned: tasks that taught lately are drawn most often."""

    def __init__(self, tasks: Sequence[TaskRow], settings: GRPOSettings, state: LoopState) -> None:
        """Continue with what `state` holds under `curriculum`; a new run has nothing there.

        It maps the id of a task to [answers that earned another reward than most of their group,
        answers, step]: both counts as they stood after that step, earlier groups counted less.
        """
        self.ids = [task["id"] for task in tasks]
        self.settings = settings
        self.seen: dict[str, list[float]] = state.setdefault("curriculum", {})
        self._unseen_order = _shuffled(len(tasks), f"{settings.seed}-0")
        steps_of_a_pass = len(tasks) / settings.prompts_per_step
        self.steps_to_fade = max(LEAST_STEPS_TO_FADE, PASSES_TO_FADE * steps_of_a_pass)

    def tasks_of_step(self, step: int) -> list[int]:
        """See `TaskOrder`. Unseen tasks first, in the shuffled order of a first epoch, but for
        `UNSEEN_PLACES` of the step at most where others are there; then by weight."""
        per_step = self.settings.prompts_per_step
        by_weight = self._by_weight(step, f"{self.settings.seed}-{step}-curriculum")
        unseen = [index for index in self._unseen_order if self.ids[index] not in self.seen]
        unseen_places = max(math.ceil(UNSEEN_PLACES * per_step), per_step - len(by_weight))
        chosen = (unseen[:unseen_places] + by_weight + unseen[unseen_places:])[:per_step]
        # Fewer tasks than places: all of them again.
        return [chosen[place % len(chosen)] for place in range(per_step)]

    def fresh_tasks(
        self, step: int, round_number: int, limit: int, used: Collection[int]
    ) -> list[int]:
        """See `TaskOrder`. Those seen are drawn by weight, and unseen ones follow."""
        by_weight = self._by_weight(step, f"{self.settings.seed}-{step}-{round_number}-curriculum")
        unseen = [index for index in self._unseen_order if self.ids[index] not in self.seen]
        return [index for index in by_weight + unseen if index not in used][:limit]

    def record(self, step: int, groups: Sequence[Group]) -> None:
        """See `TaskOrder`. A group of which nothing could be scored shows nothing, but its task
        counts as seen."""
        for group in groups:
            differing, answers = self._faded(group.task_id, step)
            rewards = group.rewards
            if rewards:
                most_common = Counter(rewards).most_common(1)[0][1]
                differing += len(rewards) - most_common
                answers += len(rewards)
            self.seen[group.task_id] = [round(differing, 6), round(answers, 6), step]

    def weight(self, task_id: str, step: int) -> float:
        """How often a task that was seen is drawn in `step`, from LEAST_WEIGHT to 1: the chance
        that the rewards of its next group differ, squared, so that what teaches stands out."""
        differing, answers = self._faded(task_id, step)
        chance = chance_to_differ(differing, answers, self.settings.group_size)
        return max(LEAST_WEIGHT, chance**2)

    def _faded(self, task_id: str, step: int) -> tuple[float, float]:
        """Return (answers with another reward than most of their group, answers) that still count.

        They count for a task in `step`, less with every step since they were seen; (0, 0) for a
        task that was not seen.
        """
        differing, answers, seen_in = self.seen.get(task_id, (0.0, 0.0, step))
        weight_left = 0.5 ** ((step - seen_in) / self.steps_to_fade)
        return differing * weight_left, answers * weight_left

    def _by_weight(self, step: int, seed: str) -> list[int]:
        """Return the tasks that were seen, in the order of a draw by weight without putting back.

        (Efraimidis and Spirakis 2006: the largest u ** (1 / weight) first, u uniform.)
        """
        chance = random.Random(seed)
        keys: dict[int, float] = {}
        for index, task_id in enumerate(self.ids):
            random_number = chance.random()  # also for an unseen task: draws belong to tasks
            if task_id in self.seen:
                # The logarithm of the key, which orders alike and does not round to 0.
                keys[index] = math.log(max(random_number, 1e-300)) / self.weight(task_id, step)
        return sorted(keys, key=lambda index: -keys[index])


def chance_to_differ(differing: float, answers: float, group_size: int) -> float:
    """Return the chance that a new group of `group_size` answers does not all earn the same.

    `differing` of `answers` earned another reward than the others of their group. The share of such
    answers is not known: the chance is the mean over a beta distribution, which is Jeffreys' prior
    with these counts added.
    """
    rare, usual = differing + _PRIOR, answers - differing + _PRIOR
    all_rare = all_usual = 1.0
    for answers_drawn in range(group_size):
        all_rare *= (rare + answers_drawn) / (rare + usual + answers_drawn)
        all_usual *= (usual + answers_drawn) / (rare + usual + answers_drawn)
    return 1.0 - all_rare - all_usual
