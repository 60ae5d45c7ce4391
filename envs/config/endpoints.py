"""Finds which models behind a URL an environment may ask by name, such as `openai:big`."""

import contextlib
import re
import tomllib
from pathlib import Path

PREFIX = "openai:"
RUBRIC = "rubric.toml"  # its key `judge` may name a model (envs/rubric.py)
# Variables that user code gets: what it may ask (JSON), and the address at which it is asked.
NAMES, PLACE = "HONESMITH_ENDPOINTS", "HONESMITH_RELAY"
SPENT = 460  # the HTTP status that says that the run allows no more calls; no server gives it
_REFERENCE = re.compile(rf"{PREFIX}[A-Za-z0-9][A-Za-z0-9._-]{{0,59}}")


def is_reference(value: object) -> bool:
    """Whether a value is the name of a model behind a URL, such as "openai:big"."""
    return isinstance(value, str) and bool(_REFERENCE.fullmatch(value))


def judge_reference(folder: Path) -> str:
    """Return the model that the rubric file of a folder names as its judge; "" if there is no such
    file, it cannot be read, or its judge has no name."""
    with contextlib.suppress(OSError, ValueError, RecursionError):  # whoever reads it all reports
        judge = tomllib.loads((folder / RUBRIC).read_text("utf-8")).get("judge")
        return judge if isinstance(judge, str) and is_reference(judge) else ""
    return ""
