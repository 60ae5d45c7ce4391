"""Computes advantages from the rewards of a group, with the standard library only.

With rewards r_1..r_G of one task, m their mean and s their standard deviation (n - 1):

- group_norm    (r_i - m) / (s + 1e-4)            GRPO, arXiv 2402.03300; the epsilon is TRL's
- group_center   r_i - m                          Dr. GRPO, arXiv 2503.20783
- rloo           r_i - mean of the others         arXiv 2402.14740; equals G / (G - 1) (r_i - m)

A member whose scoring failed takes no part: its advantage is 0, and the others do not count it.
"""

import statistics
from collections.abc import Callable, Sequence

from engine.worker.core.trajectory import Group

EPSILON = 1e-4  # keeps the division finite; TRL's value


def group_norm(rewards: Sequence[float]) -> list[float]:
    """Return (reward - mean) / (standard deviation + `EPSILON`) for each reward, in the same order.
    The advantage of a single reward is 0."""
    mean = statistics.fmean(rewards)
    spread = statistics.stdev(rewards) if len(rewards) > 1 else 0.0  # undefined for a single one
    return [(reward - mean) / (spread + EPSILON) for reward in rewards]


def group_center(rewards: Sequence[float]) -> list[float]:
    """Return reward - mean of all rewards, for each reward of a group, in the same order."""
    mean = statistics.fmean(rewards)
    return [reward - mean for reward in rewards]


def rloo(rewards: Sequence[float]) -> list[float]:
    """Return reward - mean of the other rewards, for each reward. A single reward, which has no
    others, has the advantage 0."""
    if len(rewards) < 2:
        return [0.0] * len(rewards)
    total = sum(rewards)
    other_count = len(rewards) - 1
    return [reward - (total - reward) / other_count for reward in rewards]


ADVANTAGES: dict[str, Callable[[Sequence[float]], list[float]]] = {
    "group_norm": group_norm,
    "group_center": group_center,
    "rloo": rloo,
}


def assign(groups: Sequence[Group], kind: str) -> None:
    """Set `advantage` on every trajectory of the groups by the formula `kind`. It is exactly 0.0
    for all members of a group with equal rewards, and for trajectories without a score. Raises
    KeyError if `kind` is no name in `ADVANTAGES`."""
    formula = ADVANTAGES[kind]
    for group in groups:
        for trajectory in group.members:
            trajectory.advantage = 0.0
        # Not computed, since rounding could turn equal rewards into tiny advantages.
        if group.uniform:
            continue
        for trajectory, value in zip(group.scored, formula(group.rewards), strict=True):
            trajectory.advantage = value
