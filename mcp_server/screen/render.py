"""Prints replies for people: as tables, blocks of text, sparklines."""

import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, cast

from rich.console import Console
from rich.markdown import Markdown
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from engine.core.format import counted, size, words
from engine.core.hints import Call
from engine.core.reply import Reply
from mcp_server.api.replies import HEAD_FIELDS, compact
from mcp_server.screen.plan_tables import print_files, print_steps
from mcp_server.screen.shell import as_command
from mcp_server.screen.values import (
    MARKS,
    STATES,
    block,
    checks,
    field,
    grid,
    is_scalar,
    is_table,
    object_table,
    scalar,
)

PIPED_WIDTH = 200  # columns where the output is not a terminal
COLUMN_GAP = 2  # spaces between two columns
SPARKS = "▁▂▃▄▅▆▇█"
# Fields of a run's status that only programs need; people are not shown them.
PAPERWORK = ("estimate", "result", "metrics_uri", "cursor", "until_met", "kind", "queue_position")
# Fields of a page of logs that are printed below its table.
_LOG_FIELDS = ("error", "heldout", "next_cursor", "older_cursor")
# Metrics that are shown first, so that a narrow terminal still shows them.
FOREMOST = ("step", "model", "loss", "reward_mean", "heldout_success", "length_mean", "lr")
LEVELS = ("low", "likely", "high")
_CHECK_NAME_WIDTH = 13  # fits the names of most checks


class _Trimmed:
    """A text stream that drops spaces at the ends of lines, with which rich fills its tables."""

    def __init__(self, stream: IO[str]) -> None:
        """Wrap `stream`, which gets all text without the spaces at the ends of its lines."""
        self._stream = stream

    def write(self, text: str) -> int:
        """Write `text` to the wrapped stream, without the spaces at the ends of its lines. Returns
        how many characters were written."""
        return self._stream.write("\n".join(line.rstrip(" ") for line in text.split("\n")))

    def __getattr__(self, name: str) -> Any:
        """Take every other attribute, such as `flush`, from the wrapped stream."""
        return getattr(self._stream, name)


def console(stderr: bool = False) -> Console:
    """Make the console that prints on stdout, or on stderr with `stderr`.

    On a terminal the console is as wide as the terminal. For a file or a pipe it is as wide as the
    variable COLUMNS says, or else `PIPED_WIDTH`, and its lines have no spaces at the end.
    """
    stream = sys.stderr if stderr else sys.stdout
    if stream.isatty():  # a terminal
        return Console(stderr=stderr, highlight=False, soft_wrap=False)
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdigit() and int(columns) > 0 else PIPED_WIDTH
    return Console(file=cast(IO[str], _Trimmed(stream)), width=width, highlight=False)


def reply(data: Any) -> None:
    """Print any reply of a verb: its summary, its fields, its warnings and the suggested calls.

    A reply that is a text (the playbook) is printed as Markdown on a terminal, and unchanged
    elsewhere.
    """
    out = console()
    if isinstance(data, str):
        _print_text(out, data)
        return
    _print_summary(out, data)
    body = {name: value for name, value in data.items() if name not in HEAD_FIELDS}
    if is_table(body):
        out.print(grid(body.pop("columns"), body.pop("rows")))
    for name, value in body.items():
        if value not in ("", [], {}):
            out.print(field(name, value))
    _print_advice(out, data)


def _print_text(out: Console, text: str) -> None:
    """Print a text: rendered as Markdown on a terminal, unchanged elsewhere."""
    if out.is_terminal:
        out.print(Markdown(text))
    else:
        out.file.write(text.rstrip("\n") + "\n")


def _print_summary(out: Console, data: Mapping[str, Any]) -> None:
    """Print the summary of a reply in bold."""
    out.print(Text(str(data.get("summary", "")), style="bold"))


def _print_advice(out: Console, data: Mapping[str, Any]) -> None:
    """Print the warnings of a reply, and the calls that it suggests as shell commands."""
    for warning in data.get("warnings", []):
        out.print(Text(f"! {warning}", style="yellow"))
    for suggested in data.get("next", []):
        call = Call.from_json(suggested)
        if call:
            # `first` says what to do before the call, such as an edit.
            first_step = f"{suggested['first']}, then " if suggested.get("first") else ""
            out.print(Text(f"next: {first_step}{as_command(call)}", style="dim"))


