"""A subset of JSON Schema, enough for answers and tool arguments.

Known: type, enum, const, properties, required, additionalProperties, items, minItems, maxItems,
uniqueItems, minLength, maxLength, pattern, minimum, maximum, exclusiveMinimum, exclusiveMaximum,
multipleOf, anyOf, allOf, oneOf, not. A keyword that is not known is refused rather than ignored.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

ANNOTATIONS = frozenset(
    {"$schema", "$id", "$comment", "title", "description", "default", "examples", "format"}
)
TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda v: isinstance(v, dict),
    "array": lambda v: isinstance(v, list),
    "string": lambda v: isinstance(v, str),
    "boolean": lambda v: isinstance(v, bool),
    "null": lambda v: v is None,
    "number": lambda v: isinstance(v, int | float) and not isinstance(v, bool),
    "integer": lambda v: _is_number(v) and float(v).is_integer(),
}
# Keyword -> (the type of values it applies to, whether a value v keeps the bound b).
BOUNDS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "minimum": ("number", lambda v, b: v >= b),
    "maximum": ("number", lambda v, b: v <= b),
    "exclusiveMinimum": ("number", lambda v, b: v > b),
    "exclusiveMaximum": ("number", lambda v, b: v < b),
    "multipleOf": ("number", lambda v, b: (v / b).is_integer() if b else False),
    "minLength": ("string", lambda v, b: len(v) >= b),
    "maxLength": ("string", lambda v, b: len(v) <= b),
    "pattern": ("string", lambda v, b: re.search(b, v) is not None),
    "minItems": ("array", lambda v, b: len(v) >= b),
    "maxItems": ("array", lambda v, b: len(v) <= b),
    "uniqueItems": ("array", lambda v, b: not b or len({_canonical(i) for i in v}) == len(v)),
}
# Keywords that the functions below handle, each in its own way.
OTHERS = ("type", "enum", "const", "properties", "required", "additionalProperties", "items")
JOINED = ("anyOf", "allOf", "oneOf", "not")
KNOWN = frozenset({*BOUNDS, *OTHERS, *JOINED}) | ANNOTATIONS


def schema_errors(value: Any, schema: Mapping[str, Any] | bool, place: str = "$") -> list[str]:
    """Check `value` against a JSON schema. Returns one text per fault; [] if the value fits.

    For example ["$.items[2]: not of type string"].

    Args:
        value: any JSON value.
        schema: a schema, or True (everything is allowed) or False (nothing is).
        place: the path of `value` in the whole document; each text begins with it.

    Raises ValueError if the schema uses a keyword or type that is not known.
    """
    if isinstance(schema, bool):
        return [] if schema else [f"{place}: not allowed"]
    _check_keywords(schema)
    errors = _type_errors(value, schema, place)
    errors += _choice_errors(value, schema, place)
    errors += _bound_errors(value, schema, place)
    if isinstance(value, dict):
        errors += _object_errors(value, schema, place)
    if isinstance(value, list) and "items" in schema:
        errors += _item_errors(value, schema["items"], place)
    return errors + _combination_errors(value, schema, place)


def _check_keywords(schema: Mapping[str, Any]) -> None:
    """Raise ValueError if a schema uses keywords that this module does not know."""
    unknown = sorted(set(schema) - KNOWN)
    if unknown:
        raise ValueError(f"the schema uses keywords that are not known: {', '.join(unknown)}")


def _type_errors(value: Any, schema: Mapping[str, Any], place: str) -> list[str]:
    """Return one fault if the schema names types and `value` has none of them, else [].

    Raises ValueError if the schema names an unknown type.
    """
    names = schema.get("type", [])  # a name, or a list of names
    if isinstance(names, str):
        names = [names]
    for name in names:
        if name not in TYPES:
            raise ValueError(f"the schema names an unknown type: {name!r}")
    has_a_type = any(TYPES[name](value) for name in names)  # TYPES: name -> whether a value is one
    if names and not has_a_type:
        return [f"{place}: not of type {' or '.join(names)}"]
    return []


def _choice_errors(value: Any, schema: Mapping[str, Any], place: str) -> list[str]:
    """Return a fault if `value` is not in the schema's `enum`, and one if it is not the schema's
    `const`."""
    errors: list[str] = []
    if "enum" in schema:
        allowed = {_canonical(item) for item in schema["enum"]}
        if _canonical(value) not in allowed:
            errors.append(f"{place}: not one of {schema['enum']}")
    if "const" in schema and _canonical(value) != _canonical(schema["const"]):
        errors.append(f"{place}: not {schema['const']!r}")
    return errors


def _bound_errors(value: Any, schema: Mapping[str, Any], place: str) -> list[str]:
    """Return one fault for each bound of the schema, such as `minimum` or `maxLength`, that `value`
    breaks, e.g. ["$.age: minimum is 0"].

    `place` is the path of the value in the whole document, for the text of the fault.
    """
    errors: list[str] = []
    for name, (bounded_type, is_within) in BOUNDS.items():
        # A bound says nothing about a value of another type: `minimum` ignores a string.
        applies = name in schema and TYPES[bounded_type](value)
        if applies and not is_within(value, schema[name]):
            errors.append(f"{place}: {name} is {schema[name]}")
    return errors


def _object_errors(value: Mapping[str, Any], schema: Mapping[str, Any], place: str) -> list[str]:
    """Return the faults of an object: its missing required properties, and the faults of its
    values.

    A property that the schema does not list must fit `additionalProperties`: a schema, or True
    (anything is allowed) or False (nothing is).
    """
    properties = schema.get("properties", {})
    errors = [
        f"{place}: {name} is missing" for name in schema.get("required", []) if name not in value
    ]
    additional = schema.get("additionalProperties", True)
    for name, item in value.items():
        item_schema = properties.get(name, additional)
        errors += schema_errors(item, item_schema, f"{place}.{name}")
    return errors


def _item_errors(items: list[Any], schema: Any, place: str) -> list[str]:
    """Return the faults of the items of a list. `schema` is the schema that each item must fit."""
    errors: list[str] = []
    for index, item in enumerate(items):
        errors += schema_errors(item, schema, f"{place}[{index}]")
    return errors


def _combination_errors(value: Any, schema: Mapping[str, Any], place: str) -> list[str]:
    """Return the faults of a value against the keywords allOf, anyOf, oneOf and not of its schema.

    For allOf these are the faults against each of its schemas. Each of the other keywords gives one
    text if it is broken.
    """
    errors: list[str] = []
    for all_of_schema in schema.get("allOf", []):
        errors += schema_errors(value, all_of_schema, place)
    for name in ("anyOf", "oneOf"):
        if name in schema:
            fit_count = _count_fitting(value, schema[name])
            if fit_count == 0 or (name == "oneOf" and fit_count > 1):
                errors.append(f"{place}: fits {fit_count} of {name}")
    if "not" in schema and not schema_errors(value, schema["not"], place):
        errors.append(f"{place}: is what it must not be")
    return errors


def _count_fitting(value: Any, schemas: Iterable[Any]) -> int:
    """Return how many of these schemas a value fits."""
    return sum(not schema_errors(value, schema) for schema in schemas)


def _is_number(value: Any) -> bool:
    """Whether a value is a number; a bool is not."""
    return TYPES["number"](value)


def _canonical(value: Any) -> str:
    """Return a text that is the same for equal JSON values: for 1 and 1.0, but not for 1 and
    true."""
    return json.dumps(_with_whole_floats_as_integers(value), sort_keys=True)


def _with_whole_floats_as_integers(value: Any) -> Any:
    """Return a copy of a JSON value in which 1.0 is 1, at every depth."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_with_whole_floats_as_integers(item) for item in value]
    if isinstance(value, dict):
        return {key: _with_whole_floats_as_integers(item) for key, item in value.items()}
    return value
