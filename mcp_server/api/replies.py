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
HEAD = ("summary", "next", "warnings")


def clean(value: Any) -> Any:
    """`value` as JSON can carry it: text cleaned, nulls left out of objects, NaN as null."""
    return _without_nulls(clean_value(value))


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def compact(value: Any) -> str:
    """One line of JSON without spaces."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def envelope(data: Reply, summary: str) -> Reply:
    """`data`, cleaned, with `summary`, `next` and `warnings` first and present."""
    body = clean(data)
    head = {
        "summary": (str(body.pop("summary", "")) or summary)[:800],
        "next": [call for call in body.pop("next", []) if len(compact(call)) <= 800][:3],
        "warnings": [str(text)[:400] for text in body.pop("warnings", [])][:12],
    }
    return head | body


def fit(call: Callable[[int], Reply], limit: int) -> Reply:
    """`call(limit)`, asked again with half the limit until its answer fits into a result.

    Asking again instead of cutting keeps the answer's `next_cursor` true.
    """
    while True:
        data = call(limit)
        if limit <= 1 or len(compact(clean(data))) <= RESULT_CHARS - 500:
            return data
        limit //= 2


def cap(body: Reply, size: int = RESULT_CHARS) -> Reply:
    """`body` cut to `size` characters: its longest lists and texts lose their ends.

    The last resort, for results without a cursor; what was cut is said in `warnings`.
    """
    if len(compact(body)) <= size:
        return body
    body = json.loads(compact(body))
    body["truncated"] = True
    note = f"cut to {size} characters; ask for less, or read the rest through a cursor"
    body["warnings"] = [*body.get("warnings", [])[:5], note]
    while len(compact(body)) > size:
        if not _cut_largest(body):
            return {name: body[name] for name in (*HEAD, "truncated") if name in body}
    return body


def error_line(error: UserError) -> str:
    """The error as one line of JSON, at most `ERROR_CHARS` long."""
    payload = clean(error.payload())
    over = len(compact(payload)) - ERROR_CHARS
    if "call" in payload and over > 0:  # it stands there twice
        payload["hint"] = error.advice.text
        if len(compact(payload["call"])) > ERROR_CHARS // 2:
            del payload["call"]
            payload["hint"] = str(error.advice)
    for name, least in (("field", 60), ("playbook", 40), ("message", 500), ("hint", 0)):
        over = len(compact(payload)) - ERROR_CHARS
        text = payload.get(name, "")
        if over > 0 and text:
            payload[name] = _cut_text(text, max(least, len(compact(text)) - over))
    return compact(payload)


def _cut_text(text: str, room: int) -> str:
    """`text` cut so that, written as JSON, it takes at most `room` characters."""
    if len(compact(text)) <= room:
        return text
    start = text[: max(room, 0)]
    while start and len(compact(start)) + 1 > room:
        start = start[:-1]
    return start + "…" if start else ""


def _cut_largest(body: Reply) -> bool:
    """Halve the largest list or text anywhere in `body`; False when nothing is left to cut."""
    best: tuple[int, Any, Any] = (0, None, None)

    def visit(holder: Any, key: Any, value: Any) -> None:
        nonlocal best
        if isinstance(value, dict):
            for name, item in value.items():
                visit(value, name, item)
        elif isinstance(value, list):
            size = len(compact(value))
            # A list of one row is cut inside the row, not away.
            if len(value) > 1 and size > best[0]:
                best = (size, holder, key)
            for index, item in enumerate(value):
                visit(value, index, item)
        elif isinstance(value, str) and len(value) > 80 and len(value) >= best[0]:
            best = (len(value), holder, key)

    for name, item in body.items():
        if name not in HEAD:
            visit(body, name, item)
    _, holder, key = best
    if holder is None:
        return False
    value = holder[key]
    if isinstance(value, str):
        holder[key] = value[: len(value) // 2].rstrip("…") + "…"
    else:
        holder[key] = value[: len(value) // 2]
    return True
