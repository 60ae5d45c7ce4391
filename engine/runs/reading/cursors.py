"""Cursors of `read_logs`. A cursor holds the view, the attempt (console only), a byte offset and
the direction.

Examples: `metrics:4096`, `events:4096:older`, `console:2:4096`. A byte offset stays valid when the
server restarts.
"""

from dataclasses import dataclass

from engine.core.errors import UserError

_OLDER = "older"
_MOST_DIGITS = 15  # of an attempt or an offset; no file has an offset with more


@dataclass(frozen=True)
class Cursor:
    """The place where a page begins.

    Attributes:
        attempt: the attempt whose console is read; 0 in other views.
        offset: byte in the file, at the start of a line; None stands for the end of the file.
        older: whether the page has the lines before the offset instead of those after it.
    """

    attempt: int
    offset: int | None
    older: bool


def parse_cursor(text: str, view: str) -> Cursor:
    """Parse `text`, a cursor from a page of `view` ("metrics", "events" or "console"). It is the
    view, for the console the attempt, and the offset in bytes, such as "events:512" or
    "console:2:4096". A cursor for going backwards ends with ":older".

    Raises UserError BAD_CURSOR if `text` is a cursor of another view or no cursor at all.
    """
    view_of_cursor, *numbers = text.split(":")
    older = bool(numbers) and numbers[-1] == _OLDER
    if older:
        numbers.pop()
    has_attempt = view == "console"  # each attempt has its own console file
    number_count = 2 if has_attempt else 1
    well_formed = view_of_cursor == view and len(numbers) == number_count
    if not well_formed or not all(_is_number(number) for number in numbers):
        raise UserError(
            "BAD_CURSOR",
            f"cursor {text[:60]!r} was not made by view={view}",
            hint="Pass next_cursor or older_cursor of the last page unchanged, or leave it out.",
            field="cursor",
        )
    attempt = int(numbers[0]) if has_attempt else 0
    return Cursor(attempt, offset=int(numbers[-1]), older=older)


def _is_number(text: str) -> bool:
    """Whether the text is a number from 0, in ASCII digits, of at most `_MOST_DIGITS` digits."""
    return text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS
