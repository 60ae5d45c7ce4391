"""Reads values in notations that are almost JSON: Gemma's and Python's.

A value is a number, a list, an object, a string, or one of true, false and null (True, False and
None in Python). Each notation has its own quotes, so the caller passes a `ReadText`, the function
that reads one quoted string.
"""

import re
from collections.abc import Callable

from engine.models.dialects.reading import Malformed, finite, shown, skip_mark, skip_space
from envs.json_types import JsonObject

# Reads the quoted string that begins at a position of the text. Returns (the string, the position
# after it), or None if no quoted string begins there.
ReadText = Callable[[str, int], tuple[str, int] | None]

_KEY = re.compile(r"[^\s:=,(){}\[\]]+")
_NUMBER = re.compile(r"-?\d+(?P<fraction>\.\d*)?(?P<exponent>[eE][+-]?\d+)?")
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_DEEPEST = 50  # nested lists and objects; more would risk the interpreter's recursion limit
_MOST_DIGITS = 400  # in one number; Python refuses integers of some thousands of digits


def read_pairs(
    text: str,
    position: int,
    read_text: ReadText,
    separator: str = ":",
    closing: str = "}",
    depth: int = 0,
) -> tuple[JsonObject, int]:
    """Read the pairs of an object such as `a:1,b:2}`, or the named arguments of a call.

    Args:
        position: the position after the opening bracket.
        read_text: reads the quoted string at a position of the text: returns (the string, the
            position after it), or None if there is none.
        separator: the character between a key and its value.
        closing: the closing bracket.
        depth: how many lists and objects enclose these pairs.

    Returns (the pairs, the position after the closing bracket). Raises Malformed if they cannot be
    read.
    """
    pairs: JsonObject = {}
    position = skip_space(text, position)
    while not text.startswith(closing, position):
        key, position = _read_key(text, position, read_text)
        position = skip_mark(text, position, separator)
        pairs[key], position = _read_value(text, position, read_text, depth)
        position = skip_space(text, after_item(text, position, closing))
    return pairs, position + len(closing)


def _read_key(text: str, position: int, read_text: ReadText) -> tuple[str, int]:
    """Read the key at `position`, with or without quotes.

    `read_text` reads a quoted string, or returns None. Returns (the key, the position after it).
    Raises Malformed if no key stands there.
    """
    quoted = read_text(text, position)
    if quoted:
        return quoted
    unquoted = _KEY.match(text, position)
    if not unquoted:
        raise Malformed(f"no name of an argument: {shown(text[position:])}")
    return unquoted.group(), unquoted.end()


def after_item(text: str, position: int, closing: str) -> int:
    """Return the position at which to go on after an item that ends at `position`.

    This is the position after a comma, or that of the bracket `closing` if the item was the last.
    Raises Malformed if neither follows the item.
    """
    position = skip_space(text, position)
    return position if text.startswith(closing, position) else skip_mark(text, position, ",")


def _read_value(text: str, position: int, read_text: ReadText, depth: int) -> tuple[object, int]:
    """Read the value at `position`, after any white space.

    `read_text` reads a quoted string, or returns None. `depth` is how many lists and objects
    enclose the value. Returns (the value, the position after it). Raises Malformed if no value
    stands there or `depth` exceeds `_DEEPEST`.
    """
    if depth > _DEEPEST:
        raise Malformed(f"nested more than {_DEEPEST} levels")
    position = skip_space(text, position)
    if quoted := read_text(text, position):
        return quoted
    if text.startswith("{", position):
        return read_pairs(text, position + 1, read_text, depth=depth + 1)
    if text.startswith("[", position):
        return _read_list(text, position + 1, read_text, depth + 1)
    if number := _NUMBER.match(text, position):
        return _number(number), number.end()
    return _read_word(text, position)


def _read_word(text: str, position: int) -> tuple[object, int]:
    """Read a constant such as `true` at `position`: return (its value, the position after it).

    Raises Malformed if none of `_WORDS` stands there.
    """
    for word, value in _WORDS.items():
        if text.startswith(word, position):
            return value, position + len(word)
    raise Malformed(f"no value: {shown(text[position:])}")


def _number(match: re.Match[str]) -> float:
    """Convert the number that `_NUMBER` matched: to an int if it has neither fraction nor exponent,
    else to a float. Raises Malformed if it has too many characters or is too large for a float."""
    digits = match.group()
    if len(digits) > _MOST_DIGITS:
        raise Malformed(f"a number of {len(digits)} characters")
    is_integer = match["fraction"] is None and match["exponent"] is None
    try:
        return int(digits) if is_integer else finite(digits)
    except ValueError as error:
        raise Malformed(str(error)) from error


def _read_list(
    text: str, position: int, read_text: ReadText, depth: int
) -> tuple[list[object], int]:
    """Read the items of a list, where `position` is the one after its opening bracket.

    `read_text` reads a quoted string, or returns None. `depth` is how many lists and objects
    enclose the items. Returns (the items, the position after the closing bracket). Raises Malformed
    if an item cannot be read or a comma is missing.
    """
    items: list[object] = []
    position = skip_space(text, position)
    while not text.startswith("]", position):
        item, position = _read_value(text, position, read_text, depth)
        items.append(item)
        position = skip_space(text, after_item(text, position, "]"))
    return items, position + 1
