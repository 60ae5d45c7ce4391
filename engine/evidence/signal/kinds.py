"""Whether a group of answers to one task carries a gradient, and if it carries none, why not.

The trainer counts the kinds at every step, and the scoring of stored answers by a new reward counts
them before and after.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from engine.records.lines.curves import number

# effective: the rewards differ. Where they are equal, too_easy: every answer is right; else
# flat_partial: all earn the same part of the way, or too_hard: they earn nothing.
Kind = Literal["effective", "too_easy", "too_hard", "flat_partial"]
KINDS: tuple[Kind, ...] = ("effective", "too_easy", "too_hard", "flat_partial")
QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}


def kind_of(rewards: Sequence[float], solved: Iterable[bool], floor: float = 0.0) -> Kind:
    """The kind of a group (the answers to one task), by those of its answers that could be scored:

    - effective: their rewards differ, so that GRPO can learn from the group;
    - too_easy: all rewards are equal and all answers are right;
    - flat_partial: all rewards are equal and above `floor`, and not all answers are right;
    - too_hard: all rewards are equal and at `floor`, or no answer could be scored.

    Args:
        rewards: the reward of each answer.
        solved: of each answer, whether it is right.
        floor: the reward of answers that achieved nothing.
    """
    if len(set(rewards)) > 1:
        return "effective"
    if not rewards:
        return "too_hard"
    if all(solved):
        return "too_easy"
    return "flat_partial" if rewards[0] > floor else "too_hard"


def is_solved(reward: float, success: bool | None) -> bool:
    """Whether an answer is right: `success`, what the environment reported. If it reported none, an
    answer is right if its reward is positive."""
    return success if success is not None else reward > 0


def floor_of(rewards: Iterable[float]) -> float:
    """The reward of answers that achieved nothing: 0, or the lowest of `rewards` if that is
    negative."""
    return min([0.0, *rewards])


def shares_of(kinds: Sequence[Kind]) -> dict[Kind, float]:
    """The share of each kind of group among `kinds`; the four shares add up to 1.

    `kinds` holds the kind of each group and must not be empty.
    """
    counts = Counter(kinds)
    return {kind: counts[kind] / len(kinds) for kind in KINDS}


def unsolved_shares(lines: Iterable[Mapping[str, Any]]) -> list[float]:
    """For each training step, the share (0 to 1) of groups with equal rewards that did not solve
    their task: too_hard and flat_partial together. Metrics of earlier versions have only
    `groups_too_hard`, which counted both.

    Args:
        lines: those of the metrics; lines without `groups_too_hard` are left out.
    """
    shares: list[float] = []
    for line in lines:
        too_hard = number(line.get("groups_too_hard"))
        if too_hard is not None:
            flat_partial = number(line.get("groups_flat_partial")) or 0.0
            shares.append(too_hard + flat_partial)
    return shares


def quantile(values: Sequence[float], share: float) -> float:
    """The quantile of `values` at `share`: the value below which that share (0 to 1) of them lies.

    Between two values it is interpolated linearly. Returns 0 if there are no values.
    """
    if not values:
        return 0.0
    ascending = sorted(values)
    position = share * (len(ascending) - 1)  # e.g. 1.5: halfway between the second and the third
    below = int(position)
    above = min(below + 1, len(ascending) - 1)
    step = ascending[above] - ascending[below]
    return ascending[below] + (position - below) * step
