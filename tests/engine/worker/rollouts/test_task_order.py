"""Which tasks a step plays: shuffled, or by what the run's own groups earned."""

import json
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typed_settings import grpo_settings

from engine.worker.core.trajectory import Group, Trajectory
from engine.worker.rollouts.task_order import (
    LEAST_WEIGHT,
    RolloutOrder,
    ShuffledOrder,
    chance_to_differ,
    shuffled_tasks,
    task_order,
)
from envs.json_types import TaskRow

PER_STEP = 8
SETTINGS = grpo_settings(
    {"seed": 3, "prompts_per_step": PER_STEP, "group_size": 8, "curriculum": "rollouts"}
)


def tasks(count: int) -> list[TaskRow]:
    return [{"id": f"t{i}", "prompt": [], "split": "train"} for i in range(count)]  # type: ignore[misc]


def group(task_id: str, rewards: list[float], failed: int = 0) -> Group:
    members = [Trajectory(task_id, [], [1], reward=reward) for reward in rewards]
    members += [Trajectory(task_id, [], [1], error="no") for _ in range(failed)]
    return Group(task_id, members)


def teaches(index: int) -> bool:
    """One task in four has answers of two rewards; the others are solved always or never."""
    return index % 4 == 0


def rewards_of(index: int) -> list[float]:
    return [1.0] * 4 + [0.0] * 4 if teaches(index) else [float(index % 2)] * 8


def played(order: RolloutOrder, first: int, last: int) -> list[list[int]]:
    """The tasks of the steps, each step's groups noted before the next one is chosen."""
    steps = []
    for step in range(first, last + 1):
        steps.append(order.tasks_of_step(step))
        order.record(step, [group(f"t{i}", rewards_of(i)) for i in steps[-1]])
    return steps


# --- shuffled ------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "per_step", "seed"), [(24, 4, 3), (10, 4, 0), (5, 8, 7)])
def test_the_shuffled_order_is_an_order_per_epoch_of_the_seed(
    count: int, per_step: int, seed: int
) -> None:
    epochs: list[int] = []
    for epoch in range(12):
        order = list(range(count))
        random.Random(f"{seed}-{epoch}").shuffle(order)
        epochs += order
    order = ShuffledOrder(count, per_step, seed)
    for step in range(1, 6):
        expected = epochs[(step - 1) * per_step : step * per_step]
        assert order.tasks_of_step(step) == expected
        assert shuffled_tasks(step, count, per_step, seed) == expected


def test_rewards_do_not_change_the_shuffled_order() -> None:
    settings = SETTINGS.model_copy(update={"curriculum": "none"})
    state: dict[str, Any] = {}
    order = task_order(tasks(40), settings, state)
    assert isinstance(order, ShuffledOrder)
    order.record(1, [group("t1", [1.0, 0.0])])
    assert order.tasks_of_step(2) == shuffled_tasks(2, 40, PER_STEP, 3) and state == {}


@given(
    step=st.integers(1, 1000),
    number=st.integers(1, 8),
    count=st.integers(1, 40),
    wanted=st.integers(0, 40),
    curriculum=st.sampled_from(["none", "rollouts"]),
    data=st.data(),
)
def test_fresh_tasks_are_unused_distinct_and_the_same_every_time(
    step: int, number: int, count: int, wanted: int, curriculum: str, data: st.DataObject
) -> None:
    used = data.draw(st.sets(st.integers(0, count - 1)))
    known = data.draw(st.sets(st.integers(0, count - 1)))
    settings = SETTINGS.model_copy(update={"curriculum": curriculum})
    order = task_order(tasks(count), settings, {})
    order.record(step, [group(f"t{i}", rewards_of(i)) for i in known])
    chosen = order.fresh_tasks(step, number, wanted, used)
    assert chosen == order.fresh_tasks(step, number, wanted, used)
    assert len(chosen) == len(set(chosen)) == min(wanted, count - len(used))
    assert not set(chosen) & used and all(0 <= task < count for task in chosen)


# --- by rollouts -----------------------------------------------------------------------------


