"""The rows that SFT trains on, and how each may come in other words whenever a step takes it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.worker.core.batch import Row
from engine.worker.core.rows_on_demand import RowsOnDemand
from envs.json_types import TaskRow

# What a row was rendered from: its task, and which of the conversation's rows it is, from 0; -1 for
# the last one.
Origin = tuple[TaskRow, int]


@dataclass(frozen=True)
class TrainingRows:
    """The rows of a run, as they are.

    Attributes:
        rows: rendered before the first step, or each when a step asks for it.
        origin: what the row at an index was rendered from.
    """

    rows: Sequence[Row] | RowsOnDemand[Row]
    origin: Callable[[int], Origin]

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, step: int, indices: Sequence[int]) -> list[Row]:
        """The rows at `indices`; the same in every step."""
        return [self.rows[index] for index in indices]


@dataclass(frozen=True)
class VariedRows:
    """The rows of a run, some of them in other words each time that they are seen.

    Attributes:
        plain: the rows as they are.
        in_other_words: a task as the step of that number (from 1) sees it; the same object where it
            stays as it is.
        render: all rows of a task, each with the number of ids that it has uncut.
    """

    plain: TrainingRows
    in_other_words: Callable[[TaskRow, int], TaskRow]
    render: Callable[[TaskRow], list[tuple[Row, int]]]

    def __len__(self) -> int:
        return len(self.plain)

    def batch(self, step: int, indices: Sequence[int]) -> list[Row]:
        """The rows at `indices` as `step` sees them."""
        return [self._row(step, index) for index in indices]

    def _row(self, step: int, index: int) -> Row:
        """The row at `index` as `step` sees it. Where its other words leave nothing to train or do
        not fit, it stays as it is."""
        # A task may have several rows; `number` says which of them this one is (-1: the last).
        task, number = self.plain.origin(index)
        worded_task = self.in_other_words(task, step)
        row = None if worded_task is task else self._row_of(worded_task, number)
        return self.plain.rows[index] if row is None else row

    def _row_of(self, task: TaskRow, number: int) -> Row | None:
        """The row with this number among the rows of a task; None where it has no such row, where
        nothing of it is trained, or where it does not fit whole."""
        rendered = self.render(task)
        has_such_row = -len(rendered) <= number < len(rendered)
        if not has_such_row:
            return None
        row, uncut_length = rendered[number]
        is_whole = len(row.ids) == uncut_length
        return row if is_whole and any(row.loss_mask) else None
