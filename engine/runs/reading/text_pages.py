"""Pages of a run's text: its events, the console of its attempts, and its failure."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from engine.core.files import JsonObject, read_object
from engine.core.format import counted
from engine.core.hints import Call, Hint
from engine.core.paging import BUDGET, Line, Page, complete_size, page_after, page_before, torn_tail
from engine.core.reply import BODY_CHARS, ReplyBase
from engine.home.rows import TERMINAL, RunRow
from engine.home.run_dir import RunDir
from engine.home.sanitize import Redactor, clip, json_chars
from engine.records.lines.line_record import skipped_lines
from engine.runs.reading.cursors import Cursor, parse_cursor
from engine.runs.reading.search import Matches

_LINE_CHARS = 500  # longer lines are cut to so many characters
_LINES_CHARS = BODY_CHARS - 2000  # of all lines; the rest is for the other fields of a page
_LINES_CHARS_OF_ERROR = _LINES_CHARS - 2500  # less, because the page also has the error
_EVENT_KEYS = ("time", "event", "step")  # the fields that an event keeps if it is too long
_SUMMARY_CHARS, _MESSAGE_CHARS, _EVIDENCE_CHARS = 400, 600, 800  # of a failure's texts


@dataclass(frozen=True)
class Links:
    """The two cursors of a page.

    Attributes:
        next_cursor: continues the reading; "" if nothing follows.
        older_cursor: leads to the lines before the page; None if there are none.
    """

    next_cursor: str
    older_cursor: str | None


@dataclass(frozen=True)
class EventsPage(ReplyBase):
    """Events of a run. The fields of an event depend on its name."""

    summary: str
    run_id: str
    state: str
    view: str
    events: list[JsonObject]
    warnings: list[str]
    next_cursor: str
    older_cursor: str | None
    next: list[Call] = field(default_factory=list)


@dataclass(frozen=True)
class ConsolePage(ReplyBase):
    """Lines that an attempt of a run printed."""

    summary: str
    run_id: str
    state: str
    view: str
    lines: list[str]
    warnings: list[str]
    next: list[Call]
    attempt: int
    next_cursor: str
    older_cursor: str | None


@dataclass(frozen=True)
class ExitStatus:
    """How the trainer's process ended: its return code, or the signal that killed it. The other one
    is None; both are None if nothing was recorded."""

    rc: int | None = None
    signal: int | None = None


@dataclass(frozen=True)
class ShownFailure:
    """The reason why a run failed; all fields are None if it has not failed.

    Attributes:
        kind: a failure kind of engine/core/errors.py.
        evidence: what the trainer recorded about the failure.
        hint, call: what to do next, in words and as a tool call.
        last_checkpoint: the folder name of the last checkpoint; "" if there is none.
    """

    kind: str | None = None
    message: str | None = None
    evidence: str | None = None
    hint: str | None = None
    call: Call | None = None
    last_checkpoint: str | None = None
    exit: ExitStatus | None = None


@dataclass(frozen=True)
class ErrorPage(ConsolePage):
    """The reason why a run failed, with the last lines that it printed."""

    error: ShownFailure


class TextReader:
    """Reads pages of cleaned lines of one run.

    Attributes:
        run, row: the run's folder and its database row.
        redact: hides secrets.
        limit: the most lines of a page.
        matches: the search that lines must match; None without a search.
    """

    def __init__(
        self, run: RunDir, row: RunRow, redact: Redactor, limit: int, matches: Matches | None
    ) -> None:
        """Keep what all pages of the run need; the class describes the arguments."""
        self.run = run
        self.row = row
        self.redact = redact
        self.limit = limit
        self.matches = matches

    @property
    def is_alive(self) -> bool:
        """Whether the run has not ended yet."""
        return self.row.state not in TERMINAL

    @property
    def attempts(self) -> list[int]:
        """The numbers of the attempts that printed something. If none did, only the last attempt's
        number."""
        numbers = range(1, self.row.attempt + 1)
        logged = [number for number in numbers if self.run.log(number).exists()]
        return logged or [self.row.attempt]

    def passes(self, text: str) -> bool:
        """Whether a line, with its secrets hidden, matches the search. True if there is no
        search."""
        return self.matches is None or self.matches(self.redact.text(text))

    def page(self, path: Path, cursor: Cursor, passes: Matches) -> Page:
        """Read the lines of `path` before or after the cursor for which `passes` returns True, at
        most `self.limit` of them."""
        if cursor.offset is None:
            return page_before(path, complete_size(path), self.limit, passes)
        if cursor.older:
            return page_before(path, cursor.offset, self.limit, passes)
        # The file may have become shorter than the offset: a resumed run cuts its logs.
        return page_after(path, min(cursor.offset, complete_size(path)), self.limit, passes)

    def shown_line(self, text: str) -> str:
        """Return a line as a page shows it: with secrets hidden, and cut if it is long."""
        return clip(self.redact.text(text), _LINE_CHARS)

    def warnings(self, page: Page) -> list[str]:
        """Return a warning if the search stopped because it had read the most text that one call
        may read; else []."""
        if self.matches is None or page.scanned < BUDGET:
            return []
        return [f"The search stopped after {page.scanned / 1e6:.1f} MB; the cursor continues it."]


def events_page(reader: TextReader, keys: Sequence[str], cursor: str) -> EventsPage:
    """Make a page of events, from the cursor on; "" starts with the newest events. If `keys` is not
    empty, only events with these names are shown. Lines that are not JSON objects are left out and
    counted in a warning.

    Raises UserError BAD_CURSOR if `cursor` is not a cursor of events.
    """
    newest = Cursor(attempt=0, offset=None, older=True)
    position = parse_cursor(cursor, "events") if cursor else newest
    path = reader.run.events
    event_page = reader.page(path, position, _event_filter(reader, keys))
    shown_events = _fit_events(reader, event_page, older=position.older)
    cursors = _cursors_of_page(reader, cursor, shown_events.page, path)
    return EventsPage(
        summary=_event_sentence(reader.row, shown_events.events),
        run_id=reader.row.run_id,
        state=reader.row.state,
        view="events",
        events=shown_events.events,
        warnings=reader.warnings(shown_events.page) + skipped_lines(shown_events.skipped),
        next_cursor=cursors.next_cursor,
        older_cursor=cursors.older_cursor,
    )


@dataclass(frozen=True)
class _ShownEvents:
    """The events that fit into a reply, as the reply shows them.

    Attributes:
        page: the page with only their lines.
        skipped: how many lines of the whole page are not JSON objects.
    """

    events: list[JsonObject]
    page: Page
    skipped: int


def _fit_events(reader: TextReader, page: Page, *, older: bool) -> _ShownEvents:
    """Select the events of the page that fit into a reply: the first ones, or the last ones if
    `older` is set, because the reader then goes backwards."""
    events = _events_by_offset(reader, page.lines)
    event_lines = [line for line in page.lines if line.start in events]
    shown_lines, fitted_page = _fit_lines(
        event_lines,
        page,
        older=older,
        chars_of_line=lambda line: json_chars(events[line.start]),
    )
    return _ShownEvents(
        events=[events[line.start] for line in shown_lines],
        page=fitted_page,
        skipped=len(page.lines) - len(event_lines),
    )


def _event_filter(reader: TextReader, keys: Sequence[str]) -> Matches:
    """Make the test that a line of the event log must pass to be shown: the line must match the
    reader's search, and if `keys` is not empty, its event must have one of these names."""

    def passes(text: str) -> bool:
        """Whether a page shows the line `text`."""
        if not reader.passes(text):
            return False
        if not keys:
            return True
        event = _parse_object(text)
        return event is not None and event.get("event") in keys

    return passes


