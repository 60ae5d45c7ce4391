"""Tasks in groups: how much less a sample of groups tells than as many tasks of their own.

Tasks of one group (a template, a document, a pair such as 3 + 4 and 4 + 3) tend to be solved or
failed together. Everything here counts groups: the variance of a mean is taken over the sums of the
groups (Liang and Zeger 1986), p is of Student's t with one degree of freedom less than there are
groups, and an interval for counts gets the number of tasks that would tell as much if each stood
for itself (Rao and Scott 1992). Held against simulation in
tests/engine/evidence/stats/basics/test_clusters.py.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from engine.evidence.stats.basics.distributions import normal_quantile, t_cdf, t_quantile


@dataclass(frozen=True)
class Clusters:
    """Tasks by their group; a task without a group is one of its own.

    `members` holds the ids of the tasks of each group.
    """

    members: Sequence[Sequence[str]]

    @staticmethod
    def of(tasks: Iterable[str], groups: Mapping[str, str]) -> "Clusters | None":
        """The clusters of `tasks` by their `groups` (task id -> group); None where each is a group
        of its own, so that there is nothing to account for."""
        by_group: dict[tuple[str, str], list[str]] = {}
        for task in sorted(tasks):
            group = groups.get(task, "")
            by_group.setdefault(("group", group) if group else ("task", task), []).append(task)
        members = list(by_group.values())
        return Clusters(members) if any(len(tasks) > 1 for tasks in members) else None

    @property
    def count(self) -> int:
        """How many groups there are."""
        return len(self.members)

    @cached_property
    def task_count(self) -> int:
        return sum(len(tasks) for tasks in self.members)

    def design_effect(self, values: Mapping[str, float], confidence: float = 0.95) -> float:
        """How many tasks of these groups tell as much as one task that stands for itself.

        The variance of the mean over the groups divided by that over the tasks, at least 1, times
        what Student's t asks for at this number of groups. Where all values are equal nothing is
        seen of how groups hold together: then a group counts as one task. inf for a single group.

        Args:
            values: task id -> its value, for all tasks.
            confidence: coverage of the interval that is to be computed.
        """
        if self.count < 2:
            return math.inf
        mean = math.fsum(values.values()) / self.task_count
        of_tasks = math.fsum((value - mean) ** 2 for value in values.values())
        if of_tasks == 0.0:
            ratio = sum(len(tasks) ** 2 for tasks in self.members) / self.task_count
        else:
            sums = (math.fsum(values[task] - mean for task in tasks) for tasks in self.members)
            of_groups = math.fsum(value * value for value in sums)
            ratio = of_groups / of_tasks * self.count / (self.count - 1)
        quantile = 0.5 + confidence / 2.0
        t, z = t_quantile(quantile, self.count - 1), normal_quantile(quantile)
        return max(1.0, ratio) * (t / z) ** 2

    def p_of_mean(self, values: Mapping[str, float]) -> float:
        """The two-sided p value that the mean of `values` (task id -> value) is 0; 1 for a single
        group and where all values are 0.

        The test of McNemar for clustered pairs (Durkalski et al. 2003), with Student's t.
        """
        sums = [math.fsum(values[task] for task in tasks) for tasks in self.members]
        spread = math.sqrt(math.fsum(value * value for value in sums))
        if self.count < 2 or spread == 0.0:
            return 1.0
        return min(1.0, 2.0 * t_cdf(-abs(math.fsum(sums)) / spread, self.count - 1))
