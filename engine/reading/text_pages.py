"""Text of a run as pages: its events, the console of its attempts, and how it failed."""

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
from engine.reading.cursors import Cursor, parse_cursor
from engine.reading.search import Matches
from engine.records.lines.line_record import skipped_lines

_LINE_CHARS = 500
_LINES_CHARS = BODY_CHARS - 2000  # for lines, beside what else a page says
_LINES_CHARS_OF_ERROR = _LINES_CHARS - 2500  # less: the error stands beside them
_EVENT_KEYS = ("time", "event", "step")  # what is left of an event that is too long


@dataclass(frozen=True)
class Links:
    """Cursors of a page; `older_cursor` is None where nothing comes before it."""

    next_cursor: str
    older_cursor: str | None


@dataclass(frozen=True)
class EventsPage(ReplyBase):
    """Events of a run, each with whatever fields it has."""

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
    """How the trainer's process ended: a return code, or the signal that killed it."""

    rc: int | None = None
    signal: int | None = None


@dataclass(frozen=True)
class ShownFailure:
    """Why a run failed; without fields where it has not.

    Attributes:
        kind: a failure kind of engine/core/errors.py.
        evidence: what the trainer recorded of it.
        hint, call: what to do next.
        last_checkpoint: folder name, "" where there is none.
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
    """How a run failed, with the last lines it printed."""

    error: ShownFailure


class TextReader:
    """Reads pages of cleaned lines of one run.

    Attributes:
        limit: lines of a page.
        matches: the search a line must pass; None lets every line pass.
    """

    def __init__(
        self, run: RunDir, row: RunRow, redact: Redactor, limit: int, matches: Matches | None
    ) -> None:
        self.run = run
        self.row = row
        self.redact = redact
        self.limit = limit
        self.matches = matches

    @property
    def is_alive(self) -> bool:
        return self.row.state not in TERMINAL

    @property
    def attempts(self) -> list[int]:
        """The attempts that printed something; the last one where none did."""
        numbers = range(1, self.row.attempt + 1)
        logged = [number for number in numbers if self.run.log(number).exists()]
        return logged or [self.row.attempt]

    def passes(self, text: str) -> bool:
        """Whether the search matches a line, as it is shown: with its secrets hidden."""
        return self.matches is None or self.matches(self.redact.text(text))

    def page(self, path: Path, cursor: Cursor, passes: Matches) -> Page:
        """The lines of `path` before or after the cursor that pass."""
        if cursor.offset is None:
            return page_before(path, complete_size(path), self.limit, passes)
        if cursor.older:
            return page_before(path, cursor.offset, self.limit, passes)
        return page_after(path, min(cursor.offset, complete_size(path)), self.limit, passes)

    def shown(self, text: str) -> str:
        """A line as a page shows it."""
        return clip(self.redact.text(text), _LINE_CHARS)

    def warnings(self, page: Page) -> list[str]:
        """That a search was not carried to the end of the file, where it was not."""
        if self.matches is None or page.scanned < BUDGET:
            return []
        return [f"The search stopped after {page.scanned / 1e6:.1f} MB; the cursor continues it."]


def events_page(reader: TextReader, keys: Sequence[str], cursor: str) -> EventsPage:
    """Events, those called one of `keys` where names are given. Raises UserError BAD_CURSOR."""
    start = parse_cursor(cursor, "events") if cursor else Cursor(0, None, older=True)

    def passes(text: str) -> bool:
        return reader.passes(text) and (not keys or (_parsed(text) or {}).get("event") in keys)

    path, run_id = reader.run.events, reader.row.run_id
    page = reader.page(path, start, passes)
    parsed = {line.start: _parsed(line.text) for line in page.lines}
    shown = {
        start: _shown_event(reader, fields)
        for start, fields in parsed.items()
        if fields is not None
    }
    lines = [line for line in page.lines if line.start in shown]
    skipped = len(page.lines) - len(lines)
    lines, page = _fitted(lines, page, start.older, lambda line: json_chars(shown[line.start]))
    events = [shown[line.start] for line in lines]
    last = str(events[-1].get("event", "")) if events else ""
    links = _links(reader, cursor, page, path)
    return EventsPage(
        summary=f"{counted(len(events), 'event')} of {run_id}"
        + (f", the last is {last}." if last else "."),
        run_id=run_id,
        state=reader.row.state,
        view="events",
        events=events,
        warnings=reader.warnings(page) + skipped_lines(skipped),
        next_cursor=links.next_cursor,
        older_cursor=links.older_cursor,
    )


def _shown_event(reader: TextReader, fields: JsonObject) -> JsonObject:
    """An event cleaned; of a very long one its name, time and step, and its message cut."""
    event = reader.redact.value(fields)
    if json_chars(event) <= 2 * _LINE_CHARS:
        return event
    message = clip(str(event.get("message", "")), _LINE_CHARS)
    return {name: event[name] for name in _EVENT_KEYS if name in event} | {"message": message}


def console_page(reader: TextReader, cursor: str, most_chars: int = _LINES_CHARS) -> ConsolePage:
    """Lines of the last attempt, or of the cursor's. Raises UserError BAD_CURSOR."""
    row = reader.row
    newest = Cursor(reader.attempts[-1], None, older=True)
    start = parse_cursor(cursor, "console") if cursor else newest
    path = reader.run.log(start.attempt)
    page = reader.page(path, start, reader.passes)
    lines, page = _fitted(
        page.lines, page, start.older, lambda line: json_chars(reader.shown(line.text)), most_chars
    )
    texts = [reader.shown(line.text) for line in lines]
    # A progress bar has no newline yet; it is shown, and read again once it is complete.
    writing = torn_tail(path) if start.offset is None else ""
    if writing and reader.passes(writing):
        texts.append(reader.shown(writing))
    calls: list[Call] = []
    if not texts and not cursor and reader.matches is None and row.kind == "train":
        # Nothing went wrong and nothing was printed: what the run did stands in its curves.
        calls = [Call("read_logs", {"run_id": row.run_id, "view": "metrics"})]
    links = _links(reader, cursor, page, path, start.attempt)
    return ConsolePage(
        summary=f"{counted(len(texts), 'line')} of attempt {start.attempt} of {row.run_id}.",
        run_id=row.run_id,
        state=row.state,
        view="console",
        lines=texts,
        warnings=reader.warnings(page),
        next=calls,
        attempt=start.attempt,
        next_cursor=links.next_cursor,
        older_cursor=links.older_cursor,
    )


