"""The size of an exam (a set of held-out tasks) before it is taken, and the smallest difference it
can show.

Every text that names such a number before there are results takes it from here: the dry run, a
submit, and an evaluation.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from engine.core.format import whole_percent
from engine.evidence.stats.basics.clusters import Clusters
from engine.evidence.stats.inference import POWER, smallest_detectable_gap

# Assumed share of the tasks whose result changes by a training, if no earlier run shows the share.
# It is typical of a model that solves about half of the tasks before.
CHANGED_SHARE = 0.2


@dataclass(frozen=True)
class ExamSize:
    """How many tasks an exam has, and for how many independent ones they count.

    Attributes:
        tasks: the number of different questions.
        groups: how many groups they form, where a task without a group counts as one; 0 if no two
            tasks share a group.
        independent: for how many independent tasks they count if all tasks of a group change
            together; `tasks` if `groups` is 0.
    """

    tasks: int
    groups: int
    independent: float

    @staticmethod
    def of(group_of_task: Mapping[str, str]) -> "ExamSize":
        """The size of an exam; `group_of_task` maps the id of each task to its group, "" for
        none."""
        clusters = Clusters.from_groups(tasks=group_of_task, groups=group_of_task)
        task_count = len(group_of_task)
        if clusters is None:  # no two tasks share a group
            return ExamSize(task_count, groups=0, independent=task_count)
        # There are no results yet. Equal values stand for tasks of a group that change together.
        no_results = dict.fromkeys(group_of_task, 0.0)
        design_effect = clusters.design_effect(no_results)
        return ExamSize(task_count, clusters.count, independent=task_count / design_effect)

    def gap(self, changed_share: float = CHANGED_SHARE) -> float:
        """The smallest difference of two success rates that shows with the usual power, from 0 to
        1, if this share of the results changes and the tasks of a group change together."""
        return smallest_detectable_gap(self.independent, changed_share * self.independent)

    def in_words(self, changed_share: float = CHANGED_SHARE) -> str:
        """Say what the tasks can show, for example "100 tasks show a difference of 14 points or
        more (80 % power)".

        With groups it also says how many there are, and what would show without them.
        `changed_share` is the share of the tasks whose result changes, from 0 to 1.
        """
        ability = f"show a difference of {points(self.gap(changed_share))} or more"
        power = f"{whole_percent(POWER)} power"
        if not self.groups:
            return f"{self.tasks} tasks {ability} ({power})"
        without_groups = ExamSize(self.tasks, groups=0, independent=self.tasks)
        gap_without_groups = points(without_groups.gap(changed_share))
        return (
            f"{self.tasks} tasks in {self.groups} groups count like {self.independent:.0f} and "
            f"{ability} ({power}; {gap_without_groups} if the tasks of a group change one by one)"
        )


def points(share: float) -> str:
    """Write a share in percentage points, rounded up, such as "9 points" for 0.081."""
    count = math.ceil(100 * share - 1e-9)  # 0.07 * 100 is 7.000000000000001: must not become 8
    return f"{count} point{'' if count == 1 else 's'}"
