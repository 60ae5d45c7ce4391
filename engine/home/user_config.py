"""What the owner of a home set in its config.toml.

Imported by the supervisor, which must start at once: standard library only.
"""

import math
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from engine.core.errors import UserError
from engine.core.files import JsonObject

_CHOICES = {"sandbox": ("auto", "required", "off"), "serve_with": ("auto", "torch", "vllm")}
_YES_OR_NO = ("allow_root", "key_network", "allow_source_builds")
_NAMES = ("key_secrets",)


@dataclass(frozen=True)
class UserConfig:
    """`config.toml` of a home; every key is optional."""

    gpu_hour_price: float = 0.0
    max_gpu_hours_total: float | None = None
    auto_approve_gpu_hours: float | None = None
    idle_stop_minutes: float = 10.0
    sandbox: str = "auto"
    allow_root: bool = False
    serve_with: str = "auto"
    # Whether packages may be built from source distributions, which runs code of theirs in the box.
    allow_source_builds: bool = False
    # What an environment may ask for that another key than the owner's pushes.
    key_secrets: tuple[str, ...] = ()
    key_network: bool = False


def read_config(path: Path) -> UserConfig:
    """The file at `path`, checked; the defaults where there is none.

    Raises UserError SETTING_UNKNOWN or SETTING_INVALID.
    """
    try:
        with open(path, "rb") as file:
            values = tomllib.load(file)
    except FileNotFoundError:
        return UserConfig()
    except (OSError, ValueError, RecursionError) as error:  # no TOML, no text, too many digits
        raise UserError(
            "SETTING_INVALID",
            f"{path} cannot be read: {error}",
            hint="Correct the file or move it away; every key in it is optional.",
        ) from error
    return _checked(path, values)


def _checked(path: Path, values: JsonObject) -> UserConfig:
    """The config of the parsed file. Raises UserError SETTING_UNKNOWN or SETTING_INVALID."""
    known = {field.name for field in fields(UserConfig)}
    for name in values:
        if name not in known:
            raise UserError(
                "SETTING_UNKNOWN",
                f"{path} sets {name!r}, which does not exist",
                hint=f"Known keys: {', '.join(sorted(known))}.",
                field=name,
            )
    for name in known - {*_CHOICES, *_YES_OR_NO, *_NAMES}:
        value = values.get(name, 0.0)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value < 0:
            raise _bad(path, name, value, "a number that is 0 or more")
        if name in values:
            values[name] = float(value)
    for name, choices in _CHOICES.items():
        if values.get(name, "auto") not in choices:
            raise _bad(path, name, values[name], " or ".join(f'"{c}"' for c in choices))
    for name in _YES_OR_NO:
        if not isinstance(values.get(name, False), bool):
            raise _bad(path, name, values[name], "true or false")
    for name in _NAMES:
        value = values.get(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise _bad(path, name, value, 'a list of names, as in ["JUDGE_API_KEY"]')
        values[name] = tuple(value)
    return UserConfig(**values)


def _bad(path: Path, name: str, value: Any, wanted: str) -> UserError:
    return UserError(
        "SETTING_INVALID",
        f"{path} sets {name} = {value!r}",
        hint=f"{name} must be {wanted}.",
        field=name,
    )
