"""Reads the options of `[adapter]` strictly into a dataclass of the adapter's module."""

import dataclasses
import difflib
from typing import Any, TypeVar

from envs.config.adapters import Adapter
from envs.config.problem import EnvProblem
from envs.config.settings import FILE
from envs.json_types import JsonObject

T = TypeVar("T")

_WORDS = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    dict: "a table",
    tuple: "a list of texts",
}


def read_options(adapter: Adapter, options: type[T]) -> T:
    """Return the options of the adapter as an instance of the dataclass `options`.

    The default of a field determines its type (str, int, float, bool, dict, or a tuple of texts); a
    field without a default is a required text.

    Raises EnvProblem ENV_INVALID for an unknown, missing or mistyped option, or a negative number.
    """
    fields = {field.name: field for field in dataclasses.fields(options)}  # type: ignore[arg-type]
    for name in adapter.options:
        if name not in fields:
            close = difflib.get_close_matches(name, fields, n=1)
            suggestion = f"; did you mean {close[0]}?" if close else ""
            raise _problem(f"unknown option {name!r}{suggestion}", adapter, sorted(fields))
    values: JsonObject = {}
    for name, field in fields.items():
        has_default = field.default is not dataclasses.MISSING
        has_factory = field.default_factory is not dataclasses.MISSING
        if name in adapter.options:
            values[name] = _checked_option(adapter, name, _kind_of_value(field))
        elif not has_default and not has_factory:
            raise _problem(f"{name} is missing", adapter, sorted(fields))
    return options(**values)


def _kind_of_value(field: Any) -> type:
    """Return the type of the values of a dataclass field: that of its default, dict if its default
    is a new dict, or str if it has no default."""
    if field.default is not dataclasses.MISSING:
        return type(field.default)
    return dict if field.default_factory is dict else str


def _checked_option(adapter: Adapter, name: str, expected_type: type) -> Any:
    """Return the value of the adapter's option `name`, a list as a tuple. Raises EnvProblem
    ENV_INVALID unless it has the expected type."""
    value = adapter.options[name]
    if not _has_type(value, expected_type):
        raise _problem(f"{name} is {_WORDS[expected_type]}, got {value!r:.80}", adapter, [])
    return tuple(value) if isinstance(value, list) else value


def _has_type(value: Any, expected_type: type) -> bool:
    """Whether a TOML value has the type and, if it is a number, is not negative. The type tuple
    stands for a list of texts."""
    if isinstance(value, bool):  # a bool is an int in Python
        return expected_type is bool
    if expected_type is tuple:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if expected_type in (int, float):  # a whole number is a number too
        return isinstance(value, int | expected_type) and value >= 0
    return isinstance(value, expected_type)


def _problem(message: str, adapter: Adapter, allowed: list[str]) -> EnvProblem:
    """Return an EnvProblem ENV_INVALID about the table [adapter]; `allowed` are the option names
    for its hint, [] for a general hint."""
    hint = f"{adapter.kind} takes: {', '.join(allowed)}." if allowed else f"Correct {FILE}."
    return EnvProblem("ENV_INVALID", f"[adapter] {message}", hint=hint, file=FILE)
