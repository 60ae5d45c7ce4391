"""A batch is cut into neighbouring parts of about equal work."""

from hypothesis import given
from hypothesis import strategies as st

from engine.worker.ranks.shares import cut

COSTS = st.lists(st.floats(0.5, 1000, allow_nan=False), max_size=40)


@given(COSTS, st.integers(1, 8))
def test_every_item_goes_to_one_rank_in_order(costs: list[float], ranks: int) -> None:
    parts = cut(costs, ranks)
    assert len(parts) == ranks
    assert [index for part in parts for index in part] == list(range(len(costs)))
    assert not costs or parts[0]


@given(COSTS, st.integers(1, 8))
def test_no_rank_has_more_than_its_share_and_one_item(costs: list[float], ranks: int) -> None:
    for part in cut(costs, ranks):
        assert sum(costs[i] for i in part) <= sum(costs) / ranks + max(costs, default=0) + 1e-6


def test_equal_items_are_divided_evenly() -> None:
    assert [len(part) for part in cut([1.0] * 8, 4)] == [2, 2, 2, 2]
    assert [len(part) for part in cut([1.0] * 2, 4)] == [1, 0, 0, 1]
    assert [list(part) for part in cut([3.0, 1.0, 1.0, 1.0], 2)] == [[0], [1, 2, 3]]