def run(data: Any) -> None:
    """Print the status of a run, without the fields in `PAPERWORK`."""
    fields = {name: value for name, value in data.items() if name not in PAPERWORK}
    reply(_with_heldout_sentence(fields))


def _with_heldout_sentence(data: Reply) -> Reply:
    """Return a reply for people: if its field `heldout` (scores on held-out tasks) is an object,
    the sentence `about` in that object takes its place. Any other reply is returned unchanged."""
    heldout = data.get("heldout")
    if not isinstance(heldout, Mapping):
        return data
    return data | {"heldout": heldout["about"]}


def all_logs(data: Any) -> None:
    """Print a page of a run's logs with every column, in as many tables as they need."""
    logs(data, all_columns=True)


def logs(data: Any, all_columns: bool = False) -> None:
    """Print a page of a run's logs: its lines, its events one per line, its metrics as a table.

    The table has the columns that fit the terminal; with `all_columns` the others follow in further
    tables. A page of `logs --follow` has no `summary`: its metrics are printed one step per line,
    without a table and without the other fields of the page.
    """
    out = console()
    for line in data.get("lines", []):
        sys.stdout.write(f"{line}\n")  # exactly as the run wrote it, with spaces at its end
    for event in data.get("events", []):
        out.print(event_line(event), soft_wrap=True)
    columns, rows = _foremost_first(data.get("columns") or [], data.get("rows") or [])
    if "summary" not in data:  # a page of `logs --follow`
        _print_step_lines(out, columns, rows)
        return
    page = _with_heldout_sentence(data)
    if not rows:  # a view that has no table, or no metrics yet
        # `reply` prints all that is left: the summary, the fields, and the advice at the end.
        reply(_page_fields(page, (*HEAD_FIELDS, *_LOG_FIELDS)))
        return
    _print_summary(out, page)
    _print_metrics(out, columns, rows, all_columns)
    _print_filled_fields(out, _page_fields(page, _LOG_FIELDS))
    _print_advice(out, page)


def _print_step_lines(out: Console, columns: Sequence[Any], rows: Sequence[Sequence[Any]]) -> None:
    """Print metrics, one line of names and values for each row, which is a training step."""
    for cells in rows:
        out.print(_step_line(columns, cells), soft_wrap=True)


def _print_filled_fields(out: Console, fields: Mapping[str, Any]) -> None:
    """Print each field that has a value (is not empty, 0, False or None) on a line of its own."""
    for name, value in fields.items():
        if value:
            out.print(field(name, value))


def _page_fields(page: Mapping[str, Any], names: Sequence[str]) -> Mapping[str, Any]:
    """Return those fields of `page` whose names are in `names`, in the order of `names`."""
    return {name: page[name] for name in names if name in page}


def _print_metrics(
    out: Console, columns: Sequence[Any], rows: Sequence[Sequence[Any]], all_columns: bool
) -> None:
    """Print metrics as a table of the columns that fit the width, and below it the names of the
    other columns. With `all_columns` the other columns follow in further tables instead.
    """
    for table in _metric_tables(columns, rows, out.width, all_columns):
        out.print(table)
    fitting_columns, _ = _columns_that_fit(columns, rows, out.width)
    other_columns = columns[len(fitting_columns) :]
    if other_columns and not all_columns:
        out.print(Text(f"--all shows also {', '.join(map(str, other_columns))}", style="dim"))


def _foremost_first(
    columns: Sequence[Any], rows: Sequence[Sequence[Any]]
) -> tuple[list[Any], list[list[Any]]]:
    """Return the columns with those in `FOREMOST` moved to the front, and the rows with their cells
    in the same new order."""
    order: list[int] = []  # indexes of columns, by which the cells of each row are ordered too
    for name in FOREMOST:
        order += [index for index, column in enumerate(columns) if column == name]
    order += [index for index in range(len(columns)) if index not in order]
    ordered_columns = [columns[index] for index in order]
    ordered_rows = [[row[index] for index in order] for row in rows]
    return ordered_columns, ordered_rows


def _step_line(columns: Sequence[Any], row: Sequence[Any]) -> Text:
    """Return one row of metrics as a line, `step 3  loss 1.2  lr 0.001`, without missing values."""
    parts = [
        Text(f"{name} ") + scalar(str(name), value)
        for name, value in zip(columns, row, strict=False)  # a row may lack its last cells
        if value is not None
    ]
    return Text("  ").join(parts)


