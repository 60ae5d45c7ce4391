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
        """The size of the tasks; `group_of_task` is task -> its group, "" for none."""
        clusters = Clusters.from_groups(group_of_task, group_of_task)
        count = len(group_of_task)
        if clusters is None:
            return ExamSize(count, 0, count)
        # Equal values: nothing shows yet that the tasks of a group differ in what they show.
        effect = clusters.design_effect(dict.fromkeys(group_of_task, 0.0))
        return ExamSize(count, clusters.count, count / effect)

    def gap(self, changed_share: float = CHANGED_SHARE) -> float:
        """The smallest difference of two success rates that shows with the usual power, from 0 to
        1, if this share of the results changes and the tasks of a group change together."""
        return smallest_detectable_gap(self.independent, changed_share * self.independent)

    def in_words(self, changed_share: float = CHANGED_SHARE) -> str:
        """Say what the tasks can show, for example "100 tasks show a difference of 14 points or
        more (80 % power)".

        Groups add their number and what would show if they were none.
        """
        shown = f"show a difference of {points(self.gap(changed_share))} or more"
        power = f"{whole_percent(POWER)} power"
        if not self.groups:
            return f"{self.tasks} tasks {shown} ({power})"
        alone = ExamSize(self.tasks, 0, self.tasks).gap(changed_share)
        return (
            f"{self.tasks} tasks in {self.groups} groups count like {self.independent:.0f} and "
            f"{shown} ({power}; {points(alone)} if the tasks of a group change one by one)"
        )


def points(share: float) -> str:
    """Write a share in percentage points, rounded up, such as "9 points" for 0.081."""
    count = math.ceil(100 * share - 1e-9)  # 0.07 * 100 is 7.000000000000001: must not become 8
    return f"{count} point{'' if count == 1 else 's'}"
