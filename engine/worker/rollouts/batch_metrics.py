"""Computes the metrics of a step's rollouts; engine/core/metrics.py says what each one means."""

import math
import statistics
from collections.abc import Sequence

from engine.core.metrics import curve_name
from engine.evidence.signal.kinds import (
    QUANTILES,
    floor_of,
    is_solved,
    kind_of,
    quantile,
    shares_of,
)
from engine.worker.core.trajectory import Group, Trajectory
from engine.worker.rollouts.batch_source import RolloutBatch
from envs.metering.judge_calls import JudgeUse

JUDGE_METRICS = ("judge_calls", "judge_retries", "judge_tokens", "judge_s", "judge_cost")


def batch_metrics(batch: RolloutBatch, seconds: float) -> dict[str, float | None]:
    """Return the metrics of a step's rollouts, by name. Rewards, lengths and shares of completions
    count all sampled trajectories, including those of groups that were replaced.

    Args:
        batch: the rollouts of the step.
        seconds: how long the whole step took.
    """
    members = batch.members
    scored = [trajectory for trajectory in members if trajectory.error is None]
    sampled_tokens = sum(trajectory.sampled_tokens for trajectory in members)
    return {
        **_reward_metrics(scored),
        **_completion_metrics(members),
        **_group_metrics(batch.groups),
        **_spread_metrics(batch.groups),
        "resampled_groups": len(batch.dropped),
        "reward_errors": (len(members) - len(scored)) / len(members),
        "sample_s": batch.times.sample_s,
        "reward_s": batch.times.reward_s,
        "tokens_per_s": sampled_tokens / max(1e-9, seconds),  # never divides by 0
        **_judge_metrics(batch.times.judge),
        **_environment_metrics(scored),
    }


def _judge_metrics(use: JudgeUse) -> dict[str, float | None]:
    """Return how much language models as judges were used for the batch: calls, retries, tokens and
    cost in all, and the mean seconds of a call. All values are None if none was asked (`use` is
    then false)."""
    if not use:
        return dict.fromkeys(JUDGE_METRICS)
    return {
        "judge_calls": use.calls,
        "judge_retries": use.retries,
        "judge_tokens": use.tokens,
        "judge_s": use.seconds / max(1.0, use.calls),
        "judge_cost": use.cost,
    }


def _reward_metrics(scored: Sequence[Trajectory]) -> dict[str, float]:
    """Return mean and spread of the rewards of scored trajectories, and the mean of their shaped
    rewards (rewards minus penalties). All are 0 if there are no scored trajectories."""
    rewards = [trajectory.reward for trajectory in scored] or [0.0]
    shaped = [trajectory.shaped_reward for trajectory in scored] or [0.0]
    return {
        "reward_mean": statistics.fmean(rewards),
        "reward_std": statistics.pstdev(rewards),
        "shaped_reward_mean": statistics.fmean(shaped),
    }


def _completion_metrics(members: Sequence[Trajectory]) -> dict[str, float]:
    """Return metrics of the completions of `members`, by name: their lengths in tokens, the share
    that a limit cut off, the mean number of branches (conversations of a rollout beside its first,
    "unstitched"), and the share with an invalid tool call."""
    lengths = sorted(trajectory.sampled_tokens for trajectory in members)
    with_invalid_call = sum(bool(trajectory.invalid_calls) for trajectory in members)
    return {
        "length_mean": statistics.fmean(lengths),
        # The smallest length that at least 95% of the completions do not exceed.
        "length_p95": lengths[math.ceil(0.95 * len(lengths)) - 1],
        "truncated_share": sum(trajectory.cut for trajectory in members) / len(members),
        "unstitched": sum(len(trajectory.branches) for trajectory in members) / len(members),
        "invalid_calls": with_invalid_call / len(members),
    }


def _group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return metrics of the groups that are trained on, by name.

    They are the share of their trajectories with an advantage of 0, and the share of the groups of
    each kind (engine/evidence/signal/kinds.py).
    """
    members = [trajectory for group in groups for trajectory in group.members]
    # The lowest reward of all; `kind_of` compares the rewards of a group with it.
    floor = floor_of(reward for group in groups for reward in group.rewards)
    shares = shares_of([kind_of(group.rewards, _solved(group), floor) for group in groups])
    return {
        "zero_advantage_share": sum(member.advantage == 0.0 for member in members) / len(members),
        **{f"groups_{kind}": share for kind, share in shares.items()},
    }


def _solved(group: Group) -> list[bool]:
    """Tell for each scored trajectory of a group whether it solved its task."""
    return [is_solved(trajectory.reward, trajectory.success) for trajectory in group.scored]


def _spread_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return how the groups are distributed: quantiles, over the groups, of the mean and the
    standard deviation of their shaped rewards. They are 0 if nothing was scored."""
    rewards_of_groups = [group.rewards for group in groups if group.rewards]
    by_figure = {
        "mean": [statistics.fmean(rewards) for rewards in rewards_of_groups],
        "std": [statistics.pstdev(rewards) for rewards in rewards_of_groups],
    }
    return {
        f"group_{figure}_{name}": quantile(values, share)
        for figure, values in by_figure.items()
        for name, share in QUANTILES.items()
    }


def _environment_metrics(scored: Sequence[Trajectory]) -> dict[str, float]:
    """Return the mean of each metric that the environment itself reports, by the name of its column
    (`curve_name`). It is a mean over those scored trajectories that have the metric."""
    names = sorted({name for trajectory in scored for name in trajectory.metrics})
    means: dict[str, float] = {}
    for name in names:
        values = [trajectory.metrics[name] for trajectory in scored if name in trajectory.metrics]
        means[curve_name(name)] = statistics.fmean(values)
    return means