def _events_by_offset(reader: TextReader, lines: Sequence[Line]) -> dict[int, JsonObject]:
    """Parse the events in `lines`, as a page shows them. Lines that are not JSON objects are left
    out. The keys are the offsets at which the lines start, because equal events may occur twice."""
    events: dict[int, JsonObject] = {}
    for line in lines:
        fields = _parse_object(line.text)
        if fields is not None:
            events[line.start] = _shown_event(reader, fields)
    return events


def _event_sentence(row: RunRow, events: Sequence[JsonObject]) -> str:
    """Write the summary of a page, such as "3 events of r-1, the last is checkpoint."."""
    last_event = str(events[-1].get("event", "")) if events else ""
    last_event_note = f", the last is {last_event}" if last_event else ""
    return f"{counted(len(events), 'event')} of {row.run_id}{last_event_note}."


def _shown_event(reader: TextReader, fields: JsonObject) -> JsonObject:
    """Return an event (`fields`, a line of events.jsonl) with its secrets hidden. An event of more
    than 1000 characters keeps only its time, name, step and a shortened message."""
    event = reader.redact.value(fields)
    if json_chars(event) <= 2 * _LINE_CHARS:
        return event
    message = clip(str(event.get("message", "")), _LINE_CHARS)
    return {name: event[name] for name in _EVENT_KEYS if name in event} | {"message": message}


