"""Advantages against hand-computed numbers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.worker.core.trajectory import Group, Trajectory
from engine.worker.rollouts.advantages import ADVANTAGES, assign

rewards = st.lists(st.floats(-5, 5), min_size=2, max_size=16)


def group(*values: float, errors: tuple[int, ...] = ()) -> Group:
    members = [Trajectory("t", [], [1], reward=v) for v in values]
    for index in errors:
        members[index].error = "boom"
    return Group("t", members)


def test_group_norm_of_one_right_answer_in_four() -> None:
    g = group(1, 0, 0, 0)
    assign([g], "group_norm")
    # mean 1/4, standard deviation (n - 1) = sqrt((9/16 + 3/16) / 3) = 1/2
    assert g.members[0].advantage == pytest.approx(0.75 / 0.5001)
    assert g.members[1].advantage == pytest.approx(-0.25 / 0.5001)


def test_group_center_only_subtracts_the_mean() -> None:
    g = group(1, 0, 0, 0)
    assign([g], "group_center")
    assert [m.advantage for m in g.members] == [0.75, -0.25, -0.25, -0.25]


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    g = group(1, 0, 0, 0)
    assign([g], "rloo")
    assert [m.advantage for m in g.members] == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])


@given(rewards, st.sampled_from(sorted(ADVANTAGES)))
def test_advantages_of_a_group_sum_to_zero(values: list[float], kind: str) -> None:
    g = group(*values)
    assign([g], kind)
    assert math.isclose(sum(m.advantage for m in g.members), 0, abs_tol=1e-6)


@given(st.floats(-5, 5), st.integers(1, 16), st.sampled_from(sorted(ADVANTAGES)))
def test_equal_rewards_give_exactly_zero(value: float, size: int, kind: str) -> None:
    g = group(*[value] * size)
    assign([g], kind)
    assert [m.advantage for m in g.members] == [0.0] * size


def test_a_failed_member_neither_learns_nor_is_compared_with() -> None:
    g = group(1, 0, 0.9, errors=(2,))
    assign([g], "group_center")
    assert [m.advantage for m in g.members] == [0.5, -0.5, 0.0]
