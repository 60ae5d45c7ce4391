"""What all readers of tool calls share: calls, faults, marks, and values written as plain text.

A reader is a function from the text of a reply, without its reasoning, to `ParsedCalls`.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from envs.json_types import JsonObject, ToolSchema


def finite(text: str) -> float:
    """Convert a text to a float. Raises ValueError if the text is no number, or one that JSON does
    not have: NaN, or a number too large for a float (infinity)."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"no number: {text}")
    return number


_DECODER = json.JSONDecoder(parse_float=finite, parse_constant=finite)
_SHOWN_CHARS = 60  # how much of an unreadable text an error message quotes
_CONSTANTS = {"True": True, "False": False, "None": None}


class Malformed(ValueError):
    """A part of a reply began as a tool call but is none; the message says why."""


@dataclass(frozen=True)
class ParsedCall:
    """One call that a model wrote.

    Attributes:
        name: the name of the tool, whether or not such a tool exists.
        arguments: the arguments by name.
        id: the id that the model gave the call; "" if the dialect writes none.
    """

    name: str
    arguments: JsonObject
    id: str = ""


@dataclass(frozen=True)
class ParsedCalls:
    """What the text of a reply holds.

    Attributes:
        content: the text without the calls.
        calls: the calls that could be read, in the order they were written.
        faults: one text for each call that could not be read, saying why.
    """

    content: str
    calls: tuple[ParsedCall, ...] = ()
    faults: tuple[str, ...] = ()


Reader = Callable[[str, Sequence[ToolSchema]], ParsedCalls]
# Reads one or more calls at a position of the text. Returns (the calls, the position after them).
Body = Callable[[str, int], tuple[list[ParsedCall], int]]


def between_marks(text: str, opening: str, closing: str, body: Body) -> ParsedCalls:
    """Read the calls that stand between two marks, which may occur any number of times in a text.

    Args:
        opening: the mark before the calls.
        closing: the mark that must follow them; "" if none must.
        body: reads the calls at a position of the text, the one after `opening`. Returns (the
            calls, the position after them) or raises Malformed.

    Returns the calls, one fault for each place that cannot be read, and the text outside the marks
    as the content. If there is neither a call nor a fault, the content is the unchanged text.
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
    """Read calls with `body` at `position`, and the mark `closing` after them.

    Returns (the calls, the faults, the position from which to go on). If the calls cannot be read,
    the list of calls is empty and there is one fault; otherwise there is no fault.
    """
    try:
        calls, body_end = body(text, position)
        return calls, [], skip_mark(text, body_end, closing)
    except Malformed as fault:
        return [], [str(fault)], _end_of_fault(text, position, closing)


def _end_of_fault(text: str, position: int, closing: str) -> int:
    """Return the position from which to go on after an unreadable call at `position`.

    This is the position after the next mark `closing`. Without such a mark it is the end of the
    text, because everything up to there may belong to the call.
    """
    end = text.find(closing, position) if closing else -1
    return len(text) if end < 0 else end + len(closing)


def skip_mark(text: str, position: int, mark: str) -> int:
    """Return the position after `mark`, which must stand at `position` or after white space there.
    Raises Malformed if it does not."""
    position = skip_space(text, position)
    if not text.startswith(mark, position):
        raise Malformed(f"{mark} should follow, not {shown(text[position:])}")
    return position + len(mark)


def skip_space(text: str, position: int) -> int:
    """Return the position of the first character, from `position` on, that is not white space."""
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def shown(text: str) -> str:
    """Return the beginning of a text in quotes, as an error message shows it ("the end" for no
    text)."""
    return repr(text[:_SHOWN_CHARS]) if text else "the end"


def json_value(text: str, position: int) -> tuple[object, int]:
    """Read the JSON value that begins at `position`, after any white space.

    Returns (the value, the position after it). Raises Malformed if no valid JSON stands there.
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
    """Return the call that a JSON object describes, such as `{"name": "f", "arguments": {"a": 1}}`.

    The key may also be `parameters`, its value may also be JSON text, and the object may have an
    `id`. Raises Malformed if `value` has another form.
    """
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
    """Return the arguments that a call of the tool `name` gives as `value`.

    `value` is an object or the JSON text of one; None and blank text mean no arguments. Raises
    Malformed for anything else.
    """
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
    """Return the schemas of the parameters of the tool `name`, by the names of the parameters.
    Returns {} if `tools` has no such tool, or the tool's schema names no parameters."""
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, dict) and function.get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, dict) else None
            return properties if isinstance(properties, dict) else {}
    return {}


def typed(text: str, schema: object) -> object:
    """Convert an argument that a dialect without quotes wrote as `text` to its value.

    The parameter's schema decides whether "75001" is a text or a number. Without a schema, text
    that is valid JSON (but no quoted string), or Python's True, False or None, becomes that value;
    any other text stays text.
    """
    allowed_types = _types(schema)
    if allowed_types == {"string"}:
        return text
    value = _literal(text.strip())
    if isinstance(value, str):  # a quoted string keeps its quotes: they are part of the text
        return text
    value_types = {_type_of(value)}
    if _is_number(value):  # an integer is a number too
        value_types.add("number")
    # The schema allows a string but no value of this type, so "75001" stays a string.
    if "string" in allowed_types and not value_types & allowed_types:
        return text
    return value


def _types(schema: object) -> set[str]:
    """Return the names of the types that a JSON schema allows, such as {"string", "null"}.

    They stand in its `type`, `anyOf` and `oneOf`; without these, the types of the values in its
    `enum` count. The set is empty if the schema has none of the four.
    """
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
    """Return the list that a schema has under `keyword`, or [] if it has no list there."""
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


def _type_of(value: object) -> str:
    """Return JSON schema's name for the narrowest type of a value, e.g. "integer" for 2 and for
    2.0."""
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
    """Tell whether a value is a number. True and False are not, although Python makes them
    integers."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _literal(text: str) -> object:
    """Parse a text that is JSON or one of Python's True, False and None; return any other text as
    it is."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return text