def _metric_tables(
    columns: Sequence[Any], rows: Sequence[Sequence[Any]], width: int, all_columns: bool
) -> list[Table]:
    """Make a table of the columns that fit side by side into `width`.

    With `all_columns` the other columns follow in further tables, each of which begins with the
    first column (the step) again.
    """
    tables = []
    while True:
        fitting_columns, fitting_rows = _columns_that_fit(columns, rows, width)
        tables.append(grid(fitting_columns, fitting_rows))
        if not all_columns or len(fitting_columns) == len(columns):
            return tables
        # At least two columns fit, so each round takes one new column or more.
        remaining_indexes = [0, *range(len(fitting_columns), len(columns))]
        columns = [columns[index] for index in remaining_indexes]
        rows = [[row[index] for index in remaining_indexes] for row in rows]


def _columns_that_fit(
    columns: Sequence[Any], rows: Sequence[Sequence[Any]], width: int
) -> tuple[list[Any], list[list[Any]]]:
    """Return the first columns that fit side by side into `width` characters, but at least two, and
    the rows cut to these columns."""
    width_left = width
    fitting_count = 0
    for index, name in enumerate(columns):
        width_left -= _column_width(str(name), index, rows)
        if index > 0:  # no gap stands before the first column
            width_left -= COLUMN_GAP
        if width_left < 0 and index >= 2:  # the first two are shown even if they do not fit
            break
        fitting_count = index + 1
    return list(columns[:fitting_count]), [list(row[:fitting_count]) for row in rows]


def _column_width(name: str, index: int, rows: Sequence[Sequence[Any]]) -> int:
    """Return the width of the column `name` in characters: that of its name or of its widest cell.
    The cells of the column stand at `index` in each row."""
    cell_widths = [len(scalar(name, row[index])) for row in rows if len(row) > index]
    return max([len(name), *cell_widths])


def event_line(event: Mapping[str, Any]) -> Text:
    """Return one event of a run as a line: its time, kind and message, then its other plain fields.

    Fields that hold an object or a list are left out.
    """
    unix_time = event.get("time")
    stamp = ""
    if isinstance(unix_time, int | float):
        stamp = time.strftime("%H:%M:%S ", time.localtime(unix_time))
    details = {
        name: value
        for name, value in event.items()
        if name not in ("time", "event", "message") and is_scalar(value)
    }
    line = Text(stamp, style="dim") + Text(f"{event.get('event', ''):<16} ", style="")
    line.append(str(event.get("message", "")), style="")
    return line + Text("  ") + scalar(name="", value=details)


def plan(data: Any) -> None:
    """Print a dry run in short:

    - its summary, and the checks that fail or warn, failures first.
    - the names of the checks that pass or were skipped.
    - the settings that the user gave, and the number of others.
    - the probe: how the model did on a few tasks, if the dry run tried it.
    """
    out = console()
    _print_summary(out, data)
    all_checks = data.get("checks", [])
    # The user asked for a smoke run (two real steps), so its result is shown even if it passed.
    checks_to_mend = [
        item for item in all_checks if item["status"] in ("fail", "warn") or item["name"] == "smoke"
    ]
    if checks_to_mend:
        # False sorts before True, so the checks that fail come first.
        out.print(checks(sorted(checks_to_mend, key=lambda item: item["status"] != "fail")))
    _print_check_names(out, [item for item in all_checks if item not in checks_to_mend])
    print_files(out, data.get("files", []))
    if data.get("steps"):
        print_steps(out, data["steps"], settings=False)
    _print_user_settings(out, data.get("settings", {}), data.get("sources", {}))
    if data.get("probe"):
        out.print(field("probe", data["probe"]))
    other_warnings = _warnings_beside(checks_to_mend, data.get("warnings", []))
    _print_advice(out, {"warnings": other_warnings, "next": data.get("next", [])})


def _warnings_beside(
    printed_checks: Sequence[Mapping[str, Any]], warnings: Sequence[str]
) -> list[str]:
    """Return the warnings that do not end with the text of a check that was printed already."""
    check_texts = tuple(f"{item['name']}: {item.get('detail', '')}" for item in printed_checks)
    return [warning for warning in warnings if not warning.endswith(check_texts)]