def console_page(reader: TextReader, cursor: str, max_chars: int = _LINES_CHARS) -> ConsolePage:
    """Make a page of the lines that one attempt of the run printed, at most `max_chars` characters.
    (A run that was resumed has several attempts.)

    `cursor` names the attempt and the place in its console; "" shows the newest lines of the last
    attempt that printed something. Raises UserError BAD_CURSOR if it is not a cursor of a console.
    """
    row = reader.row
    position = _console_position(reader, cursor)
    path = reader.run.log(position.attempt)
    page = _console_lines(reader, path, position, max_chars)
    # If the position has no offset, the page has the newest lines.
    texts = _console_texts(reader, path, page, at_newest=position.offset is None)
    # A page with a cursor or a search may be empty although the run has printed something.
    prints_nothing = not texts and not cursor and reader.matches is None
    cursors = _cursors_of_page(reader, cursor, page, path, position.attempt)
    return ConsolePage(
        summary=f"{counted(len(texts), 'line')} of attempt {position.attempt} of {row.run_id}.",
        run_id=row.run_id,
        state=row.state,
        view="console",
        lines=texts,
        warnings=reader.warnings(page),
        next=_calls_without_output(row) if prints_nothing else [],
        attempt=position.attempt,
        next_cursor=cursors.next_cursor,
        older_cursor=cursors.older_cursor,
    )


def _console_position(reader: TextReader, cursor: str) -> Cursor:
    """Return where a page of a console begins: at the cursor, or without one at the end of the last
    attempt's console. Raises UserError BAD_CURSOR if `cursor` is not a cursor of a console."""
    if cursor:
        return parse_cursor(cursor, "console")
    return Cursor(attempt=reader.attempts[-1], offset=None, older=True)


def _console_lines(reader: TextReader, path: Path, position: Cursor, max_chars: int) -> Page:
    """Read the lines of the console `path` that match the search, before or after a position. As
    they are shown, they have at most `max_chars` characters together."""
    page = reader.page(path, position, reader.passes)
    _, fitted_page = _fit_lines(
        page.lines,
        page,
        older=position.older,
        chars_of_line=lambda line: json_chars(reader.shown_line(line.text)),
        max_chars=max_chars,
    )
    return fitted_page


def _console_texts(reader: TextReader, path: Path, page: Page, *, at_newest: bool) -> list[str]:
    """Return the lines of a page of the console `path` as they are shown. If the page is
    `at_newest` lines, a last line without a newline is added."""
    texts = [reader.shown_line(line.text) for line in page.lines]
    return texts + _unfinished_lines(reader, path) if at_newest else texts


def _calls_without_output(row: RunRow) -> list[Call]:
    """Suggest reading the curves of a training run that has printed nothing, since they show what
    it did. Returns [] for a run of another kind."""
    if row.kind != "train":
        return []
    return [Call("read_logs", {"run_id": row.run_id, "view": "metrics"})]


def _unfinished_lines(reader: TextReader, path: Path) -> list[str]:
    """Read the last line of the console file `path` if it has no newline yet, such as a progress
    bar; else return []. A later page shows the line again once it is complete."""
    unfinished_line = torn_tail(path)
    if unfinished_line and reader.passes(unfinished_line):
        return [reader.shown_line(unfinished_line)]
    return []


def error_page(reader: TextReader, cursor: str) -> ErrorPage:
    """Make a page with the run's failure, and with the same console lines as `console_page`. If the
    run has not failed, `error` of the page has no values. If the run left a checkpoint, `next`
    suggests resuming it.

    Raises UserError BAD_CURSOR if `cursor` is not a cursor of the view "error".
    """
    row = reader.row
    # A cursor of this view, such as "error:2:4096", is a console's cursor under another name.
    console = console_page(
        reader, cursor.replace("error", "console", 1), max_chars=_LINES_CHARS_OF_ERROR
    )
    # While a run is being stopped, its row has the reason, but not yet one of these states. A run
    # that was cancelled is shown like one that failed.
    has_failed = row.state in ("failed", "cancelled") or bool(row.reason_kind)
    failure_record = read_object(reader.run.failure)
    failure = ShownFailure()
    summary = f"{row.run_id} is {row.state} and has not failed."
    if has_failed:
        failure = _shown_failure(reader, failure_record)
        summary = _failure_sentence(reader, failure_record, failure.kind)
    # Without a failure `last_checkpoint` is None.
    can_resume = bool(failure.last_checkpoint) and row.state != "done"
    resume = Call("submit_train", {"resume": row.run_id})
    page = _as_error_page(console, summary, failure)
    return replace(page, next=[resume]) if can_resume else page


def _as_error_page(console: ConsolePage, summary: str, failure: ShownFailure) -> ErrorPage:
    """Turn a page of the console into a page of the view "error", with the run's failure and the
    sentence `summary` about it."""
    older_cursor = console.older_cursor
    return ErrorPage(
        summary=summary,
        run_id=console.run_id,
        state=console.state,
        view="error",
        lines=console.lines,
        warnings=console.warnings,
        next=console.next,
        attempt=console.attempt,
        next_cursor=console.next_cursor.replace("console", "error", 1),
        older_cursor=older_cursor.replace("console", "error", 1) if older_cursor else None,
        error=failure,
    )


def _failure_sentence(reader: TextReader, failure_record: JsonObject, kind: str | None) -> str:
    """Write the summary of a failure: the run, its state, the kind of the failure and the reason.
    `failure_record` is what the trainer wrote about its failure; {} if it wrote nothing."""
    row = reader.row
    message = row.reason or str(failure_record.get("message") or "")
    reason = reader.redact.text(message) or "no reason was recorded"
    return clip(f"{row.run_id} {row.state} ({kind or 'unknown'}): {reason}", _SUMMARY_CHARS)


def _shown_failure(reader: TextReader, failure_record: JsonObject) -> ShownFailure:
    """Return the failure of a run, with texts cut and secrets hidden.

    `failure_record` is what the trainer wrote about its failure; {} if it wrote nothing. If the
    run's database row has a kind, message or hint too, the row's is shown.
    """
    row = reader.row
    redact = reader.redact
    kind = row.reason_kind or str(failure_record.get("kind") or "")
    message = row.reason or str(failure_record.get("message") or "")
    evidence = str(failure_record.get("evidence") or "")
    hint = row.hint or Hint.from_json(failure_record.get("hint"))
    checkpoint = reader.run.latest_checkpoint()
    failure = ShownFailure(
        kind=redact.text(kind),
        message=redact.text(clip(message, _MESSAGE_CHARS)),
        evidence=redact.text(clip(evidence, _EVIDENCE_CHARS)),
        last_checkpoint=checkpoint.name if checkpoint else "",
        exit=_exit_status(reader),
    )
    return _with_hint(redact, failure, hint)


def _with_hint(redact: Redactor, failure: ShownFailure, hint: Hint) -> ShownFailure:
    """Add a hint to the failure, in words and as a call, with its text cut and its secrets
    hidden."""
    short_hint = Hint(clip(hint.text, _MESSAGE_CHARS), hint.call)
    call = Call.from_json(redact.value(hint.call.to_json())) if hint.call else None
    return replace(failure, hint=redact.text(str(short_hint)), call=call)


def _exit_status(reader: TextReader) -> ExitStatus:
    """Read how the trainer's process ended. Both values are None if that was not recorded."""
    exit_record = read_object(reader.run.exit_record)
    return ExitStatus(
        rc=reader.redact.value(exit_record.get("rc")),
        signal=reader.redact.value(exit_record.get("signal")),
    )


