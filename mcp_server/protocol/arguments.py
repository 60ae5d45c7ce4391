"""Checks the arguments of a tool call, and says how to correct a wrong one."""

import difflib
from collections.abc import Mapping
from typing import Any

from mcp.server.mcpserver.tools import Tool
from pydantic import ValidationError

from engine.core.errors import UserError
from engine.core.hints import Change, Hint
from engine.records.settings import TRAINERS, SamplingSettings
from mcp_server.api.replies import compact

# How similar a name must be to be suggested (difflib's ratio, 1 is equal). Settings need more,
# because there are many of them.
NEAR_ARGUMENT = 0.55
NEAR_SETTING = 0.8

# JSON types that are checked here, because pydantic would convert other values; and how errors
# name them.
_CHECKED_TYPES = {"integer": "a whole number", "number": "a number", "boolean": "true or false"}
_EXPECTED_WORDS = {
    "string": "a text",
    "array": "a list",
    "object": "an object",
    "integer": "a whole number",
}


def without_nulls(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments whose value is not null. Some clients send null for an argument that
    they leave out."""
    return {name: value for name, value in arguments.items() if value is not None}


def check_arguments(tool: Tool, arguments: Mapping[str, Any]) -> None:
    """Check that `tool` has these arguments and can take their values. Null counts as left out.

    The SDK ignores unknown arguments, so a call with a misspelt one would run with the default.

    Raises:
        UserError: UNKNOWN_ARGUMENT if the tool has no argument of some name; the hint names the
            nearest one. BAD_ARGUMENT if a value is wrong or an argument is missing; the hint says
            what is expected.
    """
    schemas: Mapping[str, Any] = tool.parameters.get("properties", {})
    for name in arguments:
        if name not in schemas:
            raise _unknown_argument(tool.name, name, arguments[name], schemas)
    given_arguments = without_nulls(arguments)
    for name, value in given_arguments.items():
        _check_json_type(name, value, schemas[name])
    try:
        tool.fn_metadata.validate_arguments(given_arguments)
    except ValidationError as error:
        raise _bad_argument(tool.name, schemas, error) from None


def _unknown_argument(tool: str, name: str, value: Any, schemas: Mapping[str, Any]) -> UserError:
    """Make the UNKNOWN_ARGUMENT error for the argument `name`, with the nearest name as hint.

    `schemas`: the schemas of the tool's arguments, by name.
    """
    hint_text = did_you_mean(name, list(schemas)) + _settings_hint(name, schemas)
    return UserError(
        "UNKNOWN_ARGUMENT",
        f"{tool} has no argument {name!r}",
        hint=Hint(hint_text, change=_correction(name, value, schemas)),
        field=name,
    )


def _check_json_type(name: str, value: Any, schema: Mapping[str, Any]) -> None:
    """Raise UserError BAD_ARGUMENT if the schema wants a boolean and `value` is not one, or if the
    schema wants a number and `value` is not one. All other types are checked by pydantic."""
    json_type = str(schema.get("type"))
    if json_type in _CHECKED_TYPES and not _has_json_type(json_type, value):
        raise UserError(
            "BAD_ARGUMENT",
            f"{name}={compact_value(value)} is not {_CHECKED_TYPES[json_type]}",
            hint=_expected(schema),
            field=name,
        )


def _has_json_type(json_type: str, value: Any) -> bool:
    """Whether `value` has the type `json_type`: "boolean", "integer" or "number".

    Pydantic alone would take true for 1 and "5" for 5. For "integer" this only checks that `value`
    is a number; pydantic checks that the number is whole.
    """
    if isinstance(value, bool):  # tested first, because in Python a boolean is also an int
        return json_type == "boolean"
    return json_type != "boolean" and isinstance(value, int | float)


def _bad_argument(tool: str, schemas: Mapping[str, Any], error: ValidationError) -> UserError:
    """Make the BAD_ARGUMENT error for the first of pydantic's faults in the arguments.

    Args:
        tool: name of the tool.
        schemas: schemas of the tool's arguments, by name.
        error: pydantic's faults.
    """
    fault = error.errors(include_url=False)[0]
    path = [str(key) for key in fault["loc"]]  # the argument, then keys or indexes inside it
    name = path[0] if path else ""
    schema = schemas.get(name, {})
    if fault["type"] == "missing":
        return UserError("BAD_ARGUMENT", f"{tool} needs {name}", hint=_expected(schema), field=name)
    place = ".".join(path)
    value = compact_value(fault.get("input"))
    message = f"{place}={value} cannot be used: {fault['msg']}"
    hint = Hint(_expected(schema), change=_nearest_value(name, fault.get("input"), schema))
    return UserError("BAD_ARGUMENT", message, hint=hint, field=place)


def _nearest_value(name: str, wrong_value: Any, schema: Mapping[str, Any]) -> Change | None:
    """Return the change of the argument `name` from `wrong_value` to the most similar value in the
    enum of its `schema`; None if no value is similar, or the schema has no enum."""
    near_values = difflib.get_close_matches(str(wrong_value).lower(), schema.get("enum", []), n=1)
    return Change(arguments={name: near_values[0]}) if near_values else None


def compact_value(value: Any) -> str:
    """Return `value` as JSON, cut to 120 characters, to be quoted in an error."""
    try:
        text = compact(value)
    except (TypeError, ValueError):  # not JSON, such as NaN
        text = str(value)
    return text if len(text) <= 120 else text[:117] + "..."  # 117: the three dots count too


def _expected(schema: Mapping[str, Any]) -> str:
    """Make a sentence that says which values an argument takes, from the schema of the argument.

    Example: "It takes a whole number, at least 1." The description of the argument, if the schema
    has one, follows.
    """
    if "enum" in schema:
        type_words = "one of " + ", ".join(map(str, schema["enum"]))
    else:
        json_type = schema.get("type", "value")  # "a value" where the schema names no type
        type_words = _EXPECTED_WORDS.get(json_type, f"a {json_type}")
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        type_words += f" from {low} to {high}"
    elif low is not None:
        type_words += f", at least {low}"
    description = schema.get("description", "")
    return f"It takes {type_words}. {description}".strip()


def did_you_mean(name: str, known_names: list[str]) -> str:
    """Make a hint such as "Did you mean seed? Available: seed, steps."

    If no name in `known_names` is near to `name`, the hint has only the second sentence.
    """
    nearest_name = _nearest(name, known_names, NEAR_ARGUMENT)
    available = f"Available: {', '.join(known_names)}."
    return f"Did you mean {nearest_name}? {available}" if nearest_name else available


def _nearest(name: str, known_names: list[str], least_similarity: float) -> str:
    """Return the name in `known_names` most similar to `name`; "" if none is similar enough.

    A known name that is one of the words of `name` comes first: for "run_ids" that is "ids", not
    "env_id", which only shares many letters. `least_similarity` is what counts as similar enough,
    from 0 (any name) to 1 (the same name).
    """
    words = name.lower().split("_")
    if len(words) > 1 and name.lower() not in known_names:
        for word in reversed(words):  # the last word of a name is the noun, as "ids" in "run_ids"
            if word in known_names:
                return word
    near_names = difflib.get_close_matches(name.lower(), known_names, n=1, cutoff=least_similarity)
    return near_names[0] if near_names else ""


def _correction(name: str, value: object, schemas: Mapping[str, Any]) -> Change | None:
    """Return the change that corrects an unknown argument: move it into `settings` if it is the
    name of a setting, else give it the nearest name. Returns None if no name is near.

    `value` is the argument's value; `schemas` holds the schemas of the tool's arguments, by name.
    """
    setting = _nearest_setting(name, schemas)
    if setting:
        return Change(settings={setting: value}, without_arguments=(name,))
    nearest_name = _nearest(name, list(schemas), NEAR_ARGUMENT)
    if not nearest_name:
        return None
    return Change(arguments={nearest_name: value}, without_arguments=(name,))


def _settings_hint(name: str, schemas: Mapping[str, Any]) -> str:
    """Return a sentence that tells to pass the setting `name` inside `settings`, not as an
    argument. Returns "" if `name` is near to no setting.

    `schemas` holds the schemas of the tool's arguments, by name.
    """
    setting = _nearest_setting(name, schemas)
    return f' Settings go inside settings, e.g. settings={{"{setting}": ...}}.' if setting else ""


def _nearest_setting(name: str, schemas: Mapping[str, Any]) -> str:
    """Return the name of the setting that is nearest to `name`; "" if none is near or the tool
    takes no settings. `schemas` holds the schemas of the tool's arguments, by name.
    """
    if "settings" not in schemas:
        return ""
    # `attempts` marks the tool `evaluate`, the only one with that argument. It takes no settings
    # but those of sampling.
    setting_schemas = [SamplingSettings] if "attempts" in schemas else list(TRAINERS.values())
    names = [field for schema in setting_schemas for field in schema.model_fields]
    return _nearest(name, names, NEAR_SETTING)
