"""Replies painted for people: tables, blocks of text, sparklines."""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, TypeGuard, cast

from rich.console import Console, Group, RenderableType
from rich.markdown import Markdown
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from engine.core.format import counted, size, words
from engine.core.hints import Call, Hint
from engine.core.reply import Reply
from mcp_server.api.replies import HEAD, compact
from mcp_server.screen.shell import as_command, as_typed

PIPED = 200  # columns of what nobody looks at
LONG = 60  # characters from which a text is a block of its own and not a cell
SPARKS = "▁▂▃▄▅▆▇█"
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
BYTES = ("peak_memory", "bytes", "disk_bytes", "memory_bytes")
TIMES = ("created", "pushed", "started", "ended", "time")
PAPERWORK = ("estimate", "result", "metrics_uri", "cursor", "reached", "kind", "queue_position")
FOREMOST = ("step", "model", "loss", "reward_mean", "heldout_success", "length_mean", "lr")
LEVELS = ("low", "likely", "high")
_NAMES = 13  # characters of most checks' names
MARKS = {"pass": "✓", "warn": "!", "fail": "✗", "skip": "-"}


class _Trimmed:
    """A stream without spaces at the ends of lines, with which tables fill theirs."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write("\n".join(line.rstrip(" ") for line in text.split("\n")))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def console(stderr: bool = False) -> Console:
    """A console as wide as the terminal; into a file or a pipe as wide as COLUMNS says, else wide
    enough that no table is cut, and without spaces at the ends of lines."""
    stream = sys.stderr if stderr else sys.stdout
    if stream.isatty():
        return Console(stderr=stderr, highlight=False, soft_wrap=False)
    told = os.environ.get("COLUMNS", "")
    width = int(told) if told.isdigit() and int(told) > 0 else PIPED
    return Console(file=cast(IO[str], _Trimmed(stream)), width=width, highlight=False)


def reply(data: Any) -> None:
    """Any reply of a verb: what it holds, its warnings, what to do next."""
    out = console()
    if isinstance(data, str):
        if out.is_terminal:
            out.print(Markdown(data))
        else:
            out.file.write(data.rstrip("\n") + "\n")
        return
    out.print(Text(str(data.get("summary", "")), style="bold"))
    body = {name: value for name, value in data.items() if name not in HEAD}
    if isinstance(body.get("columns"), list) and isinstance(body.get("rows"), list):
        out.print(grid(body.pop("columns"), body.pop("rows")))
    for name, value in body.items():
        if value not in ("", [], {}):
            out.print(field(name, value))
    _tail(out, data)


def _tail(out: Console, data: Mapping[str, Any]) -> None:
    for warning in data.get("warnings", []):
        out.print(Text(f"! {warning}", style="yellow"))
    for suggested in data.get("next", []):
        if call := Call.from_json(suggested):
            first = f"{suggested['first']}, then " if suggested.get("first") else ""
            out.print(Text(f"next: {first}{as_command(call)}", style="dim"))


def run(data: Any) -> None:
    """A run for a person: what it is and how it stands, without the fields in `PAPERWORK`."""
    reply(_heldout_told({name: value for name, value in data.items() if name not in PAPERWORK}))


def _heldout_told(data: Reply) -> Reply:
    """`data` with the sentence about its held-out tasks in place of the object that holds it."""
    tasks = data.get("heldout")
    return data | {"heldout": tasks["about"]} if isinstance(tasks, Mapping) else data


def all_logs(data: Any) -> None:
    """A page of a run's logs with every column it has, in as many tables as they need."""
    logs(data, whole=True)


def logs(data: Any, whole: bool = False) -> None:
    """A page of a run's logs: lines as they are, events one a line, curves as a table of the
    columns that fit."""
    out = console()
    page = _heldout_told(
        {name: value for name, value in data.items() if name not in ("lines", "events")}
    )
    for line in data.get("lines", []):
        sys.stdout.write(f"{line}\n")  # as it was written, spaces at its end included
    for event in data.get("events", []):
        out.print(event_line(event), soft_wrap=True)
    columns, rows = _foremost_first(page.get("columns") or [], page.get("rows") or [])
    if "summary" not in page:  # a page of a run that is followed: its lines are all it says
        for row in rows:
            out.print(_step_line(columns, row), soft_wrap=True)
        return
    shown = {
        name: page[name]
        for name in ("error", "heldout", "next_cursor", "older_cursor")
        if name in page
    }
    if not rows:
        reply({name: page[name] for name in HEAD if name in page} | shown)
        return
    out.print(Text(str(page["summary"]), style="bold"))
    for table in _fitting(columns, rows, out.width, whole):
        out.print(table)
    left = [] if whole else columns[len(_that_fit(columns, rows, out.width)[0]) :]
    if left:
        out.print(Text(f"--all shows also {', '.join(map(str, left))}", style="dim"))
    for name, value in shown.items():
        if value:
            out.print(field(name, value))
    _tail(out, page)


