"""Records that stand in a file one per line: how a line is read, and how it is written."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from engine.core.files import read_lines
from engine.records.record import DamagedRecord, Record, fault_of

# A line as JSON holds it.
Line = dict[str, Any]

_CHUNK_BYTES = 4_000_000


class LineRecord(Record):
    """One line of a file that grows. Only what was set is written, in the order of the fields."""

    @classmethod
    def of(cls, row: Mapping[str, Any], place: str) -> Self:
        """The record that a line's JSON object spells; `place` names its file when it is damaged.

        Raises DamagedRecord naming the place and the first key at fault.
        """
        try:
            return cls.model_validate(row)
        except ValidationError as error:
            raise DamagedRecord(place, fault_of(error)) from error

    @classmethod
    def read_all(cls, path: Path) -> list[Self]:
        """Every complete line of the file at `path`; [] where there is no file.

        Raises DamagedRecord naming the file and the first key at fault.
        """
        records: list[Self] = []
        cursor = 0
        while True:
            rows, reached = read_lines(path, cursor, max_bytes=_CHUNK_BYTES)
            records += [cls.of(row, str(path)) for row in rows]
            if reached <= cursor:
                return records
            cursor = reached

    def to_line(self) -> Line:
        """The JSON object of the line, for an Appender."""
        return self.model_dump(exclude_unset=True)
