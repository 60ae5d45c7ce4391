"""Pages of a run's metrics: the whole curves, or the steps logged since the last page."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from engine.core.errors import UserError
from engine.core.files import JsonObject
from engine.core.format import counted
from engine.core.metrics import METRICS
from engine.core.paging import Line, complete_size, page_after
from engine.core.reply import BODY_CHARS, ReplyBase
from engine.home.halves import ChoosingHalf, choosing
from engine.home.rows import TERMINAL, RunRow
from engine.home.run_dir import RunDir
from engine.home.sanitize import clean_text, clean_value, json_chars
from engine.reading.cursors import parse_cursor
from engine.reading.search import Matches
from engine.records.lines.curves import (
    POINTS,
    CurveSummary,
    Metrics,
    by_step,
    load_metrics,
    main_columns,
    number,
    parse_lines,
    short,
    summary_of,
    thin,
)
from engine.records.lines.line_record import skipped_lines

_MOST_KEYS = 14  # two extremes of each, the first and the last step: 30 points
_DEFAULT_KEYS = 10  # metrics that are shown if none are named
_MOST_AVAILABLE = 60  # names of metrics that are not shown
_LISTED_IN_ERROR = 40  # names of metrics in an error message
_IN_SENTENCE = 3  # curves that the summary describes

Cell = float | str | None


@dataclass(frozen=True)
class CurvesPage(ReplyBase):
    """Curves of a run from its first step to its last, with only a part of the steps.

    Attributes:
        columns: "step", in an evaluation "model", then the metrics.
        rows: the cells of each shown step, in the order of `columns`.
        curves: first, last and extreme values of each shown metric, over all steps.
        available: names of logged metrics that are not shown.
        steps_logged: number of all logged steps.
        heldout: the tasks that `heldout_*` is measured on; None if no such metric is shown.
    """

    summary: str
    run_id: str
    state: str
    view: str
    columns: list[str]
    rows: list[list[Cell]]
    curves: dict[str, CurveSummary]
    available: list[str]
    steps_logged: int
    heldout: ChoosingHalf | None
    next_cursor: str
    warnings: list[str]
    next: list[JsonObject] = field(default_factory=list)


@dataclass(frozen=True)
class NewStepsPage(ReplyBase):
    """The steps logged since a cursor, each in full; `columns` and `rows` as in CurvesPage."""

    summary: str
    run_id: str
    state: str
    view: str
    columns: list[str]
    rows: list[list[Cell]]
    next_cursor: str
    warnings: list[str]
    next: list[JsonObject] = field(default_factory=list)


@dataclass(frozen=True)
class _Table:
    """Metrics of some steps: the heads of the columns, and a row of cells for each step."""

    heads: list[str]
    rows: list[list[Cell]]


@dataclass(frozen=True)
class _ShownCurves:
    """What a page shows of a run's metrics.

    Attributes:
        selected_count: how many metrics were selected; the first of them are shown.
        columns: the names of the metrics that are shown.
        measured_count: at how many steps any of the columns was measured.
        lines: the logged lines of the steps that are shown, each with a value in some column.
        curves: (step, value) of every logged point, by metric.
    """

    selected_count: int
    columns: list[str]
    measured_count: int
    lines: Sequence[JsonObject]
    curves: dict[str, list[tuple[float, float]]]


def curves_page(
    run: RunDir, row: RunRow, keys: Sequence[str], matches: Matches | None, limit: int
) -> CurvesPage:
    """A page with the curves of a run, from its first step to its last.

    Args:
        keys: the metrics to show; empty for the main ones.
        matches: a test of names; if given, the logged metrics that pass it are shown instead of
            `keys`.
        limit: the largest number of points of a curve; never more than 30 are shown.

    Raises UserError BAD_ARGUMENT for a name that is neither logged nor a known metric.
    """
    metrics = load_metrics(run.metrics)
    shown_curves = _shown_curves(metrics, _selected_columns(metrics, keys, matches), limit)
    choosing_half = _half_behind_heldout_metrics(run, shown_curves.columns)
    if run.deleted.exists():  # the files of the run are gone on purpose
        summary = f"{row.run_id} is {row.state}; its files were deleted."
    else:
        summary = _curve_sentence(row, metrics, shown_curves, choosing_half)
    table = _table_of_curves(shown_curves)
    page = CurvesPage(
        summary=clean_text(summary),
        run_id=row.run_id,
        state=row.state,
        view="metrics",
        columns=table.heads,
        rows=table.rows,
        curves=_summaries(shown_curves),
        available=_hidden_names(metrics, shown_curves.columns),
        steps_logged=len(metrics.lines),
        heldout=choosing_half,
        # A run that has ended logs no further steps.
        next_cursor="" if row.state in TERMINAL else f"metrics:{metrics.end}",
        warnings=_curve_warnings(metrics, shown_curves.selected_count),
    )
    return _shorten_to_fit(page)


def _shown_curves(metrics: Metrics, selected_columns: Sequence[str], limit: int) -> _ShownCurves:
    """The first of the selected columns, with at most `limit` steps and never more than 30."""
    columns = list(selected_columns[:_MOST_KEYS])
    measured = [line for line in metrics.lines if _has_any(line, columns)]
    return _ShownCurves(
        selected_count=len(selected_columns),
        columns=columns,
        measured_count=len(measured),
        lines=thin(measured, columns, min(POINTS, limit)),
        curves={name: metrics.curve(name) for name in columns},
    )


def _has_any(line: JsonObject, columns: Sequence[str]) -> bool:
    """Whether any of the metrics `columns` was measured at the step of a logged line, be it as no
    finite number."""
    return any(name in line for name in columns)


def _table_of_curves(shown: _ShownCurves) -> _Table:
    """The shown metrics, step by step; with the model in an evaluation of several models."""
    with_model = any("model" in line for line in shown.lines)
    return _table(shown.lines, shown.columns, with_model=with_model)


def _summaries(shown: _ShownCurves) -> dict[str, CurveSummary]:
    """First, last and extreme values of each shown metric that has a point."""
    curves = shown.curves.items()
    return {clean_text(name): summary_of(points) for name, points in curves if points}


def _hidden_names(metrics: Metrics, shown_columns: Sequence[str]) -> list[str]:
    """The names of the first 60 logged metrics that are not shown."""
    names = [clean_text(name) for name in metrics.columns if name not in shown_columns]
    return names[:_MOST_AVAILABLE]


def _half_behind_heldout_metrics(run: RunDir, columns: Sequence[str]) -> ChoosingHalf | None:
    """The half of the held-out tasks on which the `heldout_*` metrics are measured.

    It is also the half by which the run chooses its checkpoint. None if no such metric is among
    `columns`.
    """
    shows_heldout = any(name.startswith("heldout_") for name in columns)
    return choosing(run) if shows_heldout else None


def _selected_columns(metrics: Metrics, keys: Sequence[str], matches: Matches | None) -> list[str]:
    """The metrics that a reader asked for, without a limit to their number.

    With `matches` the logged ones whose name matches, else `keys`; where that gives no name at all,
    the main metrics.

    Raises UserError BAD_ARGUMENT for a name that is neither logged nor a known metric.
    """
    if matches is not None:
        keys = [name for name in metrics.columns if matches(name)]
    if keys:
        return _known_columns(keys, metrics.columns)
    return main_columns(metrics.columns, _DEFAULT_KEYS)


def _curve_warnings(metrics: Metrics, selected_count: int) -> list[str]:
    """Warnings about columns, steps and lines that a page of curves leaves out.

    `selected_count` is how many columns the page would show if it had room for all.
    """
    warnings: list[str] = []
    if selected_count > _MOST_KEYS:
        warnings.append(f"The first {_MOST_KEYS} of {selected_count} columns are shown.")
    if metrics.sampled:
        warnings.append("The file is long: before its end, steps are a sample.")
    return warnings + skipped_lines(metrics.skipped)


def new_steps_page(
    run: RunDir, row: RunRow, keys: Sequence[str], limit: int, cursor: str
) -> NewStepsPage:
    """A page with the steps logged since the cursor of an earlier page, at most `limit`.

    It shows the metrics `keys`, or the main ones if `keys` is empty. Raises UserError BAD_CURSOR.
    """
    offset, warnings = _start_of_new_steps(run, cursor)
    log_page = page_after(run.metrics, offset, limit)
    readable = parse_lines([line.text for line in log_page.lines])
    table = _table_of_new_steps(by_step(readable), keys)
    page = NewStepsPage(
        summary=f"{counted(len(table.rows), 'new step')} of {row.run_id}, which is {row.state}.",
        run_id=row.run_id,
        state=row.state,
        view="metrics",
        columns=table.heads,
        rows=table.rows,
        next_cursor=_cursor_after(run, row, log_page.end),
        warnings=warnings + skipped_lines(len(log_page.lines) - len(readable)),
    )
    return _without_empty_rows(_with_fewer_steps(page, log_page.lines))


def _without_empty_rows(page: NewStepsPage) -> NewStepsPage:
    """The page without steps at which nothing that is shown was measured. Its cursor is after
    them too."""
    first_cell = page.columns.index("step") + 1
    return replace(page, rows=[row for row in page.rows if set(row[first_cell:]) - {None}])


def _cursor_after(run: RunDir, row: RunRow, end: int) -> str:
    """The cursor of the steps logged after the byte `end`; "" if there are none and the run has
    ended."""
    has_more = end < complete_size(run.metrics) or row.state not in TERMINAL
    return f"metrics:{end}" if has_more else ""


def _table_of_new_steps(lines: Sequence[JsonObject], keys: Sequence[str]) -> _Table:
    """The metrics `keys` of the logged lines, or the main ones if `keys` is empty."""
    # Names are not checked: these few lines may lack a metric that is logged now and then.
    columns = list(keys[:_MOST_KEYS]) or main_columns(_logged_metrics(lines), _DEFAULT_KEYS)
    return _table(lines, columns, with_model=False)


def _start_of_new_steps(run: RunDir, cursor: str) -> tuple[int, list[str]]:
    """(the byte of the metrics file at which a page of new steps starts, warnings).

    Where the file has become shorter than the cursor says, the page starts at the start of the file
    and warns of it. Raises UserError BAD_CURSOR.
    """
    offset = parse_cursor(cursor, "metrics").offset or 0
    if offset <= complete_size(run.metrics):
        return offset, []
    return 0, ["The run went back to a checkpoint; its metrics are read from the start."]


def _with_fewer_steps(page: NewStepsPage, lines: Sequence[Line]) -> NewStepsPage:
    """The page with at most `BODY_CHARS` characters, if one step can be that short.

    The later half of its steps is left out until it fits; the next page then starts with them.
    `lines` are the lines of the log that the page was read from.
    """
    while json_chars(page.to_json()) > BODY_CHARS and len(page.rows) > 1:
        rows = page.rows[: len(page.rows) // 2]
        # Lines are in the order of the file: the next page starts after the last one shown.
        shown_end = lines[len(rows) - 1].end
        page = replace(page, rows=rows, next_cursor=f"metrics:{shown_end}")
    return page


def _logged_metrics(lines: Sequence[JsonObject]) -> list[str]:
    """The names of the metrics in `lines`.

    First ours, in the order of METRICS, then those of the environment, in the order in which they
    appear.
    """
    names = list(dict.fromkeys(name for line in lines for name in line))
    ours = [name for name in METRICS if name in names]
    not_of_env = {*METRICS, "step", "time", "model"}
    return ours + [name for name in names if name not in not_of_env]


def _known_columns(keys: Sequence[str], available: Sequence[str]) -> list[str]:
    """Return `keys` without duplicates.

    Raises UserError BAD_ARGUMENT for a name that is neither in `available` (what the run logged)
    nor one of our own metrics. One of those may be logged later.
    """
    for key in keys:
        if key not in available and key not in METRICS:
            similar = difflib.get_close_matches(key, available, n=1)
            guess = f" Did you mean {similar[0]}?" if similar else ""
            names = ", ".join(list(available)[:_LISTED_IN_ERROR]) or "none yet"
            raise UserError(
                "BAD_ARGUMENT",
                f"no metric is called {key!r}",
                hint=f"Logged: {names}.{guess}",
                field="keys",
            )
    return list(dict.fromkeys(keys))


def _table(lines: Sequence[JsonObject], columns: Sequence[str], *, with_model: bool) -> _Table:
    """The metrics `columns` of the logged lines; `with_model` adds a column with the model."""
    return _Table(
        heads=_column_heads(columns, with_model),
        rows=[_table_row(line, columns, with_model) for line in lines],
    )


def _column_heads(names: Sequence[str], with_model: bool) -> list[str]:
    """The heads of the table: "step", with `with_model` also "model", then the metrics."""
    first_heads = ["step", "model"] if with_model else ["step"]
    return first_heads + [clean_text(name) for name in names]


def _table_row(line: JsonObject, columns: Sequence[str], with_model: bool) -> list[Cell]:
    """One row of the table for one logged line, such as [3, 0.41, None].

    The cells are the step, the model (only with `with_model`), and the rounded value of each of
    `columns`; None for a metric that the line does not have.
    """
    cells: list[Cell] = [line["step"]]
    if with_model:
        cells.append(clean_value(line.get("model")))
    for name in columns:
        value = number(line.get(name))
        cells.append(None if value is None else short(value))
    return cells


def _heldout_note(choosing_half: ChoosingHalf) -> str:
    """How many tasks the curves `heldout_*` are measured on, to put behind them, such as
    " (heldout_*: 50 of 100 tasks, which choose)"."""
    of_all = "dev" if choosing_half.side == "dev" else f"of {choosing_half.of}"
    return f" (heldout_*: {choosing_half.tasks} {of_all} tasks, which choose)"


def _curve_sentence(
    row: RunRow, metrics: Metrics, shown_curves: _ShownCurves, choosing_half: ChoosingHalf | None
) -> str:
    """The summary: the state of the run and the first and last value of its first three curves.

    Example: "r-1 is running at step 40 (30 of 41 points): reward_mean 0.1 to 0.6, kl 0 to 0.02."
    `choosing_half` is the half of the held-out tasks that `heldout_*` is measured on; a note says
    how many tasks it has. None where no such metric is shown.
    """
    lines = metrics.lines
    if not lines:
        return f"{row.run_id} is {row.state} and has logged no step yet."
    changes = _changes_of_first_curves(shown_curves.curves)
    shown, measured = len(shown_curves.lines), shown_curves.measured_count
    thinning_note = f" ({shown} of {measured} points)" if shown < measured else ""
    heldout_note = "" if choosing_half is None else _heldout_note(choosing_half)
    step = lines[-1]["step"]
    measured_text = ", ".join(changes) or f"{', '.join(shown_curves.columns)} not measured yet"
    return (
        f"{row.run_id} is {row.state} at step {step}{thinning_note}: {measured_text}{heldout_note}."
    )


def _changes_of_first_curves(curves: Mapping[str, list[tuple[float, float]]]) -> list[str]:
    """The first and last value of each of the first three curves, such as "kl 0 to 0.02"."""
    changes = []
    for name, points in list(curves.items())[:_IN_SENTENCE]:
        values = [value for _, value in points]
        if values:
            changes.append(f"{name} {short(values[0])} to {short(values[-1])}")
    return changes


def _shorten_to_fit(page: CurvesPage) -> CurvesPage:
    """The page with at most `BODY_CHARS` characters, if one metric column can be that short.

    First names in `available` are left out, then columns.
    """
    # It can be too long because an environment may give its metrics names of any length.
    while page.available and json_chars(page.to_json()) > BODY_CHARS:
        page = replace(page, available=page.available[: len(page.available) // 2])
    # "step" and one metric always stay.
    while len(page.columns) > 2 and json_chars(page.to_json()) > BODY_CHARS:
        page = _without_last_column(page)
    return page


def _without_last_column(page: CurvesPage) -> CurvesPage:
    """The page without its last metric."""
    *columns, dropped = page.columns
    curves = {name: curve for name, curve in page.curves.items() if name != dropped}
    rows = [cells[:-1] for cells in page.rows]
    return replace(page, columns=columns, rows=rows, curves=curves)
