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
    # ValueError: not TOML, not UTF-8, or a number with too many digits; RecursionError: nested too
    # deeply.
    except (OSError, ValueError, RecursionError) as error:
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
    numbers = known_keys - {*_CHOICES, *_BOOLEANS, *_NAME_LISTS}
    # Only the first wrong value is reported: one of the numbers, if any of them is wrong.
    ordered_names = [*numbers, *_CHOICES, *_BOOLEANS, *_NAME_LISTS]
    checked = {name: _checked(path, name, values[name]) for name in ordered_names if name in values}
    return UserConfig(**checked)


def _checked(path: Path, name: str, value: Any) -> Any:
    """The `value` of the key `name`, converted to the type of its field in UserConfig. Raises
    UserError SETTING_INVALID if it is of another kind or out of range."""
    if name in _CHOICES:
        if value not in _CHOICES[name]:
            expected = " or ".join(f'"{choice}"' for choice in _CHOICES[name])
            raise _invalid_value_error(path, name, value, expected)
        return value
    if name in _BOOLEANS:
        if not isinstance(value, bool):
            raise _invalid_value_error(path, name, value, "true or false")
        return value
    if name in _NAME_LISTS:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            expected = 'a list of names, as in ["JUDGE_API_KEY"]'
            raise _invalid_value_error(path, name, value, expected)
        return tuple(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:
        raise _invalid_value_error(path, name, value, "a number that is 0 or more")
    return float(value)


def _invalid_value_error(path: Path, name: str, value: Any, expected: str) -> UserError:
    """The error for the key `name`, whose value is `value`; `expected` says in words what the value
    must be, such as "true or false"."""
    return UserError(
        "SETTING_INVALID",
        f"{path} sets {name} = {value!r}",
        hint=f"{name} must be {expected}.",
        field=name,
    )