def error_page(reader: TextReader, cursor: str) -> ErrorPage:
    """How the run failed, and the console as in `console_page`. Raises UserError BAD_CURSOR."""
    row = reader.row
    console = console_page(
        reader, cursor.replace("error", "console", 1), most_chars=_LINES_CHARS_OF_ERROR
    )
    older = console.older_cursor
    failed = row.state in ("failed", "cancelled") or bool(row.reason_kind)
    recorded = read_object(reader.run.failure)
    failure = _failure(reader, recorded) if failed else ShownFailure()
    calls, summary = console.next, f"{row.run_id} is {row.state} and has not failed."
    if failed:
        message = row.reason or str(recorded.get("message") or "")
        reason = reader.redact.text(message) or "no reason was recorded"
        kind = failure.kind or "unknown"
        summary = clip(f"{row.run_id} {row.state} ({kind}): {reason}", 400)
        if failure.last_checkpoint and row.state != "done":
            calls = [Call("submit_train", {"resume": row.run_id})]
    return ErrorPage(
        summary=summary,
        run_id=row.run_id,
        state=row.state,
        view="error",
        lines=console.lines,
        warnings=console.warnings,
        next=calls,
        attempt=console.attempt,
        next_cursor=console.next_cursor.replace("console", "error", 1),
        older_cursor=older.replace("console", "error", 1) if older else None,
        error=failure,
    )


def _failure(reader: TextReader, recorded: JsonObject) -> ShownFailure:
    """What the run's row, and else what its trainer `recorded`, says of the failure."""
    row, redact = reader.row, reader.redact
    ended, latest = read_object(reader.run.exit_record), reader.run.latest_checkpoint()
    hint = row.hint or Hint.from_json(recorded.get("hint"))
    hint = Hint(clip(hint.text, 600), hint.call)
    return ShownFailure(
        kind=redact.text(row.reason_kind or str(recorded.get("kind") or "")),
        message=redact.text(clip(row.reason or str(recorded.get("message") or ""), 600)),
        evidence=redact.text(clip(str(recorded.get("evidence") or ""), 800)),
        hint=redact.text(str(hint)),
        call=Call.from_json(redact.value(hint.call.to_json())) if hint.call else None,
        last_checkpoint=latest.name if latest else "",
        exit=ExitStatus(redact.value(ended.get("rc")), redact.value(ended.get("signal"))),
    )


def _fitted(
    lines: list[Line],
    page: Page,
    older: bool,
    chars: Callable[[Line], int],
    most_chars: int = _LINES_CHARS,
) -> tuple[list[Line], Page]:
    """As many lines as a result holds, from the end that continues what was read before."""
    taken: list[Line] = []
    for line in reversed(lines) if older else lines:
        most_chars -= chars(line) + 1
        if most_chars < 0 and taken:
            break
        taken.append(line)
    if len(taken) == len(lines):
        return lines, page
    if older:
        taken.reverse()
        return taken, replace(page, lines=taken, start=taken[0].start)
    return taken, replace(page, lines=taken, end=taken[-1].end)


def _links(
    reader: TextReader, cursor: str, page: Page, path: Path, attempt: int | None = None
) -> Links:
    """Where to go on: in the direction `cursor` led; without one, to newer lines while the run
    lives. At the ends of an attempt's console (`attempt` given) it goes on into the next one."""
    prefix = "events" if attempt is None else f"console:{attempt}"
    older = f"{prefix}:{page.start}:older" if page.start > 0 else ""
    at_end = page.end >= complete_size(path)
    newer = f"{prefix}:{page.end}" if reader.is_alive or not at_end else ""
    if attempt is not None:
        before = [number for number in reader.attempts if number < attempt]
        after = [number for number in reader.attempts if number > attempt]
        if not older and before:
            size = complete_size(reader.run.log(before[-1]))
            older = f"console:{before[-1]}:{size}:older"
        if after and at_end:
            newer = f"console:{after[0]}:0"
    backwards = cursor.endswith(":older") or (not cursor and not reader.is_alive)
    return Links(older if backwards else newer, older or None)


def _parsed(text: str) -> JsonObject | None:
    """The JSON object that a line spells, None where it spells none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
