"""What every result has in common: an envelope, clean text, and a size an agent can afford.

Used by the server and by the command line, so it does not import the MCP SDK.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from engine.core.errors import UserError
from engine.core.reply import RESULT_CHARS, Reply
from engine.home.sanitize import clean_value

ERROR_CHARS = 1_000
# The most that an envelope (summary, next, warnings) holds; longer parts are cut or left out.
SUMMARY_CHARS = 800
CALL_CHARS = 800
MAX_CALLS = 3
WARNING_CHARS = 400
MAX_WARNINGS = 12
MIN_CUT_TEXT = 80  # characters; a shorter text is never cut to make a result smaller
RESERVE_CHARS = 500  # of a result, kept free for the envelope that is added to the data of a verb
HEAD_FIELDS = ("summary", "next", "warnings")


def clean(value: Any) -> Any:
    """Return a copy of `value` that may be shown: its texts are cleaned, and entries of objects
    that are null, NaN or infinity are left out.

    A list keeps such items as nulls, so that its items keep their places.
    """
    return _without_nulls(clean_value(value))


def _without_nulls(value: Any) -> Any:
    """Return `value` with the null entries of all objects in it left out; lists keep nulls."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def compact(value: Any) -> str:
    """`value` as one line of JSON without spaces. Raises ValueError for NaN or infinity."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def envelope(data: Reply, default_summary: str) -> Reply:
    """Return a cleaned copy of `data` that begins with `summary`, `next` and `warnings`.

    If `data` has no summary, `default_summary` is used; missing `next` (the suggested calls) and
    `warnings` become []. All three are cut to the sizes at the top of this file. A suggested call
    that is too long is left out, because a cut call could not be made.
    """
    body = clean(data)
    summary = str(body.pop("summary", "")) or default_summary
    short_calls = [call for call in body.pop("next", []) if len(compact(call)) <= CALL_CHARS]
    warnings = [_cut_at_a_word(str(text), WARNING_CHARS) for text in body.pop("warnings", [])]
    head = {
        "summary": _cut_at_a_word(summary, SUMMARY_CHARS),
        "next": short_calls[:MAX_CALLS],
        "warnings": warnings[:MAX_WARNINGS],
    }
    return head | body


def _cut_at_a_word(text: str, chars: int) -> str:
    """Return `text`, cut to at most `chars` characters with " ..." at the end if it is longer.

    The cut falls between two words, because half of a number would be read as another number. Only
    a text whose first word is too long is cut within that word.
    """
    if len(text) <= chars:
        return text
    mark = " ..."
    # One character more than is kept, so that a word that just fits ends before a space.
    whole_words = text[: chars - len(mark) + 1].rpartition(" ")[0]
    return (whole_words or text[: chars - len(mark)]) + mark


def fitting_page(read_page: Callable[[int], Reply], limit: int) -> Reply:
    """Return a page of at most `limit` items that fits into the size of a result (`RESULT_CHARS`
    characters of JSON, less `RESERVE_CHARS`).

    `read_page(n)` reads a page of n items. While the page is too large, `limit` is halved and the
    page is read again. It is not cut, because its `next_cursor` would then skip items. A page of
    one item is returned whatever its size.
    """
    while True:
        data = read_page(limit)
        if limit <= 1 or len(compact(clean(data))) <= RESULT_CHARS - RESERVE_CHARS:
            return data
        limit //= 2


def cut_to_size(body: Reply, size: int = RESULT_CHARS) -> Reply:
    """Return `body`, the whole reply, or a cut copy of it if it has more than `size` characters of
    JSON.

    The largest list or text in it is halved until the copy fits. The copy has the field `truncated`
    and a warning that says so. If halving cannot make it fit, the copy holds only `summary`,
    `next`, `warnings` and `truncated`, whatever their size.
    """
    if len(compact(body)) <= size:
        return body
    body = json.loads(compact(body))  # a deep copy, which may be cut in place
    body["truncated"] = True
    note = f"cut to {size} characters; ask for less, or read the rest through a cursor"
    # At most 5 of the warnings are kept, because `_cut_largest` does not shorten warnings.
    body["warnings"] = [*body.get("warnings", [])[:5], note]
    while len(compact(body)) > size:
        if not _cut_largest(body):
            return {name: body[name] for name in (*HEAD_FIELDS, "truncated") if name in body}
    return body


def error_line(error: UserError) -> str:
    """Return the error as one line of JSON of at most `ERROR_CHARS` characters.

    A line that is too long is shortened until it fits. The suggested call stands in both `call` and
    `hint`: first it is taken out of one of them. Then field, playbook, message and hint are cut, in
    this order.
    """
    payload = clean(error.payload())
    if "call" in payload and len(compact(payload)) > ERROR_CHARS:
        _leave_call_once(payload, error)
    # For each field the shortest length that is still useful; a hint may be lost altogether.
    min_chars_by_field = {"field": 60, "playbook": 40, "message": 500, "hint": 0}
    for name, min_chars in min_chars_by_field.items():
        excess = len(compact(payload)) - ERROR_CHARS
        text = payload.get(name, "")
        if excess > 0 and text:
            chars_left = max(min_chars, len(compact(text)) - excess)
            payload[name] = _cut_text(text, chars_left)
    return compact(payload)


def _leave_call_once(payload: Reply, error: UserError) -> None:
    """Shorten the payload of an error, in place: remove the suggested call, which stands in both
    `call` and the text `hint`, from one of them.

    The call is removed from `hint`, unless it is longer than half of `ERROR_CHARS`: then it is
    removed from `call`, because `hint` can be cut and `call` cannot.
    """
    if len(compact(payload["call"])) > ERROR_CHARS // 2:
        del payload["call"]
        payload["hint"] = str(error.advice)  # the sentence and the call
    else:
        payload["hint"] = error.advice.text  # the sentence alone


def _cut_text(text: str, limit: int) -> str:
    """Cut `text` so that it takes at most `limit` characters as JSON, quotes included.

    An ellipsis stands for what was cut off. The result is "" if no character fits.
    """
    if len(compact(text)) <= limit:
        return text
    beginning = text[: max(limit, 0)]
    # One character may take several as JSON, e.g. a line break. So characters are taken away until
    # the text fits together with the ellipsis, which takes 1.
    while beginning and len(compact(beginning)) + 1 > limit:
        beginning = beginning[:-1]
    return beginning + "…" if beginning else ""


def _cut_largest(body: Reply) -> bool:
    """Halve the largest list or text anywhere in `body`, in place, except in `HEAD_FIELDS`.

    Returns False if nothing is left to cut.
    """
    holder, key = _largest_part(body)
    if holder is None:
        return False
    value = holder[key]
    first_half = value[: len(value) // 2]
    if isinstance(value, str):
        first_half = first_half.rstrip("…") + "…"  # rstrip: the ellipsis of an earlier cut
    holder[key] = first_half
    return True


def _largest_part(body: Reply) -> tuple[Any, Any]:
    """Find the largest list or text in `body` that may be cut, outside `HEAD_FIELDS`.

    Only lists of several items count, and texts longer than `MIN_CUT_TEXT`.

    Returns:
        (holder, key), with the list or text at `holder[key]`; the holder is an object or a list.
        (None, None) if there is nothing to cut.
    """
    parts: list[tuple[Any, Any]] = []
    for name, value in body.items():
        if name not in HEAD_FIELDS:
            parts += [(body, name), *_parts_below(value)]
    largest_size = 0  # characters
    largest: tuple[Any, Any] = (None, None)
    for holder, key in parts:
        value = holder[key]
        size = _size_if_cuttable(value)
        # If a list and a text have the same size, the text is cut.
        is_largest = size > largest_size or (isinstance(value, str) and size == largest_size)
        if size > 0 and is_largest:  # size 0: this part may not be cut
            largest_size = size
            largest = (holder, key)
    return largest


def _size_if_cuttable(value: Any) -> int:
    """Return the number of characters that a list (as JSON) or a text takes; 0 if `value` may not
    be cut or is neither."""
    # A list with one item is not halved to nothing; its item is cut instead.
    if isinstance(value, list) and len(value) > 1:
        return len(compact(value))
    if isinstance(value, str) and len(value) > MIN_CUT_TEXT:
        return len(value)
    return 0


def _parts_below(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the places of all values inside an object or a list, at any depth, in their order.

    A place is the pair (container, key): the value stands at `container[key]`. A `value` that is
    neither an object nor a list yields nothing.
    """
    keys: Iterable[Any] = ()
    if isinstance(value, dict):
        keys = value
    elif isinstance(value, list):
        keys = range(len(value))
    for key in keys:
        yield value, key
        yield from _parts_below(value[key])


def with_head(reply: Reply, summary: str, *next_calls: Reply) -> Reply:
    """Return `reply` with the fields `summary`, `next` and `warnings` first. If `reply` lacks one
    of them, the argument `summary`, the `next_calls` or [] takes its place."""
    head = {
        "summary": reply.get("summary") or summary,
        # An empty `next` stays empty: the engine had nothing to suggest.
        "next": reply["next"] if reply.get("next") is not None else list(next_calls),
        "warnings": reply.get("warnings") or [],
    }
    return head | {name: value for name, value in reply.items() if name not in head}
