"""What a run wrote, a page at a time: metrics, events, console, error.

Every cursor is a byte offset, so it holds across restarts of server and machine. Pages are read
by seeking (engine/core/paging.py). Text is cleaned and secrets are hidden before it is searched or
shown.
"""

from collections.abc import Sequence

from engine.core.errors import UserError
from engine.home.run_dir import Home
from engine.home.sanitize import redactor_for
from engine.home.store import Store
from engine.reading.metrics_pages import CurvesPage, NewStepsPage, curves_page, new_steps_page
from engine.reading.search import matcher
from engine.reading.text_pages import (
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
    """One page of a run's metrics, events, console or error.

    Without a cursor: curves as a whole, thinned; of events and console the newest lines. With
    `next_cursor` of an earlier page: what came since, or, once a run has ended, what came before.
    `older_cursor` always leads to what came before.

    Args:
        keys: columns of metrics, or names of events; empty chooses.
        grep: plain text, letter case ignored; `|` separates alternatives, `.*` leaves a gap, `^`
            and `$` stand for the ends of a line. Of metrics it chooses the columns.
        limit: rows or lines, 1 to 200; curves have at most 30 points.

    Raises UserError RUN_NOT_FOUND, BAD_ARGUMENT, BAD_CURSOR.
    """
    if view not in VIEWS:
        raise _bad("view", f"view {view!r} does not exist", f"Views: {', '.join(VIEWS)}.")
    if isinstance(limit, bool) or not 1 <= limit <= MOST_ROWS:
        raise _bad("limit", f"limit {limit} is not from 1 to {MOST_ROWS}", "Use limit=50.")
    search = matcher(grep)
    matches = search if grep else None
    with Store(home) as store:
        row = store.get_run(run_id)
    run = home.run(row.run_id)
    if view == "metrics":
        if cursor:
            return new_steps_page(run, row, keys, limit, cursor)
        return curves_page(run, row, keys, matches, limit)
    config = run.find_config()  # the logs of a run with a damaged config are what is wanted then
    redact = redactor_for(home, config.env_dir if config else None)
    reader = TextReader(run, row, redact, limit, matches)
    if view == "events":
        return events_page(reader, keys, cursor)
    if view == "console":
        return console_page(reader, cursor)
    return error_page(reader, cursor)


def _bad(field: str, message: str, hint: str) -> UserError:
    return UserError("BAD_ARGUMENT", message, hint=hint, field=field)
