"""The error that tells an author what is wrong with an environment and what to do."""

from collections.abc import Mapping
from typing import Any

CODES = (
    "ENV_INVALID",
    "ENV_IMPORT",
    "ENV_PARAM",
    "ENV_DEPS",
    "ENV_SECRETS",
    "ENV_SANDBOX",
    "ENV_LIMITS",
    "DATASET_INVALID",
)


class EnvProblem(Exception):
    """An environment breaks its contract.

    Args:
        code: one of `CODES`.
        message: what happened, with the offending value.
        hint: the next edit to make.
        file: the file at fault, relative to the environment's folder; "" if there is none.
        line: the line at fault, 0 if unknown.
    """

    def __init__(
        self, code: str, message: str, hint: str = "", file: str = "", line: int = 0
    ) -> None:
        """Store the parts of the problem; the message is also the exception's text.

        `code` is one of `CODES`, such as "ENV_INVALID"; `hint` says what to do, `file` and `line`
        where; "" and 0 if unknown.
        """
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint
        self.file = file
        self.line = line

    def __str__(self) -> str:
        """Return the message, prefixed by `file:line: ` or `file: ` if these are known."""
        if self.line:
            return f"{self.file}:{self.line}: {self.message}"
        if self.file:
            return f"{self.file}: {self.message}"
        return self.message

    def to_dict(self) -> dict[str, str | int]:
        """Return the problem as a JSON object, the form in which the env process sends it to its
        client."""
        return {
            "code": self.code,
            "message": self.message,
            "hint": self.hint,
            "file": self.file,
            "line": self.line,
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> "EnvProblem":
        """Read a problem from the JSON object in a reply of the env process (the opposite of
        `to_dict`).

        User code can write into that reply, so any value may be missing or wrong. An unknown code
        becomes ENV_INVALID, a missing message a general one, and any other missing value "" or 0.
        """
        code, line = data.get("code"), data.get("line")
        if not isinstance(code, str) or code not in CODES:
            code = "ENV_INVALID"
        return EnvProblem(
            code=code,
            message=str(data.get("message") or "the environment could not be loaded"),
            hint=str(data.get("hint") or ""),
            file=str(data.get("file") or ""),
            line=line if type(line) is int else 0,  # not isinstance: a bool is an int too
        )