def _foremost_first(
    columns: Sequence[Any], rows: Sequence[Sequence[Any]]
) -> tuple[list[Any], list[list[Any]]]:
    """The columns in `FOREMOST` moved to the front, so that a narrow terminal still shows them."""
    order = [index for name in FOREMOST for index, other in enumerate(columns) if other == name]
    order += [index for index in range(len(columns)) if index not in order]
    return [columns[index] for index in order], [[row[index] for index in order] for row in rows]


def _step_line(columns: Sequence[Any], row: Sequence[Any]) -> Text:
    """One line of metrics: `step 3  loss 1.2  lr 0.001`, without values that are missing."""
    pairs = [(str(name), value) for name, value in zip(columns, row, strict=False)]
    parts = [Text(f"{name} ") + scalar(name, value) for name, value in pairs if value is not None]
    return Text("  ").join(parts)


def _fitting(
    columns: Sequence[Any], rows: Sequence[Sequence[Any]], width: int, whole: bool
) -> list[Table]:
    """The columns that fit side by side, as one table; all of them (`whole`) as several, each
    with the step."""
    tables = []
    while True:
        here, cells = _that_fit(columns, rows, width)
        tables.append(grid(here, cells))
        if not whole or len(here) == len(columns):
            return tables
        rest = [0, *range(len(here), len(columns))]
        columns = [columns[index] for index in rest]
        rows = [[row[index] for index in rest] for row in rows]


def _that_fit(
    columns: Sequence[Any], rows: Sequence[Sequence[Any]], width: int
) -> tuple[list[Any], list[list[Any]]]:
    """The first columns, at least two, that are no wider than `width` together."""
    room, fit = width, 0
    for index, name in enumerate(columns):
        cells = [len(scalar(str(name), row[index])) for row in rows if len(row) > index]
        room -= max(len(str(name)), *cells, 0) + (2 if index else 0)
        if room < 0 and index > 1:
            break
        fit = index + 1
    return list(columns[:fit]), [list(row[:fit]) for row in rows]


def event_line(event: Mapping[str, Any]) -> Text:
    """One event of a run on a line."""
    seconds = event.get("time")
    stamp = (
        time.strftime("%H:%M:%S ", time.localtime(seconds))
        if isinstance(seconds, int | float)
        else ""
    )
    rest = {k: v for k, v in event.items() if k not in ("time", "event", "message")}
    line = Text(stamp, style="dim") + Text(f"{event.get('event', ''):<16} ", style="")
    line.append(str(event.get("message", "")), style="")
    return line + Text("  ") + scalar("", {k: v for k, v in rest.items() if is_scalar(v)})


def plan(data: Any) -> None:
    """A dry run: its verdict, what does not pass, the settings that were given."""
    out = console()
    out.print(Text(str(data.get("summary", "")), style="bold"))
    items = data.get("checks", [])
    failing = [item for item in items if item["status"] in ("fail", "warn")]
    if failing:
        out.print(checks(sorted(failing, key=lambda item: item["status"] != "fail")))
    for status, word in (("pass", "passed"), ("skip", "skipped")):
        names = ", ".join(str(item["name"]) for item in items if item["status"] == status)
        if names:
            out.print(Text(f"{MARKS[status]} {word}: {names}", style="dim"))
    settings, sources = data.get("settings", {}), data.get("sources", {})
    given = {name: value for name, value in settings.items() if sources.get(name) == "user"}
    if given:
        shown = ", ".join(f"{name} = {compact(value)}" for name, value in given.items())
        out.print(Text(f"settings given: {shown}"))
    if settings:
        rest = f"{len(settings) - len(given)} settings as chosen, the audit and more: --all"
        out.print(Text(rest, style="dim"))
    if data.get("probe"):
        out.print(field("probe", data["probe"]))
    about = [f"{item['name']}: {item.get('detail', '')}" for item in failing]
    others = [warning for warning in data.get("warnings", []) if warning not in about]
    _tail(out, {"warnings": others, "next": data.get("next", [])})


