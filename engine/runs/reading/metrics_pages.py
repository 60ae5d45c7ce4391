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
from engine.runs.reading.cursors import parse_cursor
from engine.runs.reading.search import Matches

# The most metrics on a page. With two extremes of each, the first and the last step, a page then
# needs 30 points.
_MOST_KEYS = 14
_DEFAULT_KEYS = 10  # metrics that are shown if none are named
_MOST_AVAILABLE = 60  # a page lists at most so many names of metrics that it does not show
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
        heldout: the held-out tasks that the `heldout_*` metrics are measured on; None if no such
            metric is shown.
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
    """The steps logged since a cursor, each in full. `columns` and `rows` are as in CurvesPage."""

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
    """The part of a run's metrics that a page shows.

    Attributes:
        selected_count: how many metrics were selected; only the first of them are shown.
        columns: the names of the metrics that are shown.
        measured_count: the number of steps at which any of the columns was measured.
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
    """Make a page with the curves of a run, from its first step to its last.

    Args:
        keys: the metrics to show; empty for the main ones.
        matches: a test of names, or None. If it is given, the logged metrics that pass the test are
            shown instead of `keys`.
        limit: the largest number of points of a curve; never more than 30 are shown.

    Raises UserError BAD_ARGUMENT if `keys` has a name that is neither logged nor a known metric.
    """
    metrics = load_metrics(run.metrics)
    shown_curves = _shown_curves(metrics, _selected_columns(metrics, keys, matches), limit)
    choosing_half = _half_behind_heldout_metrics(run, shown_curves.columns)
    if run.deleted.exists():  # the user deleted the run's files
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
    """Select what a page shows of a run's `metrics`: the first of `selected_columns`, with at most
    `limit` steps and never more than 30."""
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
    """Whether a logged line has a value for any of the metrics `columns`, even one that is not
    finite."""
    return any(name in line for name in columns)


def _table_of_curves(shown_curves: _ShownCurves) -> _Table:
    """Make the table of the shown metrics, step by step. In an evaluation, whose steps are its
    models, it has a column with the model."""
    with_model = any("model" in line for line in shown_curves.lines)
    return _table(shown_curves.lines, shown_curves.columns, with_model=with_model)


def _summaries(shown_curves: _ShownCurves) -> dict[str, CurveSummary]:
    """Compute first, last and extreme values of each shown metric that has a point, by name."""
    curves = shown_curves.curves.items()
    return {clean_text(name): summary_of(points) for name, points in curves if points}


def _hidden_names(metrics: Metrics, shown_columns: Sequence[str]) -> list[str]:
    """List logged metrics that are not shown, at most 60 names."""
    names = [clean_text(name) for name in metrics.columns if name not in shown_columns]
    return names[:_MOST_AVAILABLE]


def _half_behind_heldout_metrics(run: RunDir, columns: Sequence[str]) -> ChoosingHalf | None:
    """Return the half of the held-out tasks on which the `heldout_*` metrics are measured, which is
    also the half by which the run chooses its best checkpoint. Returns None if no such metric is
    among `columns`."""
    shows_heldout = any(name.startswith("heldout_") for name in columns)
    return choosing(run) if shows_heldout else None


def _selected_columns(metrics: Metrics, keys: Sequence[str], matches: Matches | None) -> list[str]:
    """List the metrics that a reader asked for, however many.

    They are the logged metrics whose name passes `matches`; without `matches`, they are `keys`. If
    that gives no name at all, they are the main metrics.

    Raises UserError BAD_ARGUMENT if `keys` has a name that is neither logged nor a known metric.
    """
    if matches is not None:
        keys = [name for name in metrics.columns if matches(name)]
    if keys:
        return _known_columns(keys, metrics.columns)
    return main_columns(metrics.columns, _DEFAULT_KEYS)


def _curve_warnings(metrics: Metrics, selected_count: int) -> list[str]:
    """List warnings about columns, steps and lines of `metrics` that a page of curves leaves out.

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
    """Make a page with the steps logged since the cursor of an earlier page, at most `limit` of
    them. The page shows the metrics `keys`, or the main ones if `keys` is empty.

    Raises UserError BAD_CURSOR if `cursor` is not a cursor of metrics.
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
    """Drop the steps at which none of the shown metrics was measured. The page's cursor stays
    behind all steps, dropped ones included."""
    first_metric = page.columns.index("step") + 1  # the metrics come after the step's number
    measured_rows = [
        row for row in page.rows if any(cell is not None for cell in row[first_metric:])
    ]
    return replace(page, rows=measured_rows)


def _cursor_after(run: RunDir, row: RunRow, end: int) -> str:
    """Make the cursor for the steps logged after the byte `end`. Returns "" if there are none and
    the run has ended."""
    has_more = end < complete_size(run.metrics) or row.state not in TERMINAL
    return f"metrics:{end}" if has_more else ""


def _table_of_new_steps(lines: Sequence[JsonObject], keys: Sequence[str]) -> _Table:
    """Make the table of the logged lines, with the metrics `keys`, or the main ones if `keys` is
    empty."""
    # Names are not checked: these few lines may lack a metric that is logged now and then.
    columns = list(keys[:_MOST_KEYS]) or main_columns(_logged_metrics(lines), _DEFAULT_KEYS)
    return _table(lines, columns, with_model=False)


def _start_of_new_steps(run: RunDir, cursor: str) -> tuple[int, list[str]]:
    """Return (the byte of the metrics file at which a page of new steps starts, warnings).

    If the file has become shorter than the cursor's offset, the page starts at the beginning of the
    file, with a warning. Raises UserError BAD_CURSOR if `cursor` is not a cursor of metrics.
    """
    offset = parse_cursor(cursor, "metrics").offset or 0
    if offset <= complete_size(run.metrics):
        return offset, []
    return 0, ["The run went back to a checkpoint; its metrics are read from the start."]


def _with_fewer_steps(page: NewStepsPage, lines: Sequence[Line]) -> NewStepsPage:
    """Shorten the page to at most `BODY_CHARS` characters, if one step can be that short.

    The later half of its steps is dropped until it fits, and the cursor moves back, so that the
    next page starts with them. `lines` are the lines of the log that the page was read from.
    """
    while json_chars(page.to_json()) > BODY_CHARS and len(page.rows) > 1:
        rows = page.rows[: len(page.rows) // 2]
        # Lines are in the order of the file: the next page starts after the last one shown.
        shown_end = lines[len(rows) - 1].end
        page = replace(page, rows=rows, next_cursor=f"metrics:{shown_end}")
    return page


def _logged_metrics(lines: Sequence[JsonObject]) -> list[str]:
    """List the names of the metrics in `lines`: first ours, in the order of METRICS, then those of
    the environment, in the order in which they appear."""
    all_names = list(dict.fromkeys(name for line in lines for name in line))  # each once
    own_names = [name for name in METRICS if name in all_names]
    not_of_environment = {*METRICS, "step", "time", "model"}  # the last three are no metrics
    return own_names + [name for name in all_names if name not in not_of_environment]


def _known_columns(keys: Sequence[str], available: Sequence[str]) -> list[str]:
    """Return `keys` without duplicates.

    Raises UserError BAD_ARGUMENT for a name that is neither in `available` (what the run logged)
    nor one of our own metrics. One of our own may be logged later.
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
    """Make the table of the logged lines with the metrics `columns`. `with_model` adds a column
    with the model."""
    return _Table(
        heads=_column_heads(columns, with_model=with_model),
        rows=[_table_row(line, columns, with_model=with_model) for line in lines],
    )


