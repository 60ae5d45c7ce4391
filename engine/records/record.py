"""What every record on disk has in common: how it is read, and the error for a damaged one."""

import json
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from engine.core.errors import UserError
from engine.core.files import JsonObject, open_file, write_json


class Record(BaseModel):
    """A JSON object with named, typed keys.

    A key that is missing or has another type is an error that names the file and the key. A key
    that this version does not know is ignored, because a later version may have written it.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the record in the file at `path`.

        Raises FileNotFoundError if there is no file. Raises DamagedRecord, which names the file and
        the first wrong key, if the file does not hold such a record.
        """
        with open_file(path) as file:
            content = file.read()
        return cls.parse(content, str(path))

    @classmethod
    def parse(cls, data: bytes | str, place: str) -> Self:
        """Parse `data`, the text of a JSON object, as a record.

        Raises DamagedRecord if `data` is not such a record. The message names the first wrong key
        and `place`, which says where `data` comes from, such as the path of a file.
        """
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise DamagedRecord(place, fault_of(error)) from error

    def write(self, path: Path) -> None:
        """Replace the file at `path` by the record.

        A reader sees either the old file or the new one, never a part.
        """
        write_json(path, self.to_json())

    def to_json(self) -> JsonObject:
        """Return the record as a JSON object with all of its fields."""
        return json.loads(self.model_dump_json())


class DamagedRecord(UserError, ValueError):
    """A file of the home does not hold a valid record. The message names the file and the key."""

    def __init__(self, place: str, fault: str) -> None:
        """Make the error; its message is "`place` is damaged: `fault`".

        `place` is the path of the file, or another origin of the record. `fault` says which key is
        wrong, and how.
        """
        super().__init__(
            "HOME_UNUSABLE",
            f"{place} is damaged: {fault}",
            hint="Put the file back from a copy, or delete the run or version it belongs to.",
        )


def fault_of(error: ValidationError) -> str:
    """Describe the first fault of a failed validation (`error`): the dotted key, and what is wrong
    with its value.

    For example `settings.lora_rank: input should be a valid integer`.
    """
    first_error = error.errors(include_input=False)[0]
    key = ".".join(str(key_part) for key_part in first_error["loc"])
    message = first_error["msg"]
    # The key is empty if the text is not a JSON object at all.
    return f"{key or 'the file'}: {message[0].lower()}{message[1:]}"
