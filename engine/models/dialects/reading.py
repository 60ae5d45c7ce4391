"""What all readers of tool calls share: calls, faults, marks, and values written as plain text.

A reader is a function from the text of a reply (its reasoning taken off) to `ParsedCalls`.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from envs.json_types import JsonObject, ToolSchema


def finite(text: str) -> float:
    """The number that a text is. Raises ValueError for any other text, and for numbers that JSON
    does not have: NaN, and those too large for a float (infinity)."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"no number: {text}")
    return number


_DECODER = json.JSONDecoder(parse_float=finite, parse_constant=finite)
_SHOWN_CHARS = 60  # of a text that cannot be read, in the fault
_CONSTANTS = {"True": True, "False": False, "None": None}


class Malformed(ValueError):
    """Something began as a tool call and is none; the text says why."""


@dataclass(frozen=True)
class ParsedCall:
    """One call that a model wrote.

    Attributes:
        name: of the tool, whether or not it exists.
        arguments: by name.
        id: where the dialect writes one, else "".
    """

    name: str
    arguments: JsonObject
    id: str = ""


@dataclass(frozen=True)
class ParsedCalls:
    """What the text of a reply holds.

    Attributes:
        content: the text without the calls.
        calls: in the order they were written.
        faults: why a call could not be read, one text for each.
    """

    content: str
    calls: tuple[ParsedCall, ...] = ()
    faults: tuple[str, ...] = ()


Reader = Callable[[str, Sequence[ToolSchema]], ParsedCalls]
# Reads one call or several from a position of the text; returns them with the position after them.
Body = Callable[[str, int], tuple[list[ParsedCall], int]]


def between_marks(text: str, opening: str, closing: str, body: Body) -> ParsedCalls:
    """Read the calls that stand between two marks, any number of times in a text.

    Args:
        opening: the mark before the calls.
        closing: the mark that must follow them; "" for none.
        body: given the text and the position after `opening`, returns the calls there and the
            position after them; raises Malformed.

    Returns the calls, the faults (one for each place that cannot be read) and, as content, the text
    outside the marks; the whole text where there is neither a call nor a fault.
    """
    calls: list[ParsedCall] = []
    faults: list[str] = []
    contents: list[str] = []  # the texts around the calls
    position = 0
    while (start := text.find(opening, position)) >= 0:
        contents.append(text[position:start])
        new_calls, new_faults, position = _read_closed(text, start + len(opening), closing, body)
        calls += new_calls
        faults += new_faults
    contents.append(text[position:])
    if not calls and not faults:
        return ParsedCalls(text)
    return ParsedCalls("".join(contents).strip(), tuple(calls), tuple(faults))


def _read_closed(
    text: str, position: int, closing: str, body: Body
) -> tuple[list[ParsedCall], list[str], int]:
    """Read calls with `body` at `position`, up to the mark `closing`.

    Returns (the calls, the faults, the position from which to go on). There is one fault and no
    call if the calls could not be read, else no fault.
    """
    try:
        calls, body_end = body(text, position)
        return calls, [], skip_mark(text, body_end, closing)
    except Malformed as fault:
        return [], [str(fault)], _end_of_fault(text, position, closing)


def _end_of_fault(text: str, position: int, closing: str) -> int:
    """The position from which to go on after a call at `position` that could not be read.

    That is after the next mark `closing`; without one the end of the text, all of which belongs to
    the fault.
    """
    end = text.find(closing, position) if closing else -1
    return len(text) if end < 0 else end + len(closing)


def skip_mark(text: str, position: int, mark: str) -> int:
    """The position after `mark`, which must stand at `position`, or after white space there. Raises
    Malformed if it does not."""
    position = skip_space(text, position)
    if not text.startswith(mark, position):
        raise Malformed(f"{mark} should follow, not {shown(text[position:])}")
    return position + len(mark)