def _print_check_names(out: Console, all_checks: Sequence[Mapping[str, Any]]) -> None:
    """Print one line with the names of the checks that pass, and one with those skipped."""
    for status, heading in (("pass", "passed"), ("skip", "skipped")):
        names = ", ".join(str(item["name"]) for item in all_checks if item["status"] == status)
        if names:
            out.print(Text(f"{MARKS[status]} {heading}: {names}", style="dim"))


def _print_user_settings(
    out: Console, settings: Mapping[str, Any], sources: Mapping[str, str]
) -> None:
    """Print the settings that the user gave, and the number of those chosen for the user.

    `sources` maps the name of each setting to where its value comes from; "user": the user gave it.
    """
    user_settings = [name for name in settings if sources.get(name) == "user"]
    if user_settings:
        text = ", ".join(f"{name} = {compact(settings[name])}" for name in user_settings)
        out.print(Text(f"settings given: {text}"))
    if settings:
        other_count = len(settings) - len(user_settings)
        note = f"{other_count} settings as chosen, the audit and more: --all"
        out.print(Text(note, style="dim"))


def whole_plan(data: Any) -> None:
    """Print a dry run in full: every check, every setting with its source, the reward audit."""
    out = console()
    _print_summary(out, data)
    out.print(checks(data.get("checks", [])))
    print_files(out, data.get("files", []))
    if data.get("steps"):
        print_steps(out, data["steps"], settings=True)
    _print_all_settings(out, data.get("settings", {}), data.get("sources", {}))
    probes = (data.get("audit") or {}).get("probes")
    if probes:
        out.print(Text("\nreward audit:", style="dim"))
        out.print(object_table(probes))
    # Only SFT, which trains on rows, has `row`. `probe` says how the model did on a few tasks.
    if data.get("row"):
        out.print(Text("\none row as it is trained:", style="dim"))
        out.print(trained_row(data["row"]))
    if data.get("probe"):
        out.print(field("probe", data["probe"]))
    out.print()
    _print_advice(out, data)


def _print_all_settings(
    out: Console, settings: Mapping[str, Any], sources: Mapping[str, str]
) -> None:
    """Print every setting with its value and where it comes from, as a table."""
    rows = [[name, compact(value), sources.get(name, "")] for name, value in settings.items()]
    if rows:
        out.print(Text("\nsettings:", style="dim"))
        out.print(grid(["name", "value", "from"], rows))


def cost(data: Any) -> None:
    """Print an estimate: times, memory and disk in units that people read."""
    out = console()
    _print_summary(out, data)
    out.print(grid(["", *LEVELS], _level_rows(data)))
    print_files(out, data.get("files", []))
    # The estimate of a plan has no memory and tokens: these differ between its runs.
    if isinstance(data.get("steps"), list):
        print_steps(out, data["steps"], settings=False)
        _print_advice(out, data)
        return
    for name, value in _cost_fields(data).items():
        if value not in ("", {}):
            out.print(field(name, value))
    _print_advice(out, data)


def _level_rows(data: Mapping[str, Any]) -> list[list[str]]:
    """Return the table rows of an estimate: time, GPU-hours and money, each with its name and its
    value at each level of `LEVELS` (low, likely, high). What is not known has no row."""
    rows = [["time", *(words(data["hours"][level]) for level in LEVELS)]]
    if data.get("device") != "cpu":  # a CPU takes no GPU-hours
        rows.append(["GPU-hours", *(f"{data['gpu_hours'][level]:.3g}" for level in LEVELS)])
    if data.get("gpu_hour_price"):  # without a price the money is not known
        rows.append(["money", *(f"{data['money'][level]:.2f}" for level in LEVELS)])
    return rows