def _column_heads(names: Sequence[str], *, with_model: bool) -> list[str]:
    """List the heads of the table: "step", with `with_model` also "model", then the metrics."""
    first_heads = ["step", "model"] if with_model else ["step"]
    return first_heads + [clean_text(name) for name in names]


def _table_row(line: JsonObject, columns: Sequence[str], *, with_model: bool) -> list[Cell]:
    """Make one row of the table from one logged line, such as [3, 0.41, None].

    The cells are the step, the model (only with `with_model`), and the rounded value of each of
    `columns`. A metric that the line does not have is None.
    """
    cells: list[Cell] = [line["step"]]
    if with_model:
        cells.append(clean_value(line.get("model")))
    for name in columns:
        value = number(line.get(name))
        cells.append(None if value is None else short(value))
    return cells


def _heldout_note(choosing_half: ChoosingHalf) -> str:
    """Say how many held-out tasks the curves `heldout_*` are measured on, such as " (heldout_*: 50
    of 100 tasks, which choose)": these tasks choose the checkpoint. If dev tasks do that, they are
    named instead. The note follows the curves in the summary."""
    kind_of_tasks = "dev" if choosing_half.side == "dev" else f"of {choosing_half.of}"
    return f" (heldout_*: {choosing_half.tasks} {kind_of_tasks} tasks, which choose)"


