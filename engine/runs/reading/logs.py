"""Reads the logs of a run page by page: metrics, events, console, error.

Cursors are byte offsets, so they stay valid when the server or the machine restarts. A page is read
by seeking to its offset (engine/core/paging.py). Text is cleaned and its secrets are hidden before
it is searched or shown.
"""

from collections.abc import Sequence

from engine.core.errors import UserError
from engine.home.owner_marks import refuse_if_of_sealed
from engine.home.run_dir import Home
from engine.home.sanitize import redactor_for
from engine.home.store import Store
from engine.runs.reading.metrics_pages import CurvesPage, NewStepsPage, curves_page, new_steps_page
from engine.runs.reading.search import matcher
from engine.runs.reading.text_pages import (
    ConsolePage,
    ErrorPage,
    EventsPage,
    TextReader,
    console_page,
    error_page,
    events_page,
)

VIEWS = ("metrics", "events", "console", "error")
MOST_ROWS = 200

LogsPage = CurvesPage | NewStepsPage | EventsPage | ConsolePage | ErrorPage


def read_logs(
    home: Home,
    run_id: str,
    view: str = "metrics",
    keys: Sequence[str] = (),
    grep: str = "",
    limit: int = 50,
    cursor: str = "",
) -> LogsPage:
    """Read one page of a run's metrics, events, console or error.

    Args:
        view: one of VIEWS.
        keys: columns of metrics, or names of events; empty means the main metrics, or all events.
        grep: a pattern with `|`, `.*`, `^` and `$` that lines must match; for view "metrics", the
            names of columns must match it. "" shows all.
        limit: rows or lines, 1 to 200; curves have at most 30 points.
        cursor: `next_cursor` or `older_cursor` of an earlier page. "" for the first page: the whole
            curves, or the newest events or lines.

    Raises UserError:
        RUN_NOT_FOUND if there is no such run; BAD_ARGUMENT if an argument has a value that is not
            allowed; BAD_CURSOR if the cursor is not of this view; ENV_SEALED if the owner has
            sealed the run's tasks, so that only metrics may be read.
    """
    _check_arguments(view, limit)
    matches = matcher(grep) if grep else None  # None: no search
    with Store(home) as store:
        row = store.get_run(run_id)
    run = home.run(row.run_id)
    if view == "metrics":
        if cursor:
            return new_steps_page(run, row, keys, limit, cursor)
        return curves_page(run, row, keys, matches, limit)
    # None if the config is gone or damaged; the logs are readable all the same.
    config = run.find_config()
    refuse_if_of_sealed(config, "of its logs only the metrics can be read")
    redact = redactor_for(home, config.env_dir if config else None)
    reader = TextReader(run, row, redact, limit, matches)
    return _text_page(reader, view, keys, cursor)


def _check_arguments(view: str, limit: int) -> None:
    """Raise UserError BAD_ARGUMENT if the view does not exist or the limit is out of range."""
    if view not in VIEWS:
        raise _bad_argument("view", f"view {view!r} does not exist", f"Views: {', '.join(VIEWS)}.")
    if isinstance(limit, bool) or not 1 <= limit <= MOST_ROWS:
        raise _bad_argument("limit", f"limit {limit} is not from 1 to {MOST_ROWS}", "Use limit=50.")


def _text_page(
    reader: TextReader, view: str, keys: Sequence[str], cursor: str
) -> EventsPage | ConsolePage | ErrorPage:
    """Make a page of a view that shows text: events, console or error. `keys` are names of events.

    Raises UserError BAD_CURSOR if `cursor` is not a cursor of this view.
    """
    if view == "events":
        return events_page(reader, keys, cursor)
    if view == "console":
        return console_page(reader, cursor)
    return error_page(reader, cursor)


def _bad_argument(field: str, message: str, hint: str) -> UserError:
    """Make the error BAD_ARGUMENT for the argument `field`."""
    return UserError("BAD_ARGUMENT", message, hint=hint, field=field)