def _cost_fields(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields that are printed below an estimate's table; "" or {} for those that are not
    known."""
    durations = data.get("seconds", {})  # phase of the run -> seconds
    does_not_fit = data.get("fit") != "fits"
    return {
        "memory": _memory_text(data),
        "disk": size(data["disk_bytes"]),
        "seconds": {name: value for name, value in durations.items() if value},
        "tokens": data.get("tokens", {}),
        "basis": f"{data['basis']}, {counted(data.get('calibrated_on_runs', 0), 'finished run')}",
        # The setting to lower so that the run fits into the memory.
        "lower": data.get("lower_this", "") if does_not_fit else "",
    }


def _memory_text(data: Mapping[str, Any]) -> str:
    """Return the memory of an estimate in words: the total, how much the device has, and the parts
    of the total, e.g. "2 GB of 8 GB on cuda:0: weights 1 GB, ..."."""
    memory = data["peak_memory"]
    memory_parts = [f"{name} {size(used)}" for name, used in memory.items() if name != "total"]
    total_text = f"{size(memory['total'])} of {size(data['memory_available'])} on {data['device']}"
    return f"{total_text}: {', '.join(memory_parts)}"


def check(item: Mapping[str, Any]) -> None:
    """Print one check of `doctor`. The column of names has a fixed width, so that checks that are
    printed one by one line up."""
    console().print(checks([item], name_width=_CHECK_NAME_WIDTH))


def diagnosis(data: Any) -> None:
    """Print the findings of a diagnosis, then what was examined and what could not be judged.

    Each finding is printed with its cause, its numbers, what to change, and examples.
    """
    out = console()
    for number, finding in enumerate(data.get("findings", []), 1):
        out.print(Text(f"{number}. {finding['id']}", style="bold yellow"))
        out.print(Padding(Text(finding["what"]), (0, 0, 0, 3)))  # top, right, bottom, left
        details = {name: finding[name] for name in ("evidence", "lever", "examples", "playbook")}
        out.print(Padding(block(details), (0, 0, 1, 3), expand=False))
    reply({name: data[name] for name in (*HEAD_FIELDS, "looked_at", "not_judged") if name in data})


def custody(data: Any) -> None:
    """Print whether a run's files are unchanged.

    First come the links of the run's chain of evidence, each with the files that have changed. Then
    come the runs that it descends from, each only with whether all of its files are unchanged.
    """
    out = console()
    for link in data.get("links", []):
        status = "pass" if link["ok"] else "fail"
        out.print(_marked(status, link["name"]))
        for item in link["broken"]:
            out.print(Text(f"    {item['file']} {item['what']}", style="red"))
    for ancestor in data.get("ancestors", []):
        status = "pass" if ancestor["intact"] else "fail"
        if ancestor["intact"] is None:  # the ancestor could not be checked
            status = "warn"
        out.print(_marked(status, f"from {ancestor['run_id']}"))
    out.print()
    # The summary, the warnings and the calls to make next.
    reply({name: data.get(name, []) for name in HEAD_FIELDS})


def _marked(status: str, text: str) -> Text:
    """Return the mark of `status` (pass, warn or fail) and `text`, both in the color of the
    status."""
    return Text(f"{MARKS[status]} {text}", style=STATES[status])


def trained_row(row: Mapping[str, Any]) -> Text:
    """Return the text of a training row, and a line that counts the tokens that carry loss.

    Text that is trained on is bold; text that is cut away for length is struck out.

    Args:
        row: the field `row` in the reply of a dry run. Each of its `pieces` has a `text` and says
            whether it is `trained` on. `tokens` and `trained` count all tokens and those with loss.
            If text was cut away, `lost` holds it, and `cut_at` the limit in tokens. If one
            conversation gives several training rows, `row` and `of_rows` say which one this is.
    """
    text = Text()
    for piece in row["pieces"]:
        text.append(piece["text"], style="bold green" if piece["trained"] else "dim")
    if row.get("lost"):
        text.append(row["lost"]["text"], style="red strike")
    cut_note = f", cut at {row['cut_at']}" if row.get("lost") else ""
    part = f"row {row['row']} of {row['of_rows']} of this conversation: " if "row" in row else ""
    counts = f"\n{part}{row['trained']} of {row['tokens']} tokens carry loss{cut_note}"
    return text + Text(counts, style="dim")


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Return the last `width` values as a row of bars, such as "▁▃▂▇█"; "" if there are none.

    The lowest value gets the lowest bar, the highest value the highest. NaN is left out.
    """
    drawn_values = [value for value in values if not math.isnan(value)][-width:]
    if not drawn_values:
        return ""
    low, high = min(drawn_values), max(drawn_values)
    span = (high - low) or 1.0  # 1.0 if all values are equal, to avoid a division by 0
    top = len(SPARKS) - 1
    return "".join(SPARKS[round((value - low) / span * top)] for value in drawn_values)


def duration(seconds: float | None) -> str:
    """Return a duration as a short text: "42s", "1m35s" or "2h05m"; "?" for None."""
    if seconds is None:
        return "?"
    total = max(0, round(seconds))
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    return f"{total // 3600}h{total % 3600 // 60:02d}m"