def whole_plan(data: Any) -> None:
    """A dry run in full: every check, every setting with its source, the audit."""
    out = console()
    out.print(Text(str(data.get("summary", "")), style="bold"))
    out.print(checks(data.get("checks", [])))
    sources = data.get("sources", {})
    settings = data.get("settings", {})
    rows = [[name, compact(value), sources.get(name, "")] for name, value in settings.items()]
    if rows:
        out.print(Text("\nsettings:", style="dim"))
        out.print(grid(["name", "value", "from"], rows))
    probes = (data.get("audit") or {}).get("probes")
    if probes:
        out.print(Text("\nreward audit:", style="dim"))
        out.print(rows_of(probes))
    if data.get("row"):
        out.print(Text("\none row as it is trained:", style="dim"))
        out.print(trained_row(data["row"]))
    if data.get("probe"):
        out.print(field("probe", data["probe"]))
    out.print()
    _tail(out, data)


def cost(data: Any) -> None:
    """An estimate: times, memory and disk in units people read."""
    out = console()
    out.print(Text(str(data.get("summary", "")), style="bold"))
    rows = [["time", *(words(data["hours"][level]) for level in LEVELS)]]
    if data.get("device") != "cpu":
        rows.append(["GPU-hours", *(f"{data['gpu_hours'][level]:.3g}" for level in LEVELS)])
    if data.get("gpu_hour_price"):
        rows.append(["money", *(f"{data['money'][level]:.2f}" for level in LEVELS)])
    out.print(grid(["", *LEVELS], rows))
    memory = data["peak_memory"]
    parts = ", ".join(f"{name} {size(held)}" for name, held in memory.items() if name != "total")
    of = f"{size(memory['total'])} of {size(data['memory_available'])} on {data['device']}"
    spent = data.get("seconds", {})
    fields = {
        "memory": f"{of}: {parts}",
        "disk": size(data["disk_bytes"]),
        "seconds": {name: value for name, value in spent.items() if value},
        "tokens": data.get("tokens", {}),
        "basis": f"{data['basis']}, {counted(data.get('calibrated_on_runs', 0), 'finished run')}",
        "lower": data.get("lower_this", "") if data.get("fit") != "fits" else "",
    }
    for name, value in fields.items():
        if value not in ("", {}):
            out.print(field(name, value))
    _tail(out, data)


def check(item: Mapping[str, Any]) -> None:
    """One check of `doctor` on a line, printed as soon as it is done."""
    console().print(checks([item], _NAMES))


def diagnosis(data: Any) -> None:
    """Findings one below the other: the cause, its numbers, the lever, examples."""
    out = console()
    for place, finding in enumerate(data.get("findings", []), 1):
        out.print(Text(f"{place}. {finding['id']}", style="bold yellow"))
        out.print(Padding(Text(finding["what"]), (0, 0, 0, 3)))
        shown = {name: finding[name] for name in ("evidence", "lever", "examples", "playbook")}
        out.print(Padding(block(shown), (0, 0, 1, 3), expand=False))
    reply({name: data[name] for name in (*HEAD, "looked_at", "not_judged") if name in data})


def custody(data: Any) -> None:
    """A verified run: its links in order, under each the files that have changed."""
    out = console()
    for link in data.get("links", []):
        status = "pass" if link["ok"] else "fail"
        out.print(Text(f"{MARKS[status]} {link['name']}", style=STATES[status]))
        for item in link["broken"]:
            out.print(Text(f"    {item['file']} {item['what']}", style="red"))
    for other in data.get("ancestors", []):
        status = "pass" if other["intact"] else "warn" if other["intact"] is None else "fail"
        out.print(Text(f"{MARKS[status]} from {other['run_id']}", style=STATES[status]))
    out.print()
    reply({name: data.get(name, []) for name in HEAD})


def trained_row(row: Mapping[str, Any]) -> Text:
    """A row's text, its trained part in bold, what is cut away struck out."""
    text = Text()
    for piece in row["pieces"]:
        text.append(piece["text"], style="bold green" if piece["trained"] else "dim")
    if row.get("lost"):
        text.append(row["lost"]["text"], style="red strike")
    cut = f", cut at {row['cut_at']}" if row.get("lost") else ""
    return text + Text(f"\n{row['trained']} of {row['tokens']} tokens carry loss{cut}", style="dim")


def field(name: str, value: Any) -> RenderableType:
    """One field of a reply: on its line where it fits, else below its name."""
    label = Text(f"{name}: ", style="dim")
    if is_scalar(value) and len(str(value)) <= LONG * 2:
        return label + scalar(name, value)
    if is_flat(value) and len(line := scalar(name, value)) <= LONG * 2:
        return label + line
    if isinstance(value, list) and all(is_scalar(item) for item in value):
        line = Text(", ").join(scalar("", item) for item in value)
        if len(line) <= LONG * 2:
            return label + line
    return Group(label, Padding(block(value), (0, 0, 0, 2), expand=False))


