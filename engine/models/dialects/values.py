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
    at: int,
    read_text: ReadText,
    separator: str = ":",
    closing: str = "}",
    depth: int = 0,
) -> tuple[JsonObject, int]:
    """The pairs of an object, or the named arguments of a call.

    Args:
        at: the position after the opening bracket of the object or call.
        read_text: given the text and a position, returns the text in quotes there and the position
            after it; None if none begins there.
        separator: what stands between a key and its value.
        closing: the closing bracket.
        depth: the number of lists and objects around the pairs.

    Returns the pairs and the position after the closing bracket. Raises Malformed.
    """
    pairs: JsonObject = {}
    at = skip_space(text, at)
    while not text.startswith(closing, at):
        key, at = _read_key(text, at, read_text)
        at = skip_mark(text, at, separator)
        pairs[key], at = _read_value(text, at, read_text, depth)
        at = skip_space(text, after_item(text, at, closing))
    return pairs, at + len(closing)


def _read_key(text: str, at: int, read_text: ReadText) -> tuple[str, int]:
    """The key at `at`, with quotes or without them, and the position after it."""
    quoted = read_text(text, at)
    if quoted:
        return quoted
    unquoted = _KEY.match(text, at)
    if not unquoted:
        raise Malformed(f"no name of an argument: {shown(text[at:])}")
    return unquoted.group(), unquoted.end()


def after_item(text: str, at: int, closing: str) -> int:
    """Where to go on after an item that ends at `at`: the position after the comma, or that of the
    bracket `closing`, which follows the last item. Raises Malformed where neither follows."""
    at = skip_space(text, at)
    return at if text.startswith(closing, at) else skip_mark(text, at, ",")


def _read_value(text: str, at: int, read_text: ReadText, depth: int) -> tuple[object, int]:
    """The value at `at`, after any white space, and the position after it. `depth`: in how many
    lists and objects it lies. Raises Malformed."""
    if depth > _DEEPEST:
        raise Malformed(f"nested more than {_DEEPEST} levels")
    at = skip_space(text, at)
    if quoted := read_text(text, at):
        return quoted
    if text.startswith("{", at):
        return read_pairs(text, at + 1, read_text, depth=depth + 1)
    if text.startswith("[", at):
        return _read_list(text, at + 1, read_text, depth + 1)
    if number := _NUMBER.match(text, at):
        return _number(number), number.end()
    return _read_word(text, at)


def _read_word(text: str, at: int) -> tuple[object, int]:
    """The value of the word at `at`, such as `true`, and the position after the word. Raises
    Malformed if none of `_WORDS` stands there."""
    for word, value in _WORDS.items():
        if text.startswith(word, at):
            return value, at + len(word)
    raise Malformed(f"no value: {shown(text[at:])}")


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


def _read_list(text: str, at: int, read_text: ReadText, depth: int) -> tuple[list[object], int]:
    """The items of a list and the position after its closing bracket.

    `at` is the position after the opening bracket; `depth` is the number of lists and objects
    around the items. Raises Malformed.
    """
    items: list[object] = []
    at = skip_space(text, at)
    while not text.startswith("]", at):
        item, at = _read_value(text, at, read_text, depth)
        items.append(item)
        at = skip_space(text, after_item(text, at, "]"))
    return items, at + 1
