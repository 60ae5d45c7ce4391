"""A step takes its rows in other words, unless those cannot be trained whole."""

import pytest

from engine.worker.core.batch import Row
from engine.worker.core.varied_rows import TrainingRows, VariedRows
from envs.json_types import TaskRow

PLAIN = [Row([1, 2], [0, 1]), Row([3, 4], [0, 1])]
TASKS: list[TaskRow] = [{"id": "a"}, {"id": "b"}]
ORIGINS = [(TASKS[0], 0), (TASKS[1], -1)]


def varied(rendered: list[tuple[Row, int]], only_step: int = 2) -> VariedRows:
    """Rows of which every one comes as `rendered` in `only_step`."""
    return VariedRows(
        TrainingRows(PLAIN, ORIGINS.__getitem__),
        in_other_words=lambda task, step: {**task, "asked": 1} if step == only_step else task,
        render=lambda task: rendered,
    )


def test_a_row_comes_in_other_words_in_the_step_that_rewords_it():
    first, last = Row([7], [1]), Row([8], [1])
    rows = varied([(first, 1), (last, 1)])
    assert rows.batch(1, [0, 1]) == PLAIN
    assert rows.batch(2, [0, 1]) == [first, last]  # the second is the last row of its task
    assert len(rows) == 2


@pytest.mark.parametrize(
    "rendered",
    [
        [],  # the template drops it
        [(Row([7, 8], [0, 1]), 3)],  # cut at max_length
        [(Row([7, 8], [0, 0]), 2)],  # nothing to train
    ],
)
def test_other_words_that_cannot_be_trained_whole_leave_the_row_as_it_is(
    rendered: list[tuple[Row, int]],
):
    assert varied(rendered).batch(2, [0, 1]) == PLAIN
