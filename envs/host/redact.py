"""Replaces the values of secrets in text. Only this module knows how a secret may be encoded.

It is used on everything that leaves an env process (`pipe.py`, `sandbox_parent.py`) and everything
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

    A value is recognised in plain form, percent-encoded, as JSON and Python write it in a string,
    and inside base64 (both alphabets, at every alignment). Values and encoded values shorter than
    MIN_LENGTH characters are not replaced.
    """

    def __init__(self, secrets: Iterable[tuple[str, str]]) -> None:
        """Prepare to replace the values of secrets, given as (name, value) pairs.

        A name may occur with several values.
        """
        self._names: dict[str, str] = {}  # text to be replaced -> name of the secret
        for name, value in secrets:
            for encoded in _encodings(value):
                self._names.setdefault(encoded, name)
        # The longest first, because a regular expression takes the first alternative that fits, and
        # an escaped value may contain the plain one.
        longest_first = sorted(self._names, key=len, reverse=True)
        pattern = "|".join(re.escape(encoded) for encoded in longest_first)
        self._pattern = re.compile(pattern) if pattern else None

    def in_text(self, text: str) -> str:
        """Return `text` with each value of a secret replaced by "[secret NAME]"."""
        if self._pattern is None:
            return text

        def placeholder(match: re.Match[str]) -> str:
            """Return what stands in the place of a value that was found."""
            return f"[secret {self._names[match.group()]}]"

        return self._pattern.sub(placeholder, text)

    def in_bytes(self, data: bytes) -> bytes:
        """Return `data` with each value of a secret replaced by "[secret NAME]"; `data` need not be
        valid UTF-8."""
        if self._pattern is None:
            return data
        # surrogateescape: bytes that are not UTF-8 come out unchanged.
        text = self.in_text(data.decode("utf-8", "surrogateescape"))
        return text.encode("utf-8", "surrogateescape")

    def in_json(self, value: Any) -> Any:
        """Return a copy of a JSON value with each value of a secret replaced by "[secret NAME]", in
        all its strings and keys."""
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
    """Yield `value` and its encoded forms (percent, JSON, Python, base64), some of them twice.

    Yields nothing for a value shorter than MIN_LENGTH.
    """
    if len(value) < MIN_LENGTH:
        return
    yield value
    raw = _bytes_of(value)
    yield urllib.parse.quote(raw, safe="")
    yield urllib.parse.quote(raw)
    yield urllib.parse.quote_plus(raw)
    for literal in (json.dumps(value), json.dumps(value, ensure_ascii=False), repr(value)):
        yield literal[1:-1]  # without the quotes around it
    # repr escapes single quotes only in a text that also holds double ones. So both kinds are put
    # before the value, and their four characters cut off again: the opening quote, \' and ".
    yield repr("'\"" + value)[4:-1]
    yield from _base64_cores(raw)


def _bytes_of(value: str) -> bytes:
    """Encode `value` as UTF-8 bytes; this never fails, not even on lone surrogates."""
    try:
        # Python decodes non-UTF-8 bytes of environment variables to lone surrogates. This restores
        # those bytes; other lone surrogates raise UnicodeEncodeError.
        return value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return value.encode("utf-8", "surrogatepass")


def _base64_cores(raw: bytes) -> Iterator[str]:
    """Yield strings, one of which occurs in the base64 encoding of any data that contains `raw`.

    Base64 turns three bytes into four characters, so the encoding of `raw` depends on whether `raw`
    begins at the first, second or third byte of such a group. For each case this yields the
    characters that depend on `raw` alone, in the standard and in the URL-safe alphabet. A string
    shorter than MIN_LENGTH is left out.
    """
    for shift in range(3):
        encoded = base64.b64encode(b"\0" * shift + raw).decode("ascii")
        # How many characters at each end also hold bits of a neighbour, or padding. A character
        # holds 6 bits: one foreign byte (8 bits) reaches into 2 characters, two (16 bits) into 3.
        shared_at_start = (0, 2, 3)[shift]
        shared_at_end = (0, 3, 2)[(len(raw) + shift) % 3]
        core = encoded[shared_at_start : len(encoded) - shared_at_end]
        if len(core) >= MIN_LENGTH:
            yield core
            yield core.replace("+", "-").replace("/", "_")
