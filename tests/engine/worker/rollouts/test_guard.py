"""A run ends when it cannot learn, and in good order when it has no more to learn."""

from types import SimpleNamespace
from typing import Any

import pytest

from engine.worker.core.failures import WorkerFailure
from engine.worker.rollouts.guard import NO_SIGNAL_STEPS, Guard


def batch(*advantages: float, errors: int = 0, reward: float = 1.0) -> Any:
    members = [
        SimpleNamespace(advantage=value, reward=reward, error="boom" if index < errors else None)
        for index, value in enumerate(advantages)
    ]
    return SimpleNamespace(members=members)


def test_rewards_that_never_differ_fail_the_run():
    state: dict[str, Any] = {}
    guard = Guard(0.2, state, "arith-1")
    for step in range(1, NO_SIGNAL_STEPS):
        guard.check(step, batch(0.0, 0.0))
    with pytest.raises(WorkerFailure) as caught:
        guard.check(NO_SIGNAL_STEPS, batch(0.0, 0.0))
    assert caught.value.kind == "no_signal"
    assert state.get("ends_at") is None


def test_rewards_that_differ_no_more_end_the_run_in_good_order():
    state: dict[str, Any] = {}
    guard = Guard(0.2, state, "arith-1")
    guard.check(1, batch(1.0, -1.0))
    for step in range(2, NO_SIGNAL_STEPS + 1):
        guard.check(step, batch(0.0, 0.0))
        assert state.get("ends_at") is None
    guard.check(NO_SIGNAL_STEPS + 1, batch(0.0, 0.0))
    assert state["ends_at"] == NO_SIGNAL_STEPS + 1


def test_rewards_that_fell_and_differ_no_more_fail_the_run():
    guard = Guard(0.2, {}, "arith-1")
    for step in range(1, 11):
        guard.check(step, batch(1.0, -1.0, reward=0.5))
    with pytest.raises(WorkerFailure) as caught:
        for step in range(11, 11 + NO_SIGNAL_STEPS):
            guard.check(step, batch(0.0, 0.0, reward=0.0))
    assert caught.value.kind == "no_signal" and "lower learning_rate" in str(caught.value.advice)


def test_rewards_that_stay_level_but_for_chance_end_the_run_in_good_order():
    state: dict[str, Any] = {}
    guard = Guard(0.2, state, "arith-1")
    for step, reward in enumerate([0.5, 0.2, 0.6, 0.3, 0.5, 0.4], 1):
        guard.check(step, batch(1.0, -1.0, reward=reward))
    for step, reward in enumerate([0.2, 0.5, 0.4, 0.3, 0.2, 0.5, 0.4, 0.3, 0.3, 0.4], 7):
        guard.check(step, batch(0.0, 0.0, reward=reward))
    assert state["ends_at"] == 16


def test_steps_without_a_single_score_are_no_end_in_good_order():
    state: dict[str, Any] = {}
    guard = Guard(0.9, state, "arith-1")
    for step in range(1, 60):
        guard.check(step, batch(1.0, -1.0, reward=-0.5))
    for step in range(60, 60 + NO_SIGNAL_STEPS):
        guard.check(step, batch(0.0, 0.0, errors=2))
    assert state.get("ends_at") is None


def test_a_run_of_an_earlier_version_had_a_signal_if_its_last_step_had_one():
    state: dict[str, Any] = {"silent_steps": 9, "played": 1600, "errors": 0}
    Guard(0.2, state, "arith-1").check(101, batch(0.0, 0.0))
    assert state["ends_at"] == 101


def test_one_step_that_differs_begins_the_count_anew_and_a_resumed_run_goes_on_counting():
    state: dict[str, Any] = {}
    guard = Guard(0.2, state, "arith-1")
    for step in range(1, NO_SIGNAL_STEPS):
        guard.check(step, batch(0.0, 0.0))
    guard.check(NO_SIGNAL_STEPS, batch(1.0, -1.0))
    resumed = Guard(0.2, dict(state), "arith-1")
    for step in range(NO_SIGNAL_STEPS + 1, 2 * NO_SIGNAL_STEPS):
        resumed.check(step, batch(0.0, 0.0))
    assert resumed.state.get("ends_at") is None
    resumed.check(2 * NO_SIGNAL_STEPS, batch(0.0, 0.0))
    assert resumed.state["ends_at"] == 2 * NO_SIGNAL_STEPS


def test_scores_that_fail_end_the_run_only_after_enough_completions():
    guard = Guard(0.2, {}, "arith-1")
    guard.check(1, batch(*[1.0] * 16, errors=8))
    with pytest.raises(WorkerFailure) as caught:
        guard.check(2, batch(*[1.0] * 16, errors=8))
    assert caught.value.kind == "reward"
