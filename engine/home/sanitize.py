"""Untrusted text made safe to show: logs, rollouts and datasets are data, never instructions.

`clean_text` removes what a terminal would act on and what a reader would not see. `Redactor` hides
secret values. `clip` and `json_chars` keep results within what an agent can afford to read.
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
_LEAST_KEPT = 20  # characters that a text keeps where its middle is cut

# Values nobody named a secret but whose shape says they are one.
_KNOWN_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{30,}"
    r"|github_pat_[A-Za-z0-9_]{40,}|AKIA[0-9A-Z]{16}|xox[abprs]-[A-Za-z0-9-]{20,})"
)


def clean_text(text: str) -> str:
    """`text` without terminal escape sequences and without control, bidirectional and zero-width
    characters.

    - Tabs and newlines stay; other line ends become newlines.
    - Lone surrogates become U+FFFD.
    - An escape sequence that is never closed is removed only up to the end of its line, so that it
      cannot hide the text after it.
    """
    text = _LINE_ENDS.sub("\n", text)
    text = _INVISIBLE.sub("", _ESCAPES.sub("", text))
    return _SURROGATES.sub("\ufffd", text)


def clean_value(value: Any) -> Any:
    """`value` converted to what JSON can hold, with every text in it cleaned by `clean_text`.

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
    """`text` shortened to about `limit` characters by cutting its middle. In place of the cut part
    stands ` … [1234 characters cut] … `. A text within the limit stays as it is, and so does one
    from which the mark would take as much room as it saves."""
    if len(text) <= limit:
        return text
    cut_note = f" … [{len(text) - limit} characters cut] … "
    # Where the mark alone would fill the limit, the text keeps some characters around it.
    kept_chars = max(limit - len(cut_note), min(limit, _LEAST_KEPT))
    if kept_chars + len(cut_note) >= len(text):
        return text
    head_chars = (kept_chars * 2 + 2) // 3  # two thirds, rounded up
    tail_chars = kept_chars - head_chars
    return text[:head_chars] + cut_note + text[len(text) - tail_chars :]


def one_line(text: str, limit: int) -> str:
    """`text` on one line, with every run of white space as one space. If that is longer than
    `limit` characters, its end is replaced by "…"."""
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else flat[: max(limit - 1, 1)] + "…"


def json_chars(value: Any) -> int:
    """The number of characters of `value` as compact JSON."""
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str))


class Redactor:
    """Cleans text for showing and hides secrets in it.

    The values of named secrets, in every form `envs/host/redact.py` knows, become `[secret NAME]`;
    tokens of well-known services become `[secret]`.
    """

    def __init__(self, secrets: Mapping[str, str] | None = None) -> None:
        """Prepare to hide the values of `secrets` (name -> value); None where there are none."""
        values = (secrets or {}).items()
        # Each value is searched for in two forms: as it is, for the texts that `__call__` gets;
        # and cleaned, for those that `text` cleans before it searches them.
        cleaned = ((name, clean_text(value)) for name, value in values)
        self._secrets = SecretFilter([*values, *cleaned])

    def __call__(self, text: str) -> str:
        """`text` with its secrets hidden, but not cleaned."""
        return _KNOWN_SHAPES.sub("[secret]", self._secrets.in_text(text))

    def text(self, text: str) -> str:
        """`text` cleaned and with its secrets hidden. It is cleaned first, so that a zero-width
        character inside a secret does not hide the secret from the search."""
        return self(clean_text(text))

    def value(self, value: Any) -> Any:
        """`value` converted to what JSON can hold. Every text inside it, also the keys of objects,
        is cleaned and has its secrets hidden."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(key)): self.value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        return clean_value(value)


def redactor_for(home: Home, env_dir: str | Path | None) -> Redactor:
    """A redactor for the secrets that a run may have seen: the home's token, the keys of the
    endpoints of config.toml, and the secrets that the run's environment names. Their values are
    those of this process's environment variables; keys of endpoints may stand in `.env`.

    Args:
        env_dir: the folder of the environment's version. None where it is not known; then its
            secrets are not replaced.
    """
    names = _secret_names(os.path.join(env_dir, "env.json")) if env_dir else ()
    secrets = {name: os.environ.get(name, "") for name in names}
    # A home that never served over HTTP has no token.
    with contextlib.suppress(OSError, UnicodeDecodeError):
        secrets["token"] = home.token.read_text("utf-8").strip()
    with contextlib.suppress(UserError):  # a damaged config.toml is reported elsewhere
        for endpoint in home.user_config().endpoints.values():
            secrets[endpoint.key_env] = key_of(home.root, endpoint.key_env)
    return Redactor(secrets)


@functools.lru_cache(maxsize=64)  # a version folder never changes
def _secret_names(path: str) -> tuple[str, ...]:
    """The names of secrets in the env.json at `path`; () where the file cannot be read."""
    # Imported here, not at the top: these load pydantic, which a supervisor must not.
    from engine.records.env_version import EnvVersion  # noqa: PLC0415
    from engine.records.record import DamagedRecord  # noqa: PLC0415

    try:
        return EnvVersion.read(Path(path)).secrets
    except (OSError, DamagedRecord):
        return ()
