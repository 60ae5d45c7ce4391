"""The rows that SFT trains on, and how a row may come in other words each time a step takes it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.worker.core.batch import Row
from engine.worker.core.rows_on_demand import RowsOnDemand
from envs.json_types import TaskRow

# The source of a row: its task, and its number among the rows of the task's conversation (from 0;
# -1 for the last).
Origin = tuple[TaskRow, int]


@dataclass(frozen=True)
class TrainingRows:
    """The rows of a run, in their original words.

    Attributes:
        rows: all rendered before the first step, or each when a step asks for it.
        origin: returns the task that the row at an index was rendered from, and its number among
            the rows of the task.
    """

    rows: Sequence[Row] | RowsOnDemand[Row]
    origin: Callable[[int], Origin]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    def batch(self, step: int, indices: Sequence[int]) -> list[Row]:
        """Return the rows at `indices`. `step` is ignored: rows in their original words are the
        same in every step."""
        return [self.rows[index] for index in indices]


@dataclass(frozen=True)
class VariedRows:
    """The rows of a run, some of them in other words each time that a step takes them.

    Attributes:
        plain: the rows in their original words.
        in_other_words: returns a task in the words that a step (from 1) sees; returns the same
            object if the words do not change.
        render: returns all rows of a task, each with the number of its ids before any cut.
    """

    plain: TrainingRows
    in_other_words: Callable[[TaskRow, int], TaskRow]
    render: Callable[[TaskRow], list[tuple[Row, int]]]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.plain)

    def batch(self, step: int, indices: Sequence[int]) -> list[Row]:
        """Return the rows at `indices`, in the words that optimizer step `step` (from 1) sees."""
        return [self._row(step, index) for index in indices]

    def _row(self, step: int, index: int) -> Row:
        """Make the row at `index` in the words that `step` sees. The original row is returned if
        the other words leave nothing to train, or do not fit."""
        # A task may have several rows; `number` is the place of this one among them (-1: the last).
        task, number = self.plain.origin(index)
        reworded_task = self.in_other_words(task, step)
        row = None if reworded_task is task else self._rendered_row(reworded_task, number)
        return self.plain.rows[index] if row is None else row

    def _rendered_row(self, task: TaskRow, number: int) -> Row | None:
        """Render a task and return its row with this number. Returns None if the task has no such
        row, if no token of the row is trained, or if the row had to be cut."""
        rendered = self.render(task)
        has_such_row = -len(rendered) <= number < len(rendered)
        if not has_such_row:
            return None
        row, uncut_length = rendered[number]
        is_whole = len(row.ids) == uncut_length
        return row if is_whole and any(row.loss_mask) else None
