"""What every record on disk has in common: how it is read, and what is said when it is damaged."""

import json
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from engine.core.errors import UserError
from engine.core.files import JsonObject, open_file, write_json


class Record(BaseModel):
    """A JSON object with named, typed keys.

    A key that is missing or has another type is an error that names file and key; one that this
    version does not know is left alone, as a later version may have written it.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    @classmethod
    def read(cls, path: Path) -> Self:
        """The record in the file at `path`.

        Raises FileNotFoundError, and DamagedRecord naming the file and the first key at fault.
        """
        with open_file(path) as file:
            data = file.read()
        return cls.parse(data, str(path))

    @classmethod
    def parse(cls, data: bytes | str, place: str) -> Self:
        """The record that `data` spells; `place` is named when it is damaged."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise DamagedRecord(place, fault_of(error)) from error

    def write(self, path: Path) -> None:
        """Replaces the file at `path`, atomically and durably."""
        write_json(path, self.to_json())

    def to_json(self) -> JsonObject:
        """The object as JSON holds it."""
        return json.loads(self.model_dump_json())


class DamagedRecord(UserError, ValueError):
    """A file of the home does not say what it should; names the file and the key."""

    def __init__(self, place: str, fault: str) -> None:
        super().__init__(
            "HOME_UNUSABLE",
            f"{place} is damaged: {fault}",
            hint="Put the file back from a copy, or delete the run or version it belongs to.",
        )


def fault_of(error: ValidationError) -> str:
    first = error.errors(include_input=False)[0]
    key = ".".join(str(part) for part in first["loc"]) or "the file"
    return f"{key}: {first['msg'][0].lower()}{first['msg'][1:]}"
