"""The tables `[endpoints.NAME]` of config.toml: models behind a URL, named by the owner.

`openai:NAME` is then a model that can be asked. A key never stands in the file: `key_env` names the
environment variable, or the entry in a file `.env`, that holds it.

Imported by the supervisor, which must start at once: standard library only.
"""

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from engine.core.errors import UserError

DOTENV = ".env"  # lines NAME=value, in the home's folder or where the server was started
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,59}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
_LINE = re.compile(r"\s*(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(.*?)\s*")


@dataclass(frozen=True)
class Endpoint:
    """A model behind a server that speaks OpenAI's chat API.

    Attributes:
        name: in config.toml.
        url: up to and with `/v1`.
        model: its name there.
        key_env: the variable that holds the key; "" where none is needed.
        price_in, price_out: money per million tokens of prompt and of answer; None: not known.
        max_concurrency: requests under way at once.
        timeout_s: of one request.
        context: the longest conversation, in tokens.
        shared: whether other keys than the owner's may ask it.
    """

    name: str
    url: str
    model: str
    key_env: str = ""
    price_in: float | None = None
    price_out: float | None = None
    max_concurrency: int = 4
    timeout_s: float = 120.0
    context: int = 128_000
    shared: bool = False

    def __str__(self) -> str:
        return f"{self.model} at {host_of(self.url)}"


def host_of(url: str) -> str:
    """The host of a URL, by which people know the provider."""
    return urlsplit(url).hostname or ""


def read_endpoints(path: Path, tables: Any) -> dict[str, Endpoint]:
    """Check the value of `endpoints` in the config file at `path`; the endpoints by name.

    Raises UserError SETTING_UNKNOWN or SETTING_INVALID. No message repeats a text of the file,
    which may be a key in the wrong place.
    """
    if not isinstance(tables, dict):
        raise _invalid(path, "endpoints", "is no table", "Write [endpoints.NAME] with its keys.")
    return {name: _read_endpoint(path, name, table) for name, table in tables.items()}


def _read_endpoint(path: Path, name: str, table: Any) -> Endpoint:
    """Check one table. Raises UserError as `read_endpoints` does."""
    if not _NAME.fullmatch(name) or not isinstance(table, dict):
        hint = "Give it a name of letters, digits, dot, - and _: [endpoints.NAME]."
        raise _invalid(path, f"endpoints.{name[:60]}", "is no table of an endpoint", hint)
    known = [field.name for field in fields(Endpoint) if field.name != "name"]
    for key in table:
        if key not in known:
            raise UserError(
                "SETTING_UNKNOWN",
                f"{path} sets {key[:60]!r} in [endpoints.{name}], which does not exist",
                hint=f"Known keys: {', '.join(known)}. A key for the server never stands in this "
                "file: key_env names the variable that holds it.",
                field=f"endpoints.{name}.{key[:60]}",
            )
    for key in ("url", "model"):
        if key not in table:
            raise _invalid(
                path, f"endpoints.{name}.{key}", "is missing", "An endpoint has a url and a model."
            )
    values = {key: _checked(path, name, key, value) for key, value in table.items()}
    return Endpoint(name=name, **values)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 4096


def _is_url(value: Any) -> bool:
    """Whether it is a URL without a user, a query or a fragment, where keys tend to stand."""
    if not _is_text(value) or not value.startswith(("http://", "https://")):
        return False
    try:
        parts = urlsplit(value)
        return bool(parts.hostname) and not (parts.username or parts.query or parts.fragment)
    except ValueError:
        return False


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value >= 0


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


# Of each key: whether it may have a value, and which it may have in words.
_RULES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "url": (_is_url, "an http:// or https:// URL up to /v1, without user, query or fragment"),
    "model": (_is_text, "the model's name there"),
    "key_env": (
        lambda value: isinstance(value, str) and (not value or bool(_VARIABLE.fullmatch(value))),
        "the name of the variable that holds the key, never the key",
    ),
    "price_in": (_is_number, "money per million tokens of prompts"),
    "price_out": (_is_number, "money per million tokens of answers"),
    "max_concurrency": (lambda value: _is_count(value) and value <= 256, "a number from 1 to 256"),
    "timeout_s": (lambda value: _is_number(value) and value >= 1, "seconds, at least 1"),
    "context": (_is_count, "a number of tokens"),
    "shared": (lambda value: isinstance(value, bool), "true or false"),
}


def _checked(path: Path, name: str, key: str, value: Any) -> Any:
    """The value of a key of [endpoints.NAME]. Raises UserError SETTING_INVALID."""
    is_allowed, in_words = _RULES[key]
    if not is_allowed(value):
        field = f"endpoints.{name}.{key}"
        raise _invalid(path, field, "cannot be used", f"{key} must be {in_words}.")
    if key == "url":
        return value.rstrip("/")
    return float(value) if key in ("price_in", "price_out", "timeout_s") else value


def _invalid(path: Path, field: str, fault: str, hint: str) -> UserError:
    """The error for a key of the file."""
    return UserError("SETTING_INVALID", f"{path}: {field} {fault}", hint=hint, field=field)


def key_of(home_root: Path, key_env: str) -> str:
    """The key that `key_env` names; "" where it is not set, and for "".

    It is the environment variable of this process, else the entry of that name in a file `.env`:
    of the folder that this process works in, or of the home.
    """
    if not key_env:
        return ""
    if os.environ.get(key_env):
        return os.environ[key_env]
    for folder in (Path.cwd(), home_root):
        for name, value in _entries(folder / DOTENV):
            if name == key_env and value:
                return value
    return ""


def _entries(path: Path) -> Iterator[tuple[str, str]]:
    """The entries of a file of lines NAME=value; none where it is missing or cannot be read."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match is None:  # empty, or a comment
            continue
        value = match[2]
        if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        yield match[1], value