def test_every_task_is_tried_before_long_and_the_first_step_plays_unseen_ones_alone() -> None:
    steps = played(RolloutOrder(tasks(64), SETTINGS, {}), 1, 16)
    assert steps[0] == shuffled_tasks(1, 64, PER_STEP, 3)
    seen: set[int] = set()
    for chosen in steps[:8]:
        new = set(chosen) - seen
        assert len(new) >= PER_STEP / 2 and len(set(chosen)) == PER_STEP
        seen |= new
    assert {index for chosen in steps for index in chosen} == set(range(64))


def test_tasks_whose_answers_differ_are_drawn_most_and_none_is_left_for_good() -> None:
    order = RolloutOrder(tasks(32), SETTINGS, {})
    steps = played(order, 1, 400)
    late = Counter(index for chosen in steps[40:] for index in chosen)
    teaching = sum(count for index, count in late.items() if teaches(index)) / late.total()
    assert teaching > 0.6  # a quarter of the tasks; all are played of a quarter of the places each
    assert set(late) == set(range(32))


def test_a_task_that_begins_to_teach_is_drawn_more_often_from_then_on() -> None:
    order = RolloutOrder(tasks(32), SETTINGS, {})
    played(order, 1, 40)
    before = order.weight("t1", 41)
    order.record(41, [group("t1", [1.0] * 4 + [0.0] * 4)])
    assert before < 0.2 and order.weight("t1", 42) > 3 * before


def test_what_was_seen_of_a_task_fades_so_that_it_is_tried_again() -> None:
    order = RolloutOrder(tasks(32), SETTINGS, {})
    for step in (1, 2, 3):
        order.record(step, [group("t0", [0.0] * 8)])
    weights = [order.weight("t0", step) for step in (3, 12, 24, 400)]
    assert weights == sorted(weights) and weights[0] == LEAST_WEIGHT < weights[1]
    # All but forgotten: as before the first answer.
    assert weights[-1] == pytest.approx(chance_to_differ(0, 0, 8) ** 2, abs=0.01)


def test_answers_that_could_not_be_scored_count_for_nothing() -> None:
    order = RolloutOrder(tasks(4), SETTINGS, {})
    order.record(1, [group("t0", [1.0, 0.0], failed=6), group("t1", [], failed=8)])
    assert order.seen == {"t0": [1, 2, 1], "t1": [0, 0, 1]}


@pytest.mark.parametrize(
    ("differing", "answers", "size", "chance"),
    [
        (0, 0, 2, 0.25),  # E[2 f (1 - f)] of a beta(1/2, 1/2)
        (
            0,
            8,
            8,
            1 - 0.712646 - 0.000015,
        ),  # products of (8.5 + i) / (9 + i) and (.5 + i) / (9 + i)
        (4, 8, 2, 2 * 0.225),  # E[f (1 - f)] = 4.5 * 4.5 / (9 * 10)
    ],
)
def test_the_chance_that_a_group_differs(
    differing: float, answers: float, size: int, chance: float
) -> None:
    assert chance_to_differ(differing, answers, size) == pytest.approx(chance, abs=1e-5)


@given(stop=st.integers(1, 14), count=st.integers(1, 40), seed=st.integers(0, 5))
def test_a_resumed_order_plays_the_tasks_of_one_that_never_stopped(
    stop: int, count: int, seed: int
) -> None:
    settings = SETTINGS.model_copy(update={"seed": seed})
    whole = played(RolloutOrder(tasks(count), settings, {}), 1, 16)
    state: dict[str, Any] = {}
    assert played(RolloutOrder(tasks(count), settings, state), 1, stop) == whole[:stop]
    kept = json.loads(json.dumps(state))  # as a checkpoint keeps it
    assert played(RolloutOrder(tasks(count), settings, kept), stop + 1, 16) == whole[stop:]


def test_with_fewer_tasks_than_places_every_task_is_played_again() -> None:
    for chosen in played(RolloutOrder(tasks(3), SETTINGS, {}), 1, 4):
        assert len(chosen) == PER_STEP and set(chosen) == {0, 1, 2}