def _fit_lines(
    lines: list[Line],
    page: Page,
    *,
    older: bool,
    chars_of_line: Callable[[Line], int],
    max_chars: int = _LINES_CHARS,
) -> tuple[list[Line], Page]:
    """Select the lines that fit into a reply. Returns (these lines in the order of the file, the
    page with only these lines, so that its cursors lead to the others).

    Args:
        lines: the lines of `page` that can be shown.
        older: keep the last lines, because the reader goes backwards; else keep the first ones.
        chars_of_line: returns the number of characters of a line in the reply.
        max_chars: the most characters of all lines together.
    """
    most_wanted_first = lines[::-1] if older else lines
    shown_lines = _lines_within(most_wanted_first, chars_of_line, max_chars)
    if len(shown_lines) == len(lines):  # all fit
        return lines, page
    if older:
        shown_lines.reverse()  # back to the order of the file
        return shown_lines, replace(page, lines=shown_lines, start=shown_lines[0].start)
    return shown_lines, replace(page, lines=shown_lines, end=shown_lines[-1].end)


def _lines_within(
    lines: Sequence[Line], chars_of_line: Callable[[Line], int], max_chars: int
) -> list[Line]:
    """Return as many of the first lines as fit into `max_chars` characters; `chars_of_line` counts
    those of a line. The first line is always included, however long it is."""
    shown_lines: list[Line] = []
    remaining_chars = max_chars
    for line in lines:
        remaining_chars -= chars_of_line(line) + 1  # 1: the comma after it
        if remaining_chars < 0 and shown_lines:
            break
        shown_lines.append(line)
    return shown_lines


def _cursors_of_page(
    reader: TextReader, cursor: str, page: Page, path: Path, attempt: int | None = None
) -> Links:
    """Make the cursors for the pages before and after a page of `path`.

    Args:
        cursor: the cursor that led to this page, whose direction `next_cursor` keeps; "" for a
            first page.
        attempt: the attempt whose console `path` is; None for the events.
    """
    at_end = page.end >= complete_size(path)
    older_cursor = _older_cursor(reader, page, attempt)
    newer_cursor = _newer_cursor(reader, page, attempt, at_end=at_end)
    if cursor:
        goes_back = cursor.endswith(":older")
    else:  # the page shows the newest lines, and a run that has ended writes no more
        goes_back = not reader.is_alive
    return Links(
        next_cursor=older_cursor if goes_back else newer_cursor, older_cursor=older_cursor or None
    )


def _view_in_cursor(attempt: int | None) -> str:
    """Return the beginning of a cursor: "console:2" for the console of attempt 2, "events" if
    `attempt` is None."""
    return "events" if attempt is None else f"console:{attempt}"


def _older_cursor(reader: TextReader, page: Page, attempt: int | None) -> str:
    """Make the cursor of the lines before a page; "" if there are none. Before an attempt's console
    comes that of the earlier attempt.

    Args:
        attempt: the attempt whose console the page shows; None for the events.
    """
    if page.start > 0:
        return f"{_view_in_cursor(attempt)}:{page.start}:older"
    if attempt is None:
        return ""
    earlier_attempts = [number for number in reader.attempts if number < attempt]
    if not earlier_attempts:
        return ""
    previous = earlier_attempts[-1]
    end = complete_size(reader.run.log(previous))
    return f"{_view_in_cursor(previous)}:{end}:older"


def _newer_cursor(reader: TextReader, page: Page, attempt: int | None, *, at_end: bool) -> str:
    """Make the cursor of the lines after a page; "" if there will be none. After an attempt's
    console comes that of the next attempt.

    Args:
        attempt: the attempt whose console the page shows; None for the events.
        at_end: whether the page reaches the end of its file.
    """
    later_attempts: list[int] = []
    if attempt is not None:
        later_attempts = [number for number in reader.attempts if number > attempt]
    if at_end and later_attempts:
        return f"{_view_in_cursor(later_attempts[0])}:0"
    if at_end and not reader.is_alive:
        return ""
    return f"{_view_in_cursor(attempt)}:{page.end}"


def _parse_object(text: str) -> JsonObject | None:
    """Parse the JSON object in a line of text. Returns None if the line holds anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # RecursionError: nested too deeply
        return None
    return value if isinstance(value, dict) else None
