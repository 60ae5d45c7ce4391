"""Records that stand in a file one per line: how a line is read, and how it is written."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from pydantic import ValidationError

from engine.core.files import JsonObject, read_chunk
from engine.core.format import counted
from engine.records.record import DamagedRecord, Record, fault_of

# The JSON object of a line, before it is checked or when it is ready to be written.
Line = JsonObject

_CHUNK_BYTES = 4_000_000  # bytes that are read at once

R = TypeVar("R", bound="LineRecord")


@dataclass(frozen=True)
class RecordsRead(Generic[R]):
    """The content of a file of records.

    Attributes:
        records: the records of the lines that could be read, in order.
        skipped: how many complete lines could not be read: they are no JSON object, or their keys
            are not those of the record.
    """

    records: list[R]
    skipped: int = 0


def skipped_lines(count: int) -> list[str]:
    """Return a warning that `count` lines of a file could not be read; [] if `count` is 0."""
    if not count:
        return []
    verb_phrase = "is left out" if count == 1 else "are left out"
    return [f"{counted(count, 'damaged line')} could not be read and {verb_phrase}."]


class LineRecord(Record):
    """A record that is one line of a file that grows.

    Only fields that were set are written, in their order.
    """

    @classmethod
    def of(cls, row: Mapping[str, Any], place: str) -> Self:
        """Check the JSON object `row` of a line, and return it as a record.

        Raises DamagedRecord if a key is missing or has a wrong value. The message names the first
        such key and `place`, which says where the line comes from.
        """
        try:
            return cls.model_validate(row)
        except ValidationError as error:
            raise DamagedRecord(place, fault_of(error)) from error

    @classmethod
    def read_file(cls, path: Path) -> RecordsRead[Self]:
        """Read a record from every complete line of the file at `path`; a missing file has none.

        A damaged line is left out and counted; a full disk may leave one. A last line without a
        newline is still being written and is not counted.
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
        """Read the records of the file at `path`, without counting damaged lines."""
        return cls.read_file(path).records

    def to_line(self) -> Line:
        """Return the JSON object to append to the file; it has only the fields that were set."""
        return self.model_dump(exclude_unset=True)
