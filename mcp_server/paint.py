"""Replies painted for people: tables, blocks of text, sparklines."""

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from rich.console import Console, Group, RenderableType
from rich.markdown import Markdown
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mcp_server.replies import HEAD, compact
from mcp_server.terminal import as_command, as_typed

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
TIMES = ("created", "pushed", "started", "ended", "time")
PAPERWORK = ("estimate", "result", "metrics_uri", "cursor", "reached", "kind", "queue_position")
MARKS = {"pass": "✓", "warn": "!", "fail": "✗", "skip": "-"}


def console(stderr: bool = False) -> Console:
    """A console that does not cut tables when its output goes into a file or a pipe."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else 200
    return Console(stderr=stderr, width=width, highlight=False, soft_wrap=False)


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
    for warning in data.get("warnings", []):
        out.print(Text(f"! {warning}", style="yellow"))
    for call in data.get("next", []):
        out.print(Text(f"next: {as_command(call)}", style="dim"))


def run(data: Any) -> None:
    """A run as a person asks for it: what it is and how it stands, without its paperwork."""
    reply({name: value for name, value in data.items() if name not in PAPERWORK})


def logs(data: Any) -> None:
    """A page of a run's logs: lines as they are, events one a line, curves as a table."""
    out = console()
    page = {name: value for name, value in data.items() if name not in ("lines", "events")}
    for line in data.get("lines", []):
        out.print(Text(str(line)), soft_wrap=True)
    for event in data.get("events", []):
        out.print(event_line(event), soft_wrap=True)
    shown = ("columns", "rows", "error", "next_cursor", "older_cursor")
    if not any(name in page for name in ("summary", "rows", "error")):
        return  # one of the pages of a run that is followed: its lines are all it says
    reply({name: page[name] for name in (*HEAD, *shown) if name in page})


def event_line(event: Mapping[str, Any]) -> Text:
    """One event of a run on a line."""
    at = event.get("time")
    stamp = time.strftime("%H:%M:%S ", time.localtime(at)) if isinstance(at, int | float) else ""
    rest = {k: v for k, v in event.items() if k not in ("time", "event", "message")}
    line = Text(stamp, style="dim") + Text(f"{event.get('event', ''):<16} ", style="")
    line.append(str(event.get("message", "")), style="")
    return line + Text("  ") + scalar("", {k: v for k, v in rest.items() if is_scalar(v)})


def plan(data: Any) -> None:
    """A dry run: the checks, every setting with its source, the audit."""
    out = console()
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
    reply({name: data.get(name, []) for name in HEAD})


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
    """A verified run: its links in order, under each the files that are not what they were."""
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
        shown = {name: item for name, item in value.items() if item not in ("", [], {})}
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


def checks(items: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Checks with their marks, and under each that asks for it what to do."""
    table = Table.grid(padding=(0, 1))
    table.add_column()
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for item in items:
        status = str(item["status"])
        said = Text(str(item.get("detail", "")))
        if item.get("fix"):
            said.append(f"\n-> {as_typed(str(item['fix']))}", style="dim")
        mark = Text(MARKS.get(status, "·"), style=STATES.get(status, "dim"))
        table.add_row(mark, Text(str(item["name"])), said)
    return table


def grid(columns: Sequence[Any], rows: Sequence[Sequence[Any]]) -> Table:
    """A plain table."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for at, name in enumerate(columns):
        numbers = all(isinstance(row[at], int | float) for row in rows if len(row) > at)
        table.add_column(str(name), justify="right" if numbers and rows else "left")
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
    if isinstance(value, float):
        return Text(f"{value:.4g}" if abs(value) < 1e9 else f"{value:.0f}")
    if is_flat(value):
        pairs = [(str(key), item) for key, item in value.items() if item != ""]
        return Text(", ").join(Text(f"{key} ") + scalar(key, item) for key, item in pairs)
    if not is_scalar(value):
        return Text(compact(value))
    style = VERDICTS.get(str(value), "") if name == "verdict" else STATES.get(str(value), "")
    return Text(as_typed(str(value)) if name == "hint" else str(value), style=style)


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
