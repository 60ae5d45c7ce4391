"""Metrics of a step's rollouts, counted by hand."""

import pytest

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


def scored(task: str, *answers: tuple[float, bool | None]) -> Group:
    members = [Trajectory(task, [], [1], [2], [1], reward=r, success=s) for r, s in answers]
    return Group(task, members)


def group_metrics(*groups: Group) -> dict[str, float]:
    return batch_metrics(RolloutBatch(list(groups), [], Times()), 1.0)


def test_groups_are_told_apart_by_what_they_can_teach() -> None:
    values = group_metrics(
        scored("differ", (1.0, True), (0.0, False)),
        scored("right", (1.0, True), (1.0, True)),
        scored("wrong", (0.0, False), (0.0, False)),
        scored("on a plateau", (0.3, False), (0.3, False)),
        scored("blind", (0.5, True), (0.5, False)),  # right and wrong are paid alike
        scored("right, without success", (0.2, None), (0.2, None)),
        Group("failed", [play("env_error"), play("timeout")]),
        Group("one scored", [play("env_error"), scored("x", (0.3, False)).members[0]]),
    )
    kinds = ("effective", "too_easy", "too_hard", "flat_partial")
    counts = {kind: 8 * values[f"groups_{kind}"] for kind in kinds}
    assert counts == {"effective": 1, "too_easy": 2, "too_hard": 2, "flat_partial": 3}


def test_where_wrong_answers_cost_something_zero_is_a_part_of_the_way() -> None:
    values = group_metrics(
        scored("floor", (-1.0, False), (-1.0, False)), scored("half", (0.0, False), (0.0, False))
    )
    assert values["groups_too_hard"] == values["groups_flat_partial"] == 0.5


def test_quantiles_are_of_the_groups_not_of_their_answers() -> None:
    groups = [scored(str(i), (i / 10, False), (i / 10 + 0.2, False)) for i in range(11)]
    values = group_metrics(*groups, Group("failed", [play("env_error")]))
    # Means 0.1, 0.2, ... 1.1: the tenth, the half and nine tenths of the way through them.
    assert [values[f"group_mean_{p}"] for p in ("p10", "p50", "p90")] == pytest.approx(
        [0.2, 0.6, 1.0]
    )
    assert [values[f"group_std_{p}"] for p in ("p10", "p50", "p90")] == pytest.approx([0.1] * 3)
    assert group_metrics(Group("failed", [play("env_error")]))["group_std_p90"] == 0.0
