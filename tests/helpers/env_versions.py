"""Versions of environments as a push would describe them, without the push."""

from pathlib import Path
from typing import Any

from engine.records.env_version import EnvVersion
from envs.config.settings import Limits


def write_version(path: Path, **fields: Any) -> None:
    """Write an env.json with these fields, and with the least of the others."""
    least: dict[str, Any] = {
        "kind": "single",
        "scored": True,
        "tools": [],
        "rows": {},
        "limits": Limits(),
        "secrets": (),
    }
    EnvVersion(**(least | fields)).write(path)
