"""Rows that are tokenised when a step asks for them."""

import pytest

from engine.worker.core.batch import Row
from engine.worker.core.failures import WorkerFailure
from engine.worker.core.rows_on_demand import RowsOnDemand


def test_a_row_without_a_token_to_learn_gives_way_to_the_next_one() -> None:
    tasks = [{"id": n} for n in range(4)]
    rows = RowsOnDemand(
        tasks, lambda task: Row([task["id"], 9], [0, 1]) if task["id"] % 3 == 0 else None
    )
    assert len(rows) == 4
    assert [rows[n].ids[0] for n in range(4)] == [0, 3, 3, 3]
    none: RowsOnDemand[Row] = RowsOnDemand(tasks[1:3], lambda task: None)
    with pytest.raises(WorkerFailure, match="max_length"):
        none[1]
