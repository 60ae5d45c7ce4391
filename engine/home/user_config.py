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
# Keys that are true or false, and keys that list names; the others, not in _CHOICES, are numbers.
_BOOLEANS = ("allow_root", "key_network", "allow_source_builds")
_NAME_LISTS = ("key_secrets",)


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
    """Read and check the config file at `path`; the defaults where there is no file.

    Raises UserError SETTING_UNKNOWN for a key that does not exist, and SETTING_INVALID for a value
    that cannot be used or a file that cannot be read.
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
    return _check_values(path, values)


def _check_values(path: Path, values: JsonObject) -> UserConfig:
    """Check the `values` of the parsed file at `path` and return them as a config. Numbers become
    floats and lists of names become tuples; a key that is missing keeps its default.

    Raises UserError SETTING_UNKNOWN or SETTING_INVALID.
    """
    known_keys = {field.name for field in fields(UserConfig)}
    for name in values:
        if name not in known_keys:
            raise UserError(
                "SETTING_UNKNOWN",
                f"{path} sets {name!r}, which does not exist",
                hint=f"Known keys: {', '.join(sorted(known_keys))}.",
                field=name,
            )
    # Every key that is no choice, no boolean and no list of names is a number. Here and below, a
    # key that is missing is checked with a value that passes.
    for name in known_keys - {*_CHOICES, *_BOOLEANS, *_NAME_LISTS}:
        value = values.get(name, 0.0)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value < 0:
            raise _invalid_value_error(path, name, value, "a number that is 0 or more")
        if name in values:
            values[name] = float(value)
    for name, choices in _CHOICES.items():
        if values.get(name, "auto") not in choices:
            raise _invalid_value_error(
                path, name, values[name], " or ".join(f'"{c}"' for c in choices)
            )
    for name in _BOOLEANS:
        if not isinstance(values.get(name, False), bool):
            raise _invalid_value_error(path, name, values[name], "true or false")
    for name in _NAME_LISTS:
        value = values.get(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise _invalid_value_error(
                path, name, value, 'a list of names, as in ["JUDGE_API_KEY"]'
            )
        values[name] = tuple(value)
    return UserConfig(**values)


def _invalid_value_error(path: Path, name: str, value: Any, expected: str) -> UserError:
    """The error for the key `name`, whose value is `value`; `expected` says in words what the value
    must be, such as "true or false"."""
    return UserError(
        "SETTING_INVALID",
        f"{path} sets {name} = {value!r}",
        hint=f"{name} must be {expected}.",
        field=name,
    )
