"""Values in notations that are almost JSON: Gemma's and Python's.

Numbers, lists, objects, and true, false and null, in Python's words too. How a text is written is
the notation's own: a `ReadText` reads one.
"""

import re
from collections.abc import Callable

from engine.models.dialects.reading import Malformed, finite, shown, skip_mark, skip_space
from envs.json_types import JsonObject

# Gives the text in quotes that begins at a position, and the position after it; None where none
# begins there.
ReadText = Callable[[str, int], tuple[str, int] | None]

_KEY = re.compile(r"[^\s:=,(){}\[\]]+")
_NUMBER = re.compile(r"-?\d+(?P<fraction>\.\d*)?(?P<exponent>[eE][+-]?\d+)?")
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_DEEPEST = 50  # levels of lists and objects
_MOST_DIGITS = 400  # of a number


def read_pairs(
    text: str,
    position: int,
    read_text: ReadText,
    separator: str = ":",
    closing: str = "}",
    depth: int = 0,
) -> tuple[JsonObject, int]:
    """Read the pairs of an object, or the named arguments of a call.

    Args:
        position: after the opening bracket of the object or call.
        read_text: given the text and a position, returns the text in quotes there and the position
            after it; None if none begins there.
        separator: what stands between a key and its value.
        closing: the closing bracket.
        depth: the number of lists and objects around the pairs.

    Returns (the pairs, the position after the closing bracket). Raises Malformed.
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
    """Read the key at `position`, with quotes or without them: (the key, the position after it).

    `read_text` reads a text in quotes, or returns None. Raises Malformed if no key stands there.
    """
    quoted = read_text(text, position)
    if quoted:
        return quoted
    unquoted = _KEY.match(text, position)
    if not unquoted:
        raise Malformed(f"no name of an argument: {shown(text[position:])}")
    return unquoted.group(), unquoted.end()


def after_item(text: str, position: int, closing: str) -> int:
    """The position at which to go on after an item that ends at `position`.

    That is the position after the comma, or that of the bracket `closing`, which follows the last
    item. Raises Malformed where neither follows.
    """
    position = skip_space(text, position)
    return position if text.startswith(closing, position) else skip_mark(text, position, ",")


def _read_value(text: str, position: int, read_text: ReadText, depth: int) -> tuple[object, int]:
    """Read the value at `position`, after any white space: (the value, the position after it).

    `read_text` reads a text in quotes, or returns None. `depth` is the number of lists and objects
    around the value. Raises Malformed, also where that is more than `_DEEPEST`.
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
    """Read the value of the word at `position`, such as `true`: (the value, the position after it).

    Raises Malformed if none of `_WORDS` stands there.
    """
    for word, value in _WORDS.items():
        if text.startswith(word, position):
            return value, position + len(word)
    raise Malformed(f"no value: {shown(text[position:])}")


def _number(match: re.Match[str]) -> float:
    """The number that `_NUMBER` matched; an int if it has neither fraction nor exponent. Raises
    Malformed if it has too many characters or is too large for a float."""
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
    """Read the items of a list; `position` is the one after its opening bracket.

    `read_text` reads a text in quotes, or returns None. `depth` is the number of lists and objects
    around the items. Returns (the items, the position after the closing bracket). Raises Malformed.
    """
    items: list[object] = []
    position = skip_space(text, position)
    while not text.startswith("]", position):
        item, position = _read_value(text, position, read_text, depth)
        items.append(item)
        position = skip_space(text, after_item(text, position, "]"))
    return items, position + 1
