"""Takes the values of secrets out of text: the one place that knows how a secret may be written.

Used on everything that leaves an env process (`pipe.py`, `sandbox_parent.py`) and on everything
that is shown about a run (`engine/home/sanitize.py`). Standard library only.
"""

import base64
import json
import re
import urllib.parse
from collections.abc import Iterable, Iterator
from typing import Any

MIN_LENGTH = 4  # characters; anything shorter occurs by chance in ordinary text


class SecretFilter:
    """Replaces the value of each secret by `[secret NAME]`.

    A value is recognised plain, percent-encoded, as JSON and Python write it in a string, and
    inside base64 (both alphabets, at every alignment). Values, and encodings of them, under
    MIN_LENGTH characters are left alone.
    """

    def __init__(self, secrets: Iterable[tuple[str, str]]) -> None:
        """Args:
        secrets: (name, value) pairs; a name may occur with several values.
        """
        self._names: dict[str, str] = {}
        for name, value in secrets:
            for form in _encodings(value):
                self._names.setdefault(form, name)
        # Longer forms first: an escaped value may contain the plain one.
        longest_first = sorted(self._names, key=len, reverse=True)
        pattern = "|".join(re.escape(form) for form in longest_first)
        self._pattern = re.compile(pattern) if pattern else None

    def in_text(self, text: str) -> str:
        """`text` with each value of a secret replaced."""
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda match: f"[secret {self._names[match.group()]}]", text)

    def in_bytes(self, data: bytes) -> bytes:
        """`data`, UTF-8 or not, with each value of a secret replaced."""
        if self._pattern is None:
            return data
        text = self.in_text(data.decode("utf-8", "surrogateescape"))
        return text.encode("utf-8", "surrogateescape")

    def in_json(self, value: Any) -> Any:
        """A JSON value with secrets replaced in every text and every key in it."""
        if self._pattern is None:
            return value
        if isinstance(value, str):
            return self.in_text(value)
        if isinstance(value, list):
            return [self.in_json(item) for item in value]
        if isinstance(value, dict):
            return {self.in_text(key): self.in_json(item) for key, item in value.items()}
        return value


def _encodings(value: str) -> Iterator[str]:
    """Every way `value` may be written, itself among them; none for a value that is too short."""
    if len(value) < MIN_LENGTH:
        return
    yield value
    raw = _bytes_of(value)
    yield urllib.parse.quote(raw, safe="")
    yield urllib.parse.quote(raw)
    yield urllib.parse.quote_plus(raw)
    for literal in (json.dumps(value), json.dumps(value, ensure_ascii=False), repr(value)):
        yield literal[1:-1]
    # repr escapes single quotes if the text holds double ones too: put both before it, and cut off
    # what they take: the opening quote, the double one and the escaped single one.
    yield repr("'\"" + value)[4:-1]
    yield from _base64_cores(raw)


def _bytes_of(value: str) -> bytes:
    """`value` as UTF-8; lone surrogates, which UTF-8 has no place for, are written too."""
    try:
        return value.encode("utf-8", "surrogateescape")  # as it came from the process environment
    except UnicodeEncodeError:
        return value.encode("utf-8", "surrogatepass")


def _base64_cores(raw: bytes) -> Iterator[str]:
    """The texts that occur in the base64 of every text that contains `raw`.

    Base64 turns three bytes into four characters, so there is one such core for each of the three
    positions `raw` may begin at. Characters that also depend on the neighbours of `raw` are left
    out, and so is a core that is too short.
    """
    for shift in range(3):
        encoded = base64.b64encode(b"\0" * shift + raw).decode("ascii")
        # How many characters at each end also hold bits of a neighbour, or padding.
        begin = (0, 2, 3)[shift]
        end = len(encoded) - (0, 3, 2)[(len(raw) + shift) % 3]
        core = encoded[begin:end]
        if len(core) >= MIN_LENGTH:
            yield core
            yield core.replace("+", "-").replace("/", "_")
