"""What every result has in common: an envelope, clean text, and a size an agent can afford.

Used by the server and by the command line, so it does not import the MCP SDK.
"""

import json
from collections.abc import Callable
from typing import Any

from engine.core.errors import UserError
from engine.core.reply import RESULT_CHARS, Reply
from engine.home.sanitize import clean_value

ERROR_CHARS = 1_000
# How much of the envelope an agent gets; longer parts are cut or left out.
SUMMARY_CHARS = 800
CALL_CHARS = 800
MAX_CALLS = 3
WARNING_CHARS = 400
MAX_WARNINGS = 12
MIN_CUT_TEXT = 80  # characters; a shorter text is never cut to make a result smaller
RESERVE_CHARS = 500  # of a result, for what is added to the data of a verb
HEAD = ("summary", "next", "warnings")


def clean(value: Any) -> Any:
    """`value` with its texts cleaned, NaN and infinity as null, and no nulls in its objects."""
    return _without_nulls(clean_value(value))


def _without_nulls(value: Any) -> Any:
    """`value` without the null entries of its objects, at any depth; lists keep theirs."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def compact(value: Any) -> str:
    """One line of JSON without spaces."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def envelope(data: Reply, summary: str) -> Reply:
    """Put `summary`, `next` and `warnings` first in a cleaned reply, whether it has them or not.

    `summary` is used where the reply has none. The three are cut to sizes that an agent can afford;
    a suggested call that is too long is left out.
    """
    body = clean(data)
    short_calls = [call for call in body.pop("next", []) if len(compact(call)) <= CALL_CHARS]
    head = {
        "summary": (str(body.pop("summary", "")) or summary)[:SUMMARY_CHARS],
        "next": short_calls[:MAX_CALLS],
        "warnings": [str(text)[:WARNING_CHARS] for text in body.pop("warnings", [])][:MAX_WARNINGS],
    }
    return head | body


def fit(read_page: Callable[[int], Reply], limit: int) -> Reply:
    """Return `read_page(limit)`; a page too large for a result is read again with half the limit.

    Reading again, instead of cutting the page, keeps its `next_cursor` right. A page of one item is
    returned whatever its size.
    """
    while True:
        data = read_page(limit)
        if limit <= 1 or len(compact(clean(data))) <= RESULT_CHARS - RESERVE_CHARS:
            return data
        limit //= 2


def cut_to_size(body: Reply, size: int = RESULT_CHARS) -> Reply:
    """Cut `body` to `size` characters of JSON, by halving its longest lists and texts in turn.

    The last resort, for results without a cursor. What was cut is said in `truncated` and
    `warnings`. Where that is not enough, only summary, next and warnings are left. `body` itself is
    not changed.
    """
    if len(compact(body)) <= size:
        return body
    body = json.loads(compact(body))  # a copy, of lists and objects only
    body["truncated"] = True
    note = f"cut to {size} characters; ask for less, or read the rest through a cursor"
    body["warnings"] = [*body.get("warnings", [])[:5], note]  # the note must not be cut
    while len(compact(body)) > size:
        if not _cut_largest(body):
            return {name: body[name] for name in (*HEAD, "truncated") if name in body}
    return body


def error_line(error: UserError) -> str:
    """Return the error as one line of JSON, at most `ERROR_CHARS` long.

    Where it is longer, parts are shortened in this order: the suggested call, which the hint
    repeats, then field, playbook, message and hint.
    """
    payload = clean(error.payload())
    excess = len(compact(payload)) - ERROR_CHARS
    # The hint repeats the suggested call in its text. Where room is short the hint loses it; a call
    # that is itself too long is dropped, and stays in the hint, which can be cut.
    if "call" in payload and excess > 0:
        payload["hint"] = error.advice.text
        if len(compact(payload["call"])) > ERROR_CHARS // 2:
            del payload["call"]
            payload["hint"] = str(error.advice)
    # The shortest useful length of each; a hint may be lost altogether.
    for name, shortest in (("field", 60), ("playbook", 40), ("message", 500), ("hint", 0)):
        excess = len(compact(payload)) - ERROR_CHARS
        text = payload.get(name, "")
        if excess > 0 and text:
            payload[name] = _cut_text(text, max(shortest, len(compact(text)) - excess))
    return compact(payload)


def _cut_text(text: str, limit: int) -> str:
    """`text` cut so that, written as JSON, it takes at most `limit` characters; "" where none fit.

    What is cut off is replaced by an ellipsis.
    """
    if len(compact(text)) <= limit:
        return text
    beginning = text[: max(limit, 0)]
    while beginning and len(compact(beginning)) + 1 > limit:
        beginning = beginning[:-1]
    return beginning + "…" if beginning else ""


def _cut_largest(body: Reply) -> bool:
    """Halve the largest list or text anywhere in `body`, in place; summary and the like are spared.

    Returns False when nothing is left to cut.
    """
    holder, key = _largest_part(body)
    if holder is None:
        return False
    value = holder[key]
    if isinstance(value, str):
        holder[key] = value[: len(value) // 2].rstrip("…") + "…"
    else:
        holder[key] = value[: len(value) // 2]
    return True


def _largest_part(body: Reply) -> tuple[Any, Any]:
    """The object or list in `body` that holds the largest list or text, and its key in there.

    Only lists of several items and texts above `MIN_CUT_TEXT` count; (None, None) without any.
    """
    largest: tuple[int, Any, Any] = (0, None, None)  # size, holder, key

    def visit(holder: Any, key: Any, value: Any) -> None:
        """Compare `value` (in `holder` under `key`) and all inside it with the largest."""
        nonlocal largest
        if isinstance(value, dict):
            for name, item in value.items():
                visit(value, name, item)
        elif isinstance(value, list):
            size = len(compact(value))
            # A list with one item is not halved to nothing; its item is cut instead.
            if len(value) > 1 and size > largest[0]:
                largest = (size, holder, key)
            for index, item in enumerate(value):
                visit(value, index, item)
        elif isinstance(value, str) and len(value) > MIN_CUT_TEXT and len(value) >= largest[0]:
            largest = (len(value), holder, key)

    for name, item in body.items():
        if name not in HEAD:
            visit(body, name, item)
    _, holder, key = largest
    return holder, key
