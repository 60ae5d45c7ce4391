"""Rows of a dataset too large to be tokenised before training: each is when a step asks for it."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from engine.worker.core.failures import WorkerFailure
from envs.json_types import TaskRow

TRIES = 1_000  # rows that are rendered until one has a token to learn

Item = TypeVar("Item")  # a row, or a pair of rows


class RowsOnDemand(Generic[Item]):
    """As many rows as there are tasks, by index; nothing is kept of them.

    A row without a token to learn, such as one that lost them by a cut, gives way to the next one
    that has some.
    """

    def __init__(self, tasks: Sequence[TaskRow], render: Callable[[TaskRow], Item | None]) -> None:
        """`render` makes the row of a task; None where there is nothing to learn from."""
        self._tasks = tasks
        self._render = render

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> Item:
        """The row at `index`, or the next one that has something to learn; after the last row comes
        the first. Raises WorkerFailure (kind data) if none of TRIES rows has."""
        for next_index in range(index, index + min(TRIES, len(self))):
            row = self._render(self._tasks[next_index % len(self)])
            if row is not None:
                return row
        raise WorkerFailure(
            "data", "There are no rows that fit into max_length.", hint="Raise max_length."
        )
