"""Tasks in groups: how much less information they carry than independent tasks.

Tasks of one group (a template, a document, a pair such as 3 + 4 and 4 + 3) tend to be solved or
failed together. So everything here counts groups instead of tasks. The variance of a mean is taken
over the sums of the groups (Liang and Zeger 1986); p comes from Student's t with one degree of
freedom less than there are groups; and an interval for counts gets the number of independent tasks
that would carry as much information (Rao and Scott 1992). Held against simulation in
tests/engine/evidence/stats/basics/test_clusters.py.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from engine.evidence.stats.basics.distributions import normal_quantile, t_cdf, t_quantile


@dataclass(frozen=True)
class Clusters:
    """Tasks by their group. A task without a group is a group of its own.

    `members` holds the task ids of each group.
    """

    members: Sequence[Sequence[str]]

    @staticmethod
    def from_groups(tasks: Iterable[str], groups: Mapping[str, str]) -> "Clusters | None":
        """Sort `tasks` (ids) into groups. Returns None if no two tasks share a group, so that
        statistics of independent tasks can be used.

        Args:
            groups: task id -> its group; a task that is missing is a group of its own.
        """
        members_by_group: dict[tuple[str, str], list[str]] = {}
        for task in sorted(tasks):
            group = groups.get(task, "")
            # A task id may equal the name of a group, so the key says which of the two it is.
            key = ("group", group) if group else ("task", task)
            members_by_group.setdefault(key, []).append(task)
        members = list(members_by_group.values())
        has_shared_group = any(len(group_tasks) > 1 for group_tasks in members)
        return Clusters(members) if has_shared_group else None

    @property
    def count(self) -> int:
        """How many groups there are."""
        return len(self.members)

    @cached_property
    def task_count(self) -> int:
        """How many tasks there are in all groups."""
        return sum(len(tasks) for tasks in self.members)

    def design_effect(self, values: Mapping[str, float], confidence: float = 0.95) -> float:
        """The design effect: how many tasks in these groups carry as much information as one
        independent task. Dividing a sample size by it gives the effective sample size. Returns inf
        for a single group.

        It is the variance of the mean with groups as units divided by that with tasks as units, at
        least 1, times (t / z)**2, because the number of groups may be small. If all values are
        equal, nothing shows how similar the tasks of a group are; then each group counts as one
        task.

        Args:
            values: task id -> its value, for all tasks.
            confidence: coverage of the interval that will be computed from the effective sample
                size.
        """
        if self.count < 2:
            return math.inf
        quantile = 0.5 + confidence / 2.0  # of a two-sided interval
        t, z = t_quantile(quantile, self.count - 1), normal_quantile(quantile)
        return max(1.0, self._variance_ratio(values)) * (t / z) ** 2

    def _variance_ratio(self, values: Mapping[str, float]) -> float:
        """The variance of the mean with groups as units, divided by the variance with tasks as
        units.

        `values` maps a task id to its value. There must be at least two groups.
        """
        mean = math.fsum(values.values()) / self.task_count
        squares_of_tasks = math.fsum((value - mean) ** 2 for value in values.values())
        if squares_of_tasks == 0.0:  # all values are equal: take tasks of a group as identical
            return sum(len(tasks) ** 2 for tasks in self.members) / self.task_count
        group_sums = (math.fsum(values[task] - mean for task in tasks) for tasks in self.members)
        squares_of_groups = math.fsum(group_sum * group_sum for group_sum in group_sums)
        # The last factor makes the estimate unbiased for few groups.
        return squares_of_groups / squares_of_tasks * self.count / (self.count - 1)

    def p_of_mean(self, values: Mapping[str, float]) -> float:
        """The two-sided p value of the hypothesis that `values` (task id -> value) have the mean 0.

        McNemar's test for clustered pairs (Durkalski et al. 2003), with Student's t. Returns 1 for
        a single group, and if the values of every group sum to 0.
        """
        group_sums = [math.fsum(values[task] for task in tasks) for tasks in self.members]
        standard_error = math.sqrt(math.fsum(group_sum * group_sum for group_sum in group_sums))
        if self.count < 2 or standard_error == 0.0:
            return 1.0
        t = math.fsum(group_sums) / standard_error
        return min(1.0, 2.0 * t_cdf(-abs(t), self.count - 1))
