"""Records that stand in a file one per line: how a line is read, and how it is written."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from pydantic import ValidationError

from engine.core.files import JsonObject, read_chunk
from engine.core.format import counted
from engine.records.record import DamagedRecord, Record, fault_of

# A line as JSON holds it, before it is checked or after it was made ready to be written.
Line = JsonObject

_CHUNK_BYTES = 4_000_000

R = TypeVar("R", bound="LineRecord")


@dataclass(frozen=True)
class RecordsRead(Generic[R]):
    """What a file of lines holds.

    Attributes:
        records: the lines that could be read, in order.
        skipped: how many whole lines could not: no JSON object, or not of the record's shape.
    """

    records: list[R]
    skipped: int = 0


def skipped_lines(count: int) -> list[str]:
    """A warning that `count` lines of a file could not be read; [] for a `count` of 0."""
    if not count:
        return []
    verb_phrase = "is left out" if count == 1 else "are left out"
    return [f"{counted(count, 'damaged line')} could not be read and {verb_phrase}."]


class LineRecord(Record):
    """A record that is one line of a file that grows. Only fields that were set are written, in
    order."""

    @classmethod
    def of(cls, row: Mapping[str, Any], place: str) -> Self:
        """Check the JSON object `row` of a line, and return it as a record.

        Raises DamagedRecord. Its message names the first key at fault and `place`, which says where
        the line comes from.
        """
        try:
            return cls.model_validate(row)
        except ValidationError as error:
            raise DamagedRecord(place, fault_of(error)) from error

    @classmethod
    def read_file(cls, path: Path) -> RecordsRead[Self]:
        """Read a record from every complete line of the file at `path`; none where there is no
        file.

        A damaged line, such as a disk that was full for a moment may leave, is left out and
        counted. A last line without a newline is still being written and is not counted.
        """
        records: list[Self] = []
        skipped = cursor = 0
        while True:
            chunk = read_chunk(path, cursor, max_bytes=_CHUNK_BYTES)
            for row in chunk.rows:
                try:
                    records.append(cls.model_validate(row))
                except ValidationError:
                    skipped += 1
            skipped += chunk.damaged
            if chunk.end <= cursor:  # no complete line is left
                return RecordsRead(records, skipped)
            cursor = chunk.end

    @classmethod
    def read_all(cls, path: Path) -> list[Self]:
        """The records of `read_file`, for callers that need no number of damaged lines."""
        return cls.read_file(path).records

    def to_line(self) -> Line:
        """The JSON object to append to the file: only the fields that were set."""
        return self.model_dump(exclude_unset=True)
