"""Values in replies as text, tables and blocks of lines."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from engine.core.format import significant, size
from engine.core.hints import Hint
from mcp_server.api.replies import compact
from mcp_server.screen.shell import as_typed

LONG_CELL = 60  # characters; a longer text is not put into a table
LONG_LINE = 120  # characters; a longer value stands below its name, not beside it
VERDICTS = {
    "better": "bold green",
    "worse": "bold red",
    "no_difference": "yellow",
    "inconclusive": "yellow",
    "unknown": "dim",
}
STATES = {
    "done": "green",
    "running": "cyan",
    "preparing": "cyan",
    "stopping": "yellow",
    "queued": "blue",
    "interrupted": "yellow",
    "failed": "red",
    "cancelled": "dim",
    "pass": "green",
    "warn": "yellow",
    "fail": "red",
}
# Fields that hold bytes, and fields that hold unix seconds.
BYTES = ("peak_memory", "bytes", "disk_bytes", "memory_bytes")
TIMES = ("created", "pushed", "started", "ended", "time")
LEAST_TIME = 1e9  # unix seconds, in 2001; a smaller number in a field of that name is a duration
MARKS = {"pass": "✓", "warn": "!", "fail": "✗", "skip": "-"}


def field(name: str, value: Any) -> RenderableType:
    """Render one field of a reply: the value beside the name if both fit into a line, otherwise
    below the name."""
    label = Text(f"{name}: ", style="dim")
    if is_scalar(value) and len(str(value)) <= LONG_LINE:
        return label + scalar(name, value)
    line = _one_line(name, value)
    if line is not None and len(line) <= LONG_LINE:
        return label + line
    indented = Padding(block(value), (0, 0, 0, 2), expand=False)  # top, right, bottom, left
    return Group(label, indented)


def _one_line(name: str, value: Any) -> Text | None:
    """Return a flat object or a list of plain values as one line, however long it gets; None for
    any other value. `name` is the field of a reply that holds the value.
    """
    if is_flat(value):
        return scalar(name, value)
    if isinstance(value, list) and all(is_scalar(item) for item in value):
        return Text(", ").join(scalar(name="", value=item) for item in value)
    return None


def block(value: Any) -> RenderableType:
    """Render a value that takes one line or more of its own, by its kind:

    - an object with `columns` and `rows`, or a list of objects: a table.
    - any other object: its fields one below the other, without empty ones.
    - a list of plain values: on one line if it fits, otherwise one below the other.
    - any other list: its items one below the other.
    """
    if isinstance(value, Mapping):
        return _object_block(value)
    if isinstance(value, list):
        return _list_block(value)
    return Text(str(value))


def _object_block(value: Mapping[str, Any]) -> RenderableType:
    """Render an object as a table if it has `columns` and `rows`; otherwise its fields that have a
    value, one below the other. A suggested call is shown as the shell command to type."""
    if is_table(value):
        return grid(value["columns"], value["rows"])
    items = with_typed_hint(value).items()
    filled_fields = {name: item for name, item in items if item not in ("", [], {})}
    return Group(*(field(str(name), item) for name, item in filled_fields.items()))


def _list_block(items: Sequence[Any]) -> RenderableType:
    """Render a list: objects as a table; plain values on one line if they fit; the items of any
    other list one below the other."""
    if items and all(isinstance(item, Mapping) for item in items):
        return object_table(items)
    if all(is_scalar(item) for item in items):
        texts = [scalar(name="", value=item) for item in items]
        line = Text(", ").join(texts)
        return line if len(line) <= LONG_LINE else Group(*texts)
    return Group(*(block(item) for item in items))


def with_typed_hint(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Put the suggested `call` of an object into its `hint`, as the shell command to type.

    Returns a copy without `call`. An object without a hint or a call is returned unchanged.
    """
    if not isinstance(value.get("hint"), str) or "call" not in value:
        return value
    hint = as_typed(Hint.from_fields(value["hint"], value["call"]))
    without_call = {name: item for name, item in value.items() if name != "call"}
    return without_call | {"hint": hint}


