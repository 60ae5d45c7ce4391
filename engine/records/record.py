"""What every record on disk has in common: how it is read, and the error for a damaged one."""

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
        """Read the record in the file at `path`.

        Raises FileNotFoundError, and DamagedRecord naming the file and the first key at fault.
        """
        with open_file(path) as file:
            data = file.read()
        return cls.parse(data, str(path))

    @classmethod
    def parse(cls, data: bytes | str, place: str) -> Self:
        """Parse `data`, the text of a JSON object, as a record.

        Raises DamagedRecord. Its message names the first key at fault and `place`, which says where
        `data` comes from, such as the path of a file.
        """
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise DamagedRecord(place, fault_of(error)) from error

    def write(self, path: Path) -> None:
        """Replace the file at `path` by the record. A reader sees either the old file or the new
        one, never a part."""
        write_json(path, self.to_json())

    def to_json(self) -> JsonObject:
        """The record as a JSON object, every field included."""
        return json.loads(self.model_dump_json())


class DamagedRecord(UserError, ValueError):
    """A file of the home does not hold what it should. The message names the file and the key."""

    def __init__(self, place: str, fault: str) -> None:
        """Say which record is damaged, and how.

        `place` is the path of the file, or what else the record comes from; `fault` says which key
        is wrong, and how.
        """
        super().__init__(
            "HOME_UNUSABLE",
            f"{place} is damaged: {fault}",
            hint="Put the file back from a copy, or delete the run or version it belongs to.",
        )


def fault_of(error: ValidationError) -> str:
    """Return the first fault of a validation in words: the dotted key, and what is wrong with it.

    For example `settings.lora_rank: input should be a valid integer`.
    """
    first_error = error.errors(include_input=False)[0]
    key = ".".join(str(key_part) for key_part in first_error["loc"])
    message = first_error["msg"]
    # There is no key where the text is no JSON object at all.
    return f"{key or 'the file'}: {message[0].lower()}{message[1:]}"
