"""Metrics of a step's rollouts, counted by hand."""

from engine.worker.core.trajectory import Group, StopReason, Trajectory
from engine.worker.rollouts.batch_metrics import batch_metrics
from engine.worker.rollouts.batch_source import RolloutBatch
from engine.worker.rollouts.collect import Times


def play(reason: StopReason, *invalid_calls: str) -> Trajectory:
    error = "no" if reason in ("timeout", "env_error") else None
    ended = Trajectory("t", [], [1], [2], [1], stop_reason=reason, error=error)
    ended.invalid_calls = list(invalid_calls)
    return ended


def test_shares_are_over_all_completions_that_were_sampled() -> None:
    trained = Group("a", [play("stop"), play("max_tokens", "turn 1: x"), play("max_context")])
    failed = Group("b", [play("timeout"), play("env_error", "turn 1: x"), play("max_turns")])
    dropped = Group("c", [play("stop", "turn 1: x", "turn 2: y"), play("stop")])
    values = batch_metrics(RolloutBatch([trained, failed], [dropped], Times()), 1.0)
    assert values["invalid_calls"] == 3 / 8  # of completions: one with two counts once
    assert values["truncated_share"] == 3 / 8
    assert values["reward_errors"] == 2 / 8


def test_without_tool_calls_none_is_invalid() -> None:
    batch = RolloutBatch([Group("a", [play("stop"), play("max_turns")])], [], Times())
    assert batch_metrics(batch, 1.0)["invalid_calls"] == 0.0