def object_table(items: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Render objects as a table with their fields as columns; a column without a value is left out.

    There are two exceptions. If all objects have `name` and `status`, they are checks, and `checks`
    renders them. If an object holds a text too long for a cell, the objects are shown one below the
    other.
    """
    if all({"name", "status"} <= set(item) for item in items):
        return checks(items)
    cells = [value for item in items for value in item.values()]
    if any(len(scalar(name="", value=value)) > LONG_CELL for value in cells):
        empty_line = Text("")
        return Group(*(Group(block(item), empty_line) for item in items))
    columns = _filled_names(items)
    return grid(columns, [[item.get(name) for name in columns] for item in items])


def _filled_names(items: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the fields that have a value in any of these objects, in the order in
    which they first appear."""
    names = dict.fromkeys(name for item in items for name in item)  # each once, in order
    return [name for name in names if any(item.get(name) not in (None, "") for item in items)]


def checks(items: Sequence[Mapping[str, Any]], name_width: int = 0) -> RenderableType:
    """Render checks as a table with mark, name and detail. How to fix a check stands below its
    detail, if the check says it.

    `name_width` is the least width of the column of names, in characters.
    """
    table = Table.grid(padding=(0, 1))
    table.add_column()
    table.add_column(no_wrap=True, min_width=name_width)
    table.add_column(overflow="fold")
    for item in items:
        status = str(item["status"])
        mark = Text(MARKS.get(status, "·"), style=STATES.get(status, "dim"))
        table.add_row(mark, Text(str(item["name"])), _check_detail(item))
    return table


def _check_detail(item: Mapping[str, Any]) -> Text:
    """Return the detail of a check, and on a second line how to fix it, if the check says that."""
    detail = Text(str(item.get("detail", "")))
    if item.get("fix"):
        fix = Hint.from_fields(str(item["fix"]), item.get("call"))
        detail.append(f"\n-> {as_typed(fix)}", style="dim")
    return detail


def grid(columns: Sequence[Any], rows: Sequence[Sequence[Any]]) -> Table:
    """Render a plain table; columns that hold only numbers are aligned to the right."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for index, name in enumerate(columns):
        # A row may lack its last cells.
        only_numbers = all(isinstance(row[index], int | float) for row in rows if len(row) > index)
        # `rows` is tested too, because all() is True if there is no row.
        alignment = "right" if only_numbers and rows else "left"
        table.add_column(str(name), justify=alignment, overflow="fold")
    for row in rows:
        cells = [scalar(str(name), value) for name, value in zip(columns, row, strict=False)]
        table.add_row(*cells)
    return table


def scalar(name: str, value: Any) -> Text:
    """Return a value as one line of text.

    `name` is the field that holds the value, or "". By that name a time, a size in bytes and a
    verdict are recognised. A flat object becomes `name value` pairs with commas; a list or a nested
    object becomes JSON.
    """
    if value is None:
        return Text("")
    if isinstance(value, int | float):
        quantity = _quantity(name, value)
        if quantity:
            return Text(quantity)
    if is_flat(value):
        return _pairs(value)
    if not is_scalar(value):
        return Text(compact(value))
    styles = VERDICTS if name == "verdict" else STATES
    return Text(str(value), style=styles.get(str(value), ""))


def _quantity(name: str, value: float) -> str:
    """Return the value of the field `name` as people read it; "" if it is to be shown unchanged.

    - a time in unix seconds (`TIMES`): the local date, "2024-05-01 12:30"; a number up to
      `LEAST_TIME` is a duration, and is treated like any other number
    - bytes (`BYTES`): with a unit, "1.2 MB"
    - another float: rounded to four digits, but to a whole number if it is 1e9 or more
    - another int: ""
    """
    if name in TIMES and value > LEAST_TIME:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(value))
    if name in BYTES:
        return size(value)
    if isinstance(value, float):
        is_small = abs(value) < 1e9  # unix seconds of a field with another name are not
        return significant(value, digits=4) if is_small else f"{value:.0f}"
    return ""


def _pairs(value: Mapping[str, Any]) -> Text:
    """Return the fields of a flat object as `name value` pairs with commas; empty texts are left
    out."""
    filled_fields = {str(key): item for key, item in value.items() if item != ""}
    texts = [Text(f"{key} ") + scalar(key, item) for key, item in filled_fields.items()]
    return Text(", ").join(texts)


def is_flat(value: Any) -> TypeGuard[Mapping[str, Any]]:
    """Whether `value` is an object whose values are all plain (see `is_scalar`)."""
    return isinstance(value, Mapping) and all(is_scalar(item) for item in value.values())


def is_scalar(value: Any) -> bool:
    """Whether `value` is plain: null, a text, a number or a boolean."""
    return value is None or isinstance(value, str | int | float | bool)


def is_table(value: Mapping[str, Any]) -> bool:
    """Whether an object holds a table: the two lists `columns` and `rows`."""
    return isinstance(value.get("columns"), list) and isinstance(value.get("rows"), list)
