"""Values in notations that are almost JSON: Gemma's and Python's.

Numbers, lists, objects, and true, false and null, in Python's words too. How a text is written is
the notation's own: a `Texts` reads one that begins at a position.
"""

import re
from collections.abc import Callable

from engine.models.dialects.reading import Malformed, finite, shown, skip_mark, skip_space
from envs.json_types import JsonObject

# A text that begins at a position, and the position after it; None where none begins there.
Texts = Callable[[str, int], tuple[str, int] | None]

_KEY = re.compile(r"[^\s:=,(){}\[\]]+")
_NUMBER = re.compile(r"-?\d+(?P<fraction>\.\d*)?(?P<exponent>[eE][+-]?\d+)?")
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_DEEPEST = 50  # levels of lists and objects
_MOST_DIGITS = 400  # of a number


def read_pairs(
    text: str, at: int, texts: Texts, between: str = ":", closing: str = "}", depth: int = 0
) -> tuple[JsonObject, int]:
    """The pairs of an object, or the named arguments of a call.

    Args:
        at: the position after the bracket that opens it.
        between: what stands between a key and its value.
        closing: the bracket that closes it.
        depth: in how many others it lies.

    Returns them with the position after the closing bracket. Raises Malformed.
    """
    pairs: JsonObject = {}
    while not text.startswith(closing, at := skip_space(text, at)):
        quoted = texts(text, at)
        if quoted:
            key, at = quoted
        else:
            plain = _KEY.match(text, at)
            if not plain:
                raise Malformed(f"no name of an argument: {shown(text[at:])}")
            key, at = plain.group(), plain.end()
        pairs[key], at = _read_value(text, skip_mark(text, at, between), texts, depth)
        at = after_item(text, at, closing)
    return pairs, at + len(closing)


def after_item(text: str, at: int, closing: str) -> int:
    """The position after the comma that follows an item, or of the bracket that closes them all.
    Raises Malformed."""
    at = skip_space(text, at)
    return at if text.startswith(closing, at) else skip_mark(text, at, ",")


def _read_value(text: str, at: int, texts: Texts, depth: int) -> tuple[object, int]:
    """One value and the position after it."""
    if depth > _DEEPEST:
        raise Malformed(f"nested more than {_DEEPEST} levels")
    at = skip_space(text, at)
    if quoted := texts(text, at):
        return quoted
    if text.startswith("{", at):
        return read_pairs(text, at + 1, texts, depth=depth + 1)
    if text.startswith("[", at):
        return _read_list(text, at + 1, texts, depth + 1)
    if number := _NUMBER.match(text, at):
        if len(number.group()) > _MOST_DIGITS:
            raise Malformed(f"a number of {len(number.group())} characters")
        whole = number["fraction"] is None and number["exponent"] is None
        try:
            return (int if whole else finite)(number.group()), number.end()
        except ValueError as error:
            raise Malformed(str(error)) from error
    for word, value in _WORDS.items():
        if text.startswith(word, at):
            return value, at + len(word)
    raise Malformed(f"no value: {shown(text[at:])}")


def _read_list(text: str, at: int, texts: Texts, depth: int) -> tuple[list[object], int]:
    """The items of a list after its opening bracket, and the position after the closing one."""
    items: list[object] = []
    while not text.startswith("]", at := skip_space(text, at)):
        item, at = _read_value(text, at, texts, depth)
        items.append(item)
        at = after_item(text, at, "]")
    return items, at + 1
