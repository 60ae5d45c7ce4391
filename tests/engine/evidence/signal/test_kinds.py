"""The kinds of groups, and what stored metrics of earlier versions say of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.evidence.signal.kinds import KINDS, kind_of, quantile, shares_of, unsolved_shares


@pytest.mark.parametrize(
    ("rewards", "solved", "floor", "kind"),
    [
        ([0.0, 1.0], [False, True], 0.0, "effective"),
        ([1.0, 1.0], [True, True], 0.0, "too_easy"),
        ([0.3, 0.3], [False, False], 0.0, "flat_partial"),
        ([0.3, 0.3], [True, False], 0.0, "flat_partial"),
        ([0.0, 0.0], [False, False], 0.0, "too_hard"),
        ([0.0, 0.0], [False, False], -1.0, "flat_partial"),
        ([], [], 0.0, "too_hard"),
    ],
)
def test_a_group_is_of_one_kind(
    rewards: list[float], solved: list[bool], floor: float, kind: str
) -> None:
    assert kind_of(rewards, solved, floor) == kind


@given(st.lists(st.sampled_from(KINDS), min_size=1))
def test_the_shares_of_the_kinds_add_up_to_one(kinds: list) -> None:
    assert sum(shares_of(kinds).values()) == pytest.approx(1.0)


def test_a_quantile_lies_between_two_values() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([0.0, 1.0], 0.9) == pytest.approx(0.9)
    assert quantile([], 0.5) == 0.0


def test_metrics_of_earlier_versions_count_partial_groups_as_too_hard() -> None:
    lines = [
        {"step": 0, "heldout_success": 0.1},
        {"step": 1, "groups_too_hard": 0.75},
        {"step": 2, "groups_too_hard": 0.25, "groups_flat_partial": 0.5},
    ]
    assert unsolved_shares(lines) == [0.75, 0.75]
