"""Finds which models an environment may ask by name: `openai:big` is one behind a URL,
`model:pebble` one of the home itself."""

import contextlib
import hashlib
import re
import tomllib
from pathlib import Path

PREFIX = "openai:"
LOCAL = "model:"
RUBRIC = "rubric.toml"  # its key `judge` may name a model (envs/rubric.py)
# Variables that user code gets: what it may ask (JSON), and the address at which it is asked.
NAMES, PLACE = "HONESMITH_ENDPOINTS", "HONESMITH_RELAY"
SPENT = 460  # the HTTP status that says that the run allows no more calls; no server gives it
_REFERENCE = re.compile(rf"{PREFIX}[A-Za-z0-9][A-Za-z0-9._-]{{0,59}}")
_LOCAL_REFERENCE = re.compile(rf"{LOCAL}[^\s\x00-\x1f\x7f\"\\]{{1,1000}}")


def is_reference(value: object) -> bool:
    """Whether a value names a model that can be asked: one behind a URL, such as "openai:big", or
    one of the home, such as "model:pebble"."""
    if not isinstance(value, str):
        return False
    return bool(_REFERENCE.fullmatch(value) or _LOCAL_REFERENCE.fullmatch(value))


def path_name(reference: str) -> str:
    """Return the name by which the env process asks for a model, as part of a URL's path.

    "openai:big" gives "big". A model of the home, such as "model:pebble", gives "model~" and a hash
    of its reference: "~" cannot be part of an endpoint's name, so the two never collide.
    """
    if reference.startswith(LOCAL):
        return f"model~{hashlib.sha256(reference.encode()).hexdigest()[:16]}"
    return reference.removeprefix(PREFIX)


def judge_reference(folder: Path) -> str:
    """Return the name of the model that a folder's rubric.toml has as its judge, such as
    "openai:big"; "" if there is no such file, it cannot be read, or its judge has no name."""
    # A broken file is no error here: whoever reads the whole rubric reports it.
    with contextlib.suppress(OSError, ValueError, RecursionError):
        judge = tomllib.loads((folder / RUBRIC).read_text("utf-8")).get("judge")
        return judge if isinstance(judge, str) and is_reference(judge) else ""
    return ""
