"""Padding, labels and microbatches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.worker.core.batch import Row, collate, microbatches


def test_each_trained_token_is_predicted_by_the_position_before_it() -> None:
    batch = collate([Row([5, 6, 7], [0, 1, 1]), Row([8, 9], [0, 1])], pad=0)
    assert batch.ids.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert batch.labels.tolist() == [6, 7, 9]
    assert [batch.ids.flatten()[i].item() for i in batch.source] == [5, 6, 8]
    assert batch.row.tolist() == [0, 0, 1]


def test_a_trained_first_token_is_refused() -> None:
    with pytest.raises(ValueError, match="first token"):
        collate([Row([5, 6], [1, 1])], pad=0)


@given(st.lists(st.integers(1, 400), max_size=60), st.integers(50, 2000))
def test_microbatches_hold_every_row_once_and_stay_within_the_budget(
    lengths: list[int], budget: int
) -> None:
    groups = microbatches(lengths, budget)
    assert sorted(i for g in groups for i in g) == list(range(len(lengths)))
    for group in groups:
        assert len(group) == 1 or max(lengths[i] for i in group) * len(group) <= budget
