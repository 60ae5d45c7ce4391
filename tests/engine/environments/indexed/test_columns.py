"""Numbers of millions of rows, looked at in portions."""

from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.environments.indexed import columns

HASHES = st.lists(st.integers(0, 2**64 - 1) | st.sampled_from([0, 7, 2**64 - 1]), max_size=30)


@given(HASHES)
def test_values_seen_before_are_found_whatever_the_portions(values: list[int]):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "PORTION", 3)
        assert columns.count_distinct(values) == len(set(values))
        found = sorted(columns.find_repeated(values))
    expected = [(n, values.index(v)) for n, v in enumerate(values) if values.index(v) < n]
    assert found == expected


def test_a_column_is_read_as_it_was_written(tmp_path: Path):
    column = columns.Column(tmp_path / "c", "Q")
    assert list(column.values()) == []
    column.extend(array("Q", [1, 2**64 - 1]))
    column.extend(array("Q", [3]))
    assert list(column.values()) == [1, 2**64 - 1, 3]
    assert list(columns.map_numbers(tmp_path / "c", "Q", 8, 2)) == [2**64 - 1, 3]
