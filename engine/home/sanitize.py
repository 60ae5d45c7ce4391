"""Makes untrusted text (logs, rollouts, datasets) safe to show.

`clean_text` removes characters that a terminal would obey or a reader would not see. `Redactor`
hides secret values. `clip` and `json_chars` keep results short enough for an agent to read.
"""

import contextlib
import functools
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.core.errors import UserError
from engine.home.run_dir import Home
from engine.home.user_config import key_of
from envs.host.redact import SecretFilter

_ESCAPES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor moves
    r"|[\]PX^_][^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"  # OSC, DCS, SOS, PM, APC: titles, links
    r"|[ -/]*[0-~])"  # the short ones
    r"|\x9b[0-?]*[ -/]*[@-~]"  # CSI as one C1 byte
)
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 and C1 but for tab and newline
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f"  # soft hyphen, fillers, marks
    "\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164\ufe00-\ufe0e\ufeff\uffa0\ufff0-\ufffb"
    "\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"  # invisible operators, tags, selectors
)
_LINE_ENDS = re.compile("\r\n|[\u0085\u2028\u2029]")
_SURROGATES = re.compile("[\ud800-\udfff]")
_LEAST_KEPT = 20  # the least characters that remain of a text whose middle is cut

# Tokens of well-known services, recognised by their shape.
_KNOWN_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{30,}"
    r"|github_pat_[A-Za-z0-9_]{40,}|AKIA[0-9A-Z]{16}|xox[abprs]-[A-Za-z0-9-]{20,})"
)


def clean_text(text: str) -> str:
    """Remove terminal escape sequences and control, bidirectional and zero-width characters.

    - Tabs and newlines stay; other line ends become newlines.
    - Lone surrogates become U+FFFD.
    - An escape sequence that is never closed is removed only up to the end of its line, so that it
      cannot hide the text after it.
    """
    text = _LINE_ENDS.sub("\n", text)
    text = _INVISIBLE.sub("", _ESCAPES.sub("", text))
    return _SURROGATES.sub("\ufffd", text)


def clean_value(value: Any) -> Any:
    """Convert `value` to what JSON can hold, and clean every text in it with `clean_text`.

    NaN and infinity become None, tuples and sets become lists, and an object of any other type
    becomes its `str`, cleaned.
    """
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {clean_text(str(key)): clean_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [clean_value(item) for item in value]
    if value is None or isinstance(value, bool | int):
        return value
    return clean_text(str(value))


def clip(text: str, limit: int) -> str:
    """Shorten `text` to about `limit` characters by replacing its middle with a note.

    The note is ` … [1234 characters cut] … `. A text within the limit is returned unchanged, and so
    is a text that the note would not make shorter.
    """
    if len(text) <= limit:
        return text
    cut_note = f" … [{len(text) - limit} characters cut] … "
    # If the note alone would fill the limit, some characters around it are kept all the same.
    kept_chars = max(limit - len(cut_note), min(limit, _LEAST_KEPT))
    if kept_chars + len(cut_note) >= len(text):
        return text
    head_chars = (kept_chars * 2 + 2) // 3  # two thirds, rounded up
    tail_chars = kept_chars - head_chars
    return text[:head_chars] + cut_note + text[len(text) - tail_chars :]


def one_line(text: str, limit: int) -> str:
    """Return `text` on one line, with a single space for every sequence of white space.

    If the line is longer than `limit` characters, its end is replaced by "…".
    """
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else flat[: max(limit - 1, 1)] + "…"


def json_chars(value: Any) -> int:
    """Return how many characters `value` has as compact JSON."""
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str))


class Redactor:
    """Cleans text for showing and hides secrets in it.

    The values of named secrets, in every form `envs/host/redact.py` knows, become `[secret NAME]`;
    tokens of well-known services become `[secret]`.
    """

    def __init__(self, secrets: Mapping[str, str] | None = None) -> None:
        """Prepare to hide the values of `secrets` (name -> value); None for no secrets."""
        values = (secrets or {}).items()
        # Each value is searched for in two forms: unchanged, because `__call__` searches texts that
        # are not cleaned, and cleaned, because `text` cleans a text before it searches.
        cleaned = ((name, clean_text(value)) for name, value in values)
        self._secrets = SecretFilter([*values, *cleaned])

    def __call__(self, text: str) -> str:
        """Return `text` with its secrets hidden. The text is not cleaned."""
        return _KNOWN_SHAPES.sub("[secret]", self._secrets.in_text(text))

    def text(self, text: str) -> str:
        """Return `text` cleaned and with its secrets hidden.

        The text is cleaned first, so that a zero-width character inside a secret does not hide the
        secret from the search.
        """
        return self(clean_text(text))

    def value(self, value: Any) -> Any:
        """Convert `value` to what JSON can hold.

        Every text inside it, including the keys of objects, is cleaned, and its secrets are hidden.
        """
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(key)): self.value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        return clean_value(value)


def redactor_for(home: Home, env_dir: str | Path | None) -> Redactor:
    """Make a redactor for the secrets that a run may have seen.

    These are the home's token, the keys of the endpoints of config.toml, and the secrets that the
    run's environment names. Their values are read from this process's environment variables; the
    keys of endpoints may also be in a file `.env`.

    Args:
        home: the home of the run.
        env_dir: the folder of the environment version; None if it is not known: then the secrets of
            the environment are not hidden.
    """
    names = _secret_names(os.path.join(env_dir, "env.json")) if env_dir else ()
    secrets = {name: os.environ.get(name, "") for name in names}
    # A home that never served over HTTP has no token.
    with contextlib.suppress(OSError, UnicodeDecodeError):  # no such file
        secrets["token"] = home.token.read_text("utf-8").strip()
    with contextlib.suppress(UserError):  # a damaged config.toml is reported elsewhere
        for endpoint in home.user_config().endpoints.values():
            secrets[endpoint.key_env] = key_of(home.root, endpoint.key_env)
    return Redactor(secrets)


@functools.lru_cache(maxsize=64)  # safe, because the folder of a version never changes
def _secret_names(path: str) -> tuple[str, ...]:
    """Return the names of the secrets in the env.json at `path`; () if it cannot be read."""
    # Imported late: these modules load pydantic, and a supervisor must not load it.
    from engine.records.env_version import EnvVersion  # noqa: PLC0415
    from engine.records.record import DamagedRecord  # noqa: PLC0415

    try:
        return EnvVersion.read(Path(path)).secrets
    except (OSError, DamagedRecord):
        return ()