def skip_space(text: str, position: int) -> int:
    """The position of the first character from `position` on that is no white space."""
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def shown(text: str) -> str:
    """The beginning of a text as it stands in a fault."""
    return repr(text[:_SHOWN_CHARS]) if text else "the end"


def json_value(text: str, position: int) -> tuple[object, int]:
    """Read the JSON value that begins at `position`, after any white space.

    Returns (the value, the position after it). Raises Malformed.
    """
    position = skip_space(text, position)
    try:
        return _DECODER.raw_decode(text, position)
    except json.JSONDecodeError as error:
        raise Malformed(f"not JSON ({error.msg}): {shown(text[position:])}") from error
    # ValueError: NaN, 1e999, an integer of thousands of digits. RecursionError: nested too deeply.
    except (ValueError, RecursionError) as error:
        raise Malformed(f"not JSON: {shown(text[position:])}") from error


def call_from_json(value: object) -> ParsedCall:
    """The call that an object describes: its `name`, its `arguments` (or `parameters`), which may
    be text that is JSON, and its `id`, if it has one. Raises Malformed if `value` is no such
    object."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise Malformed(f"a call is an object with a name, not {shown(json.dumps(value))}")
    arguments = value.get("arguments", value.get("parameters"))
    call_id = value.get("id")
    return ParsedCall(
        name=value["name"],
        arguments=arguments_from(arguments, value["name"]),
        id=call_id if isinstance(call_id, str) else "",
    )


def arguments_from(value: object, name: str) -> JsonObject:
    """The arguments of a call of the tool `name`. `value` is what the call gives for them: an
    object, the JSON text of one, or None or blank text for no arguments. Raises Malformed."""
    if isinstance(value, str):
        if not value.strip():
            return {}
        value, _ = json_value(value, position=0)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise Malformed(f"the arguments of {name} are no object: {shown(json.dumps(value))}")
    return value


def parameters_of(tools: Sequence[ToolSchema], name: str) -> Mapping[str, object]:
    """The schemas of the parameters of the tool `name`, by the names of the parameters; {} if there
    is no such tool in `tools`, or its schema names no parameters."""
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, dict) and function.get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, dict) else None
            return properties if isinstance(properties, dict) else {}
    return {}


def typed(text: str, schema: object) -> object:
    """The value that an argument stands for in a dialect that writes texts without quotes.

    The schema of the parameter decides whether "75001" is a text or a number. Without a schema,
    text that is valid JSON (but no quoted text), or Python's True, False or None, stands for that
    value, and all other text for itself.
    """
    allowed_types = _types(schema)
    if allowed_types == {"string"}:
        return text
    value = _literal(text.strip())
    if isinstance(value, str):  # quotes in the text belong to it
        return text
    value_types = {_type_of(value)}
    if _is_number(value):  # an integer is a number too
        value_types.add("number")
    # The schema allows a text, and no value of this type.
    if "string" in allowed_types and not value_types & allowed_types:
        return text
    return value


def _types(schema: object) -> set[str]:
    """The names of the types that a schema allows: those in its `type`, `anyOf` and `oneOf`, or
    else those of the values in its `enum`. Empty if it has none of these."""
    if not isinstance(schema, dict):
        return set()
    declared = schema.get("type")
    declared_types = declared if isinstance(declared, list) else [declared]
    types = {name for name in declared_types if isinstance(name, str)}
    for choice in [*_listed(schema, "anyOf"), *_listed(schema, "oneOf")]:
        types |= _types(choice)
    if not types:
        types = {_type_of(value) for value in _listed(schema, "enum")}
    return types


def _listed(schema: Mapping[str, object], keyword: str) -> list[object]:
    """What a schema lists under the keyword; [] if it has no list there."""
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


def _type_of(value: object) -> str:
    """The name in JSON schema of a value's type, the narrowest: "integer" for 2 and for 2.0."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if float(value).is_integer() else "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _literal(text: str) -> object:
    """The value of a text that is JSON or one of Python's constants; else the text itself."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return text