def _curve_sentence(
    row: RunRow, metrics: Metrics, shown_curves: _ShownCurves, choosing_half: ChoosingHalf | None
) -> str:
    """Write the summary: the state of the run and the first and last value of its first three
    curves.

    `shown_curves` are the curves on the page. Example: "r-1 is running at step 40 (30 of 41
    points): reward_mean 0.1 to 0.6, kl 0 to 0.02." `choosing_half` is the half of the held-out
    tasks that `heldout_*` is measured on, whose size a note gives. It is None if no such metric is
    shown.
    """
    lines = metrics.lines
    if not lines:
        return f"{row.run_id} is {row.state} and has logged no step yet."
    changes = _changes_of_first_curves(shown_curves.curves)
    shown_count, measured_count = len(shown_curves.lines), shown_curves.measured_count
    is_thinned = shown_count < measured_count
    thinning_note = f" ({shown_count} of {measured_count} points)" if is_thinned else ""
    heldout_note = "" if choosing_half is None else _heldout_note(choosing_half)
    step = lines[-1]["step"]
    curve_text = ", ".join(changes) or f"{', '.join(shown_curves.columns)} not measured yet"
    return f"{row.run_id} is {row.state} at step {step}{thinning_note}: {curve_text}{heldout_note}."


def _changes_of_first_curves(curves: Mapping[str, list[tuple[float, float]]]) -> list[str]:
    """Write the first and last value of each of the first three curves, such as "kl 0 to 0.02"."""
    changes = []
    for name, points in list(curves.items())[:_IN_SENTENCE]:
        values = [value for _, value in points]
        if values:
            changes.append(f"{name} {short(values[0])} to {short(values[-1])}")
    return changes


def _shorten_to_fit(page: CurvesPage) -> CurvesPage:
    """Shorten the page to at most `BODY_CHARS` characters, if one metric column can be that short.
    First names in `available` are dropped, then columns."""
    # A page can be too long because an environment may give its metrics names of any length.
    while page.available and json_chars(page.to_json()) > BODY_CHARS:
        page = replace(page, available=page.available[: len(page.available) // 2])
    # "step" and one metric always stay.
    while len(page.columns) > 2 and json_chars(page.to_json()) > BODY_CHARS:
        page = _without_last_column(page)
    return page


def _without_last_column(page: CurvesPage) -> CurvesPage:
    """Drop the last metric from the page: its column, its cells and its curve."""
    *columns, last_metric = page.columns
    curves = {name: curve for name, curve in page.curves.items() if name != last_metric}
    rows = [cells[:-1] for cells in page.rows]
    return replace(page, columns=columns, rows=rows, curves=curves)
