"""What the owner of a home set in its config.toml.

Imported by the supervisor, which must start at once: standard library only.
"""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from engine.core.errors import UserError
from engine.core.files import JsonObject
from engine.home.endpoints import Endpoint, read_endpoints

_CHOICES = {"sandbox": ("auto", "required", "off"), "serve_with": ("auto", "torch", "vllm")}
# Keys that are true or false, and keys that list names; the others, not in _CHOICES, are numbers.
_BOOLEANS = ("allow_root", "key_network", "allow_source_builds")
_NAME_LISTS = ("key_secrets",)
_ENDPOINTS = "endpoints"  # tables of their own


DEFAULT_STOP_MINUTES = 10.0  # of silence, before a trainer is ended whose pace explains less


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
    # Tokens of prompt and answer together that a vLLM deployment takes; 0: the model's context.
    served_length: float = 16_384.0
    # Whether packages may be built from source distributions, which runs code of theirs in the box.
    allow_source_builds: bool = False
    # What an environment may ask for that another key than the owner's pushes.
    key_secrets: tuple[str, ...] = ()
    key_network: bool = False
    # How many runs may hold a GPU at once, where its memory has room for all of them.
    runs_per_gpu: float = 1.0
    # In how many processes a run on a CPU may be shared (its setting `gpus`): for tests of that.
    cpu_ranks: float = 1.0
    # A trainer that is silent for so long, and for far longer than it usually is, is ended; 0: no.
    stop_stalled_minutes: float = DEFAULT_STOP_MINUTES
    # Models behind a URL, by the name that `openai:NAME` refers to.
    endpoints: Mapping[str, Endpoint] = field(default_factory=dict)


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
    known_keys = {each.name for each in fields(UserConfig)}
    for name in values:
        if name not in known_keys:
            raise UserError(
                "SETTING_UNKNOWN",
                f"{path} sets {name!r}, which does not exist",
                hint=f"Known keys: {', '.join(sorted(known_keys))}.",
                field=name,
            )
    number_keys = known_keys - {*_CHOICES, *_BOOLEANS, *_NAME_LISTS, _ENDPOINTS}
    # The first wrong value is reported; a wrong number before any other.
    ordered_names = [*number_keys, *_CHOICES, *_BOOLEANS, *_NAME_LISTS]
    checked = {name: _checked(path, name, values[name]) for name in ordered_names if name in values}
    if _ENDPOINTS in values:
        checked[_ENDPOINTS] = read_endpoints(path, values[_ENDPOINTS])
    return UserConfig(**checked)


def _checked(path: Path, name: str, value: Any) -> Any:
    """The `value` of the key `name`, converted to the type of its field in UserConfig. Raises
    UserError SETTING_INVALID if it is of another kind or out of range."""
    if not _is_allowed(name, value):
        raise UserError(
            "SETTING_INVALID",
            f"{path} sets {name} = {value!r}",
            hint=f"{name} must be {_allowed_in_words(name)}.",
            field=name,
        )
    if name in _CHOICES or name in _BOOLEANS:
        return value
    return tuple(value) if name in _NAME_LISTS else float(value)  # every other key is a number


def _is_allowed(name: str, value: Any) -> bool:
    """Whether the key `name` may have this value."""
    if name in _CHOICES:
        return value in _CHOICES[name]
    if name in _BOOLEANS:
        return isinstance(value, bool)
    if name in _NAME_LISTS:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    # Every other key is a number. A bool is an int in Python, but no number in the file.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value >= 0


def _allowed_in_words(name: str) -> str:
    """Which values the key `name` may have, such as "true or false"."""
    if name in _CHOICES:
        return " or ".join(f'"{choice}"' for choice in _CHOICES[name])
    if name in _BOOLEANS:
        return "true or false"
    if name in _NAME_LISTS:
        return 'a list of names, as in ["JUDGE_API_KEY"]'
    return "a number that is 0 or more"