def block(value: Any) -> RenderableType:
    """A value that needs lines of its own."""
    if isinstance(value, Mapping):
        if isinstance(value.get("columns"), list) and isinstance(value.get("rows"), list):
            return grid(value["columns"], value["rows"])
        shown = {name: item for name, item in typed(value).items() if item not in ("", [], {})}
        return Group(*(field(str(name), item) for name, item in shown.items()))
    if isinstance(value, list):
        if value and all(isinstance(item, Mapping) for item in value):
            return rows_of(value)
        if all(is_scalar(item) for item in value):
            line = Text(", ").join(scalar("", item) for item in value)
            apart = Group(*(scalar("", item) for item in value))
            return line if len(line) <= LONG * 2 else apart
        return Group(*(block(item) for item in value))
    return Text(str(value))


def typed(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """An object with a hint: its call becomes the command a person types."""
    if not isinstance(value.get("hint"), str) or "call" not in value:
        return value
    hint = as_typed(Hint.from_fields(value["hint"], value["call"]))
    return {name: v for name, v in value.items() if name != "call"} | {"hint": hint}


def rows_of(items: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Objects as a table, or one below the other when their texts are long."""
    if all({"name", "status"} <= set(item) for item in items):
        return checks(items)
    cells = [value for item in items for value in item.values()]
    if any(len(scalar("", value)) > LONG for value in cells):
        return Group(*(Group(block(item), Text("")) for item in items))
    names = list(dict.fromkeys(name for item in items for name in item))
    columns = [name for name in names if any(item.get(name) not in (None, "") for item in items)]
    return grid(columns, [[item.get(name) for name in columns] for item in items])


def checks(items: Sequence[Mapping[str, Any]], name_width: int = 0) -> RenderableType:
    """Checks with their marks, and under each that asks for it what to do."""
    table = Table.grid(padding=(0, 1))
    table.add_column()
    table.add_column(no_wrap=True, min_width=name_width)
    table.add_column(overflow="fold")
    for item in items:
        status = str(item["status"])
        detail = Text(str(item.get("detail", "")))
        if item.get("fix"):
            fix = Hint.from_fields(str(item["fix"]), item.get("call"))
            detail.append(f"\n-> {as_typed(fix)}", style="dim")
        mark = Text(MARKS.get(status, "·"), style=STATES.get(status, "dim"))
        table.add_row(mark, Text(str(item["name"])), detail)
    return table


def grid(columns: Sequence[Any], rows: Sequence[Sequence[Any]]) -> Table:
    """A plain table."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for index, name in enumerate(columns):
        numbers = all(isinstance(row[index], int | float) for row in rows if len(row) > index)
        side = "right" if numbers and rows else "left"
        table.add_column(str(name), justify=side, overflow="fold")
    for row in rows:
        pairs = zip(columns, row, strict=False)
        table.add_row(*(scalar(str(name), value) for name, value in pairs))
    return table


def scalar(name: str, value: Any) -> Text:
    """One value, coloured when it is a state or a verdict."""
    if value is None:
        return Text("")
    if isinstance(value, int | float) and name in TIMES and value > 1e9:
        return Text(time.strftime("%Y-%m-%d %H:%M", time.localtime(value)))
    if isinstance(value, int | float) and name in BYTES:
        return Text(size(value))
    if isinstance(value, float):
        return Text(f"{value:.4g}" if abs(value) < 1e9 else f"{value:.0f}")
    if is_flat(value):
        pairs = [(str(key), item) for key, item in value.items() if item != ""]
        return Text(", ").join(Text(f"{key} ") + scalar(key, item) for key, item in pairs)
    if not is_scalar(value):
        return Text(compact(value))
    style = VERDICTS.get(str(value), "") if name == "verdict" else STATES.get(str(value), "")
    return Text(str(value), style=style)


def is_flat(value: Any) -> TypeGuard[Mapping[str, Any]]:
    """Whether it is an object of scalars alone."""
    return isinstance(value, Mapping) and all(is_scalar(item) for item in value.values())


def is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | bool)


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """The last `width` values as a row of bars."""
    shown = [value for value in values if value == value][-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    span = (high - low) or 1.0
    top = len(SPARKS) - 1
    return "".join(SPARKS[round((value - low) / span * top)] for value in shown)


def duration(seconds: float | None) -> str:
    """`95` as "1m35s"."""
    if seconds is None:
        return "?"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
