"""The training rows of a version whose data were too large to copy: each row is read from the data
file when it is accessed."""

import hashlib
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import overload

from engine.core.errors import UserError
from engine.environments.indexed.columns import map_numbers
from engine.environments.indexed.scan import default_id, read_line
from engine.records.data_index import IndexedFile
from envs.dataset import parse_line
from envs.json_types import TaskRow
from envs.row_shapes import to_task

# File of a version: the byte offset of every training row, then the line number of every training
# row, each a number of 64 bits.
ROWS_INDEX = "rows.idx"
_ITEM_BYTES = 8


def check_files(files: Sequence[IndexedFile], env_id: str) -> None:
    """Raise UserError DATASET_INVALID if one of the data files is gone or has changed since the
    push; the message names it.

    A file with the same size and modification time counts as unchanged; any other is hashed again.
    """
    for file in files:
        try:
            fault = _change_of(file)
        except OSError as error:
            fault = f"cannot be read: {error.strerror or error}"
        if fault:
            raise UserError(
                "DATASET_INVALID",
                f"{file.path}, the data of {env_id}, {fault}",
                hint="Large data files stay where they were pushed: put this one back, or push the "
                "folder again and use the new version.",
                field="env_id",
            )


def _change_of(file: IndexedFile) -> str:
    """Return how a file differs from what was pushed, such as "has 12 bytes, not 15"; "" if it does
    not. Raises OSError if the file cannot be read."""
    info = os.stat(file.path)
    if (info.st_size, info.st_mtime_ns) == (file.size, file.mtime_ns):
        return ""  # reading the whole file to be sure would take too long
    if info.st_size != file.size:
        return f"has {info.st_size} bytes, not {file.size}"
    with open(file.path, "rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest == file.sha256:
        return ""
    return f"has the SHA-256 {digest[:12]}, not {file.sha256[:12]}"


class IndexedRows(Sequence[TaskRow]):
    """The training rows of a version, each read from its data file when it is accessed."""

    def __init__(
        self, files: Sequence[IndexedFile], index: Path, chosen: Sequence[int] | None = None
    ) -> None:
        """Open the index, without reading a row.

        Args:
            files: the data files as they were pushed; they must not have changed (`check_files`).
            index: path of the version's file ROWS_INDEX, with the place of each row in its file.
            chosen: positions of the rows that this sequence holds; None: all rows.
        """
        self._files = files
        self._index = index
        # For each file the number of training rows in it and in the files before it.
        self._rows_up_to = list(accumulate(file.train for file in files))
        total = self._rows_up_to[-1] if self._rows_up_to else 0
        # The index holds the offsets of all rows, then the line numbers of all rows.
        self._offsets = map_numbers(index, "Q", first_byte=0, count=total)
        self._lines = map_numbers(index, "Q", first_byte=total * _ITEM_BYTES, count=total)
        self._chosen = range(total) if chosen is None else chosen
        # Position in `files` -> open descriptor, for the files that were read so far.
        self._descriptors: dict[int, int] = {}

    def __len__(self) -> int:
        """Number of rows in this sequence."""
        return len(self._chosen)

    @overload
    def __getitem__(self, index: int) -> TaskRow: ...
    @overload
    def __getitem__(self, index: slice) -> "IndexedRows": ...
    def __getitem__(self, index: int | slice) -> "TaskRow | IndexedRows":
        """Read the row at `index`. For a slice, return the sequence of its rows (see `subset`)."""
        if isinstance(index, slice):
            return self.subset(range(len(self))[index])
        position = self._chosen[index]  # among all training rows of the version
        file_index = bisect_right(self._rows_up_to, position)  # the first file that ends after it
        content = read_line(self._descriptor(file_index), self._offsets[position])
        row_id = default_id(self._files[file_index].name, self._lines[position])
        return stored_row(to_task(parse_line(content), row_id).to_row(), split="train")

    def __iter__(self) -> Iterator[TaskRow]:
        """Return an iterator that reads the rows one after the other."""
        return (self[index] for index in range(len(self)))

    def subset(self, indices: Sequence[int]) -> "IndexedRows":
        """Return the sequence of the rows at these indices of this one; no row is read yet."""
        chosen = self._chosen
        holds_all_rows = chosen == range(len(self))  # indices then equal positions in the dataset
        positions = indices if holds_all_rows else [chosen[index] for index in indices]
        return IndexedRows(self._files, self._index, positions)

    def _descriptor(self, file_index: int) -> int:
        """Return an open descriptor of the file at this position in `files`. The file stays open
        until this object is deleted."""
        if file_index not in self._descriptors:
            path = self._files[file_index].path
            self._descriptors[file_index] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._descriptors[file_index]

    def __del__(self) -> None:
        """Close the data files that were opened."""
        # `getattr`, because `__init__` may have failed before it made the dict.
        for descriptor in getattr(self, "_descriptors", {}).values():
            os.close(descriptor)


def stored_row(row: TaskRow, split: str) -> TaskRow:
    """Add to a task's row what a version stores with it, in place, and return the row.

    These are its side (`split`, "train" or "heldout") and, under "gold", its prompt and reference
    answer as one conversation; None if it has no answer.
    """
    row["split"] = split
    row["gold"] = None if row["answer"] is None else [*row["prompt"], *row["answer"]]
    return row
