"""Rows of a dataset that is too large to be tokenised before training: each row is tokenised when a
step asks for it."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from engine.worker.core.failures import WorkerFailure
from envs.json_types import TaskRow

TRIES = 1_000  # at most so many rows are rendered to find one with a token to learn

Item = TypeVar("Item")  # a row, or a pair of rows


class RowsOnDemand(Generic[Item]):
    """A sequence with one row per task, rendered each time it is asked for and not kept.

    A row without a token to learn, such as one that was cut before its answer, is replaced by the
    next row that has some.
    """

    def __init__(self, tasks: Sequence[TaskRow], render: Callable[[TaskRow], Item | None]) -> None:
        """`render` makes the row of a task, or returns None if the row has nothing to learn."""
        self._tasks = tasks
        self._render = render

    def __len__(self) -> int:
        """Return the number of tasks; each has one row."""
        return len(self._tasks)

    def __getitem__(self, index: int) -> Item:
        """Render the row at `index`, or the next one that has something to learn; the first row
        follows the last. Raises WorkerFailure (kind data) if none of the next TRIES rows has."""
        for next_index in range(index, index + min(TRIES, len(self))):
            row = self._render(self._tasks[next_index % len(self)])
            if row is not None:
                return row
        raise WorkerFailure(
            "data", "There are no rows that fit into max_length.", hint="Raise max_length."
        )
