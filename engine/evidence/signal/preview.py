"""What a new reward would have given GRPO to learn from, measured on answers that a run has stored.

Both rewards, the old and the new, score the answers of each group (`evaluate` with `regrade`), so
that each group is compared with itself: how many groups carry a gradient, how far the rewards
within a group lie apart, how many answers earn the highest reward. The result holds for the policy
that gave the answers; a trained policy answers differently.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from engine.core.format import whole_percent
from engine.evidence.signal.kinds import Kind, floor_of, is_solved, kind_of, shares_of
from engine.evidence.stats.bootstrap import paired_bootstrap
from engine.evidence.stats.results import rounded
from engine.records.lines.evaluation_row import EvaluationRow


@dataclass(frozen=True)
class GroupLevels:
    """What the groups (the answers to one task each) are like under one reward.

    Attributes:
        effective, too_easy, too_hard, flat_partial: the share of groups of each kind.
        std: standard deviation of the reward within a group, mean over groups.
        at_top: share of the answers that earn the highest reward of any of them (saturation).
    """

    effective: float
    too_easy: float
    too_hard: float
    flat_partial: float
    std: float
    at_top: float


@dataclass(frozen=True)
class PairedChange:
    """A change from the old reward to the new one, with the ends of its 95 % bootstrap interval;
    tasks are resampled."""

    change: float
    low: float
    high: float

    def to_json(self) -> dict[str, object]:
        """The change and its interval as a JSON object: {"change": 0.27, "interval": [0.19,
        0.35]}."""
        interval = [rounded(self.low), rounded(self.high)]
        return {"change": rounded(self.change), "interval": interval}


@dataclass(frozen=True)
class SignalPreview:
    """Groups of stored answers under the old reward (`before`) and under the new one (`after`).

    Attributes:
        groups, tasks: the number of groups, and the number of different tasks among them.
        effective: the change of the share of groups whose rewards differ.
        std: the change of the standard deviation of the reward within a group.
    """

    groups: int
    tasks: int
    before: GroupLevels
    after: GroupLevels
    effective: PairedChange
    std: PairedChange

    def to_json(self) -> dict[str, object]:
        """The numbers, rounded, as a JSON object: counts, levels before and after, and changes."""
        return {
            "groups": self.groups,
            "tasks": self.tasks,
            "before": {name: rounded(value) for name, value in asdict(self.before).items()},
            "after": {name: rounded(value) for name, value in asdict(self.after).items()},
            "effective_change": self.effective.to_json(),
            "std_change": self.std.to_json(),
        }

    def sentence(self) -> str:
        """The preview in words: "Of 64 groups 31% differ by the old reward and 58% by the new one
        (+27 points, +19 to +35)", followed by the kinds of the groups that do not differ."""
        before, after = self.before, self.after
        change = self.effective  # of the share of groups whose rewards differ
        points = f"{100 * change.change:+.0f} points"
        interval = f"{100 * change.low:+.0f} to {100 * change.high:+.0f}"
        return (
            f"Of {self.groups} groups {whole_percent(before.effective)} differ by the old reward "
            f"and {whole_percent(after.effective)} by the new one ({points}, {interval}); by the "
            f"new one {whole_percent(after.too_easy)} are all right, "
            f"{whole_percent(after.flat_partial)} all alike at a partial reward, "
            f"{whole_percent(after.too_hard)} all without one."
        )


@dataclass(frozen=True)
class _Group:
    """The answers of one model to one task that both rewards, the old and the new, could score."""

    task: str
    rows: Sequence[EvaluationRow]

    def rewards(self, *, new: bool) -> list[float]:
        """The reward of each answer: the new reward, or with `new=False` the old one."""
        rewards = [row.reward if new else row.reward_before for row in self.rows]
        return [reward or 0.0 for reward in rewards]  # a missing reward counts as 0

    def solved(self, *, new: bool) -> list[bool]:
        """Whether each answer is right by the new score, or with `new=False` by the old one."""
        successes = [row.success if new else row.success_before for row in self.rows]
        pairs = zip(self.rewards(new=new), successes, strict=True)
        return [is_solved(reward, success) for reward, success in pairs]


def preview(models: Mapping[str, Sequence[EvaluationRow]]) -> SignalPreview | None:
    """Compare the groups (answers of one model to one task) under the old reward with the same
    groups under the new one.

    `models` maps the reference of a model (or of the rollouts of a step) to its rows. Returns None
    if no task was answered at least twice.
    """
    groups = _groups(models)
    if not groups:
        return None
    kinds_before = _kinds_of_groups(groups, new=False)
    kinds_after = _kinds_of_groups(groups, new=True)
    effective_changes = []  # of each group: 1 it became effective, -1 it was effective, 0 neither
    for before, after in zip(kinds_before, kinds_after, strict=True):
        effective_changes.append(float(after == "effective") - float(before == "effective"))
    std_changes = [_reward_std(group, new=True) - _reward_std(group, new=False) for group in groups]
    return SignalPreview(
        groups=len(groups),
        tasks=len({group.task for group in groups}),
        before=_levels(groups, kinds_before, new=False),
        after=_levels(groups, kinds_after, new=True),
        effective=_mean_change(groups, effective_changes),
        std=_mean_change(groups, std_changes),
    )


def _groups(models: Mapping[str, Sequence[EvaluationRow]]) -> list[_Group]:
    """Group the rows by model and task. A group must have at least two answers that both rewards
    could score; other rows are left out."""
    scored_rows: dict[tuple[str, str], list[EvaluationRow]] = {}  # by (model, task)
    for ref, rows in models.items():
        for row in rows:
            if not row.error and not row.error_before:
                scored_rows.setdefault((ref, row.task), []).append(row)
    return [_Group(task, rows) for (_, task), rows in scored_rows.items() if len(rows) > 1]


def _kinds_of_groups(groups: Sequence[_Group], *, new: bool) -> list[Kind]:
    """The kind of each group under the new reward, or with `new=False` under the old one."""
    floor = floor_of(reward for group in groups for reward in group.rewards(new=new))
    return [kind_of(group.rewards(new=new), group.solved(new=new), floor) for group in groups]


def _levels(groups: Sequence[_Group], kinds: Sequence[Kind], *, new: bool) -> GroupLevels:
    """What the groups are like under the new reward, or with `new=False` under the old one: the
    share of each kind of group, the spread within groups, and the share of answers that earn the
    highest reward. `kinds` holds the kind of each group."""
    rewards = [reward for group in groups for reward in group.rewards(new=new)]
    top_reward = max(rewards)
    return GroupLevels(
        **shares_of(kinds),
        std=statistics.fmean(_reward_std(group, new=new) for group in groups),
        at_top=rewards.count(top_reward) / len(rewards),
    )


def _reward_std(group: _Group, *, new: bool) -> float:
    """The standard deviation of the reward within a group, under the new reward or the old one."""
    return statistics.pstdev(group.rewards(new=new))


def _mean_change(groups: Sequence[_Group], differences: Sequence[float]) -> PairedChange:
    """The mean change over tasks with its 95 % interval. The groups of one task are averaged first.

    Args:
        differences: for each group, its value under the new reward minus its value under the old
            one.
    """
    by_task: dict[str, list[float]] = {}
    for group, difference in zip(groups, differences, strict=True):
        by_task.setdefault(group.task, []).append(difference)
    result = paired_bootstrap(by_task)
    return PairedChange(result.mean, result.low, result.high)
