"""What a run wrote, a page at a time: metrics, events, console, error.

Every cursor is a byte offset, so it holds across restarts of server and machine. Pages are read
by seeking (engine/core/paging.py). Text is cleaned and secrets are hidden before it is searched or
shown.
"""

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.core.errors import UserError
from engine.core.files import read_object
from engine.core.format import counted
from engine.core.hints import Call, Hint
from engine.core.metrics import METRICS
from engine.core.paging import BUDGET, Line, Page, complete_size, page_after, page_before, torn_tail
from engine.core.reply import BODY_CHARS
from engine.home.halves import choosing
from engine.home.rows import TERMINAL, RunRow
from engine.home.run_dir import Home, RunDir
from engine.home.sanitize import Redactor, clean_value, clip, json_chars, redactor_for
from engine.home.store import Store
from engine.records.lines.curves import (
    POINTS,
    by_step,
    load_metrics,
    main_columns,
    number,
    short,
    summary_of,
    thin,
)

VIEWS = ("metrics", "events", "console", "error")
MOST_ROWS = 200
_MOST_KEYS = 14  # two extremes each beside first and last: 30 points
_DEFAULT_KEYS = 10
_LINE_CHARS = 500
_LONGEST_GREP = 200
_ROOM = BODY_CHARS - 2000  # for lines, beside what else a page says


def read_logs(
    home: Home,
    run_id: str,
    view: str = "metrics",
    keys: Sequence[str] = (),
    grep: str = "",
    limit: int = 50,
    cursor: str = "",
) -> dict[str, Any]:
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
    matches = matcher(grep)
    with Store(home) as store:
        row = store.get_run(run_id)
    run = home.run(row.run_id)
    if view == "metrics":
        return _metrics(run, row, list(keys), matches if grep else None, limit, cursor)
    config = run.find_config()  # the logs of a run with a damaged config are what is wanted then
    redact = redactor_for(home, config.env_dir if config else None)
    reader = _TextReader(run, row, redact, limit, matches if grep else None)
    if view == "events":
        return _events(reader, list(keys), cursor)
    if view == "console":
        return _console(reader, cursor)
    return _error(reader, cursor)


def matcher(pattern: str) -> Callable[[str], bool]:
    """A search that takes time in proportion to the line, whatever the pattern.

    Raises UserError BAD_ARGUMENT when the pattern is too long.
    """
    if len(pattern) > _LONGEST_GREP:
        raise _bad(
            "grep",
            f"grep has {len(pattern)} characters",
            f"Give at most {_LONGEST_GREP}: plain text, | for alternatives, .* for a gap.",
        )
    choices = [_Choice.parse(part) for part in pattern.lower().split("|") if part]
    return lambda line: any(choice.is_in(line.lower()) for choice in choices)


@dataclass(frozen=True)
class _Choice:
    parts: tuple[str, ...]
    from_start: bool
    to_end: bool

    @staticmethod
    def parse(text: str) -> "_Choice":
        from_start, to_end = text.startswith("^"), text.endswith("$")
        body = text[from_start : len(text) - to_end]
        return _Choice(tuple(body.replace("\\", "").split(".*")), from_start, to_end)

    def is_in(self, line: str) -> bool:
        if self.from_start and self.to_end and len(self.parts) == 1:
            return line == self.parts[0]
        if self.from_start and not line.startswith(self.parts[0]):
            return False
        if self.to_end and not line.endswith(self.parts[-1]):
            return False
        position = 0
        for part in self.parts:
            position = line.find(part, position)
            if position < 0:
                return False
            position += len(part)
        return True


# --- metrics ----------------------------------------------------------------------------------


def _metrics(
    run: RunDir,
    row: RunRow,
    keys: list[str],
    matches: Callable[[str], bool] | None,
    limit: int,
    cursor: str,
) -> dict[str, Any]:
    if cursor:
        return _new_metrics(run, row, keys, limit, cursor)
    metrics = load_metrics(run.metrics)
    available = metrics.columns
    warnings = []
    if matches is not None:
        keys = [name for name in available if matches(name)]
    chosen = _columns(keys, available) if keys else main_columns(available, _DEFAULT_KEYS)
    if len(chosen) > _MOST_KEYS:
        warnings.append(f"The first {_MOST_KEYS} of {len(chosen)} columns are shown.")
        chosen = chosen[:_MOST_KEYS]
    if metrics.sampled:
        warnings.append("The file is long: before its end, steps are a sample.")
    exam = choosing(run) if any(name.startswith("heldout_") for name in chosen) else {}
    kept = thin(metrics.lines, chosen, min(POINTS, limit))
    curves = {name: metrics.curve(name) for name in chosen}
    with_model = any("model" in line for line in kept)
    gone = f"{row.run_id} is {row.state}; its files were deleted." if run.deleted.exists() else ""
    result = {
        "summary": gone or _curve_sentence(row, metrics.lines, curves, len(kept), exam),
        "run_id": row.run_id,
        "state": row.state,
        "view": "metrics",
        "columns": ["step", *(["model"] if with_model else []), *chosen],
        "rows": [_cells(line, chosen, with_model) for line in kept],
        "curves": {name: summary_of(points) for name, points in curves.items() if points},
        "available": [name for name in available if name not in chosen][:60],
        "steps_logged": len(metrics.lines),
        **({"heldout": exam} if exam else {}),
        "next_cursor": "" if row.state in TERMINAL else f"metrics:{metrics.end}",
        "warnings": warnings,
        "next": [],
    }
    return _fit_rows(clean_value(result))


def _new_metrics(
    run: RunDir, row: RunRow, keys: list[str], limit: int, cursor: str
) -> dict[str, Any]:
    """The steps logged since the cursor, each in full."""
    offset = _parse_cursor(cursor, "metrics")[1]
    warnings = []
    if offset > complete_size(run.metrics):
        offset = 0
        warnings.append("The run went back to a checkpoint; its metrics are read from the start.")
    page = page_after(run.metrics, offset, limit)
    lines = by_step([found for line in page.lines if (found := _parsed(line.text)) is not None])
    available = list(dict.fromkeys(name for line in lines for name in line))
    names = [name for name in METRICS if name in available]
    names += [n for n in available if n not in METRICS and n not in ("step", "time", "model")]
    # A column that these few lines do not have is no mistake: evaluations come now and then.
    chosen = keys[:_MOST_KEYS] or main_columns(names, _DEFAULT_KEYS)
    more = page.end < complete_size(run.metrics) or row.state not in TERMINAL
    result = {
        "summary": f"{counted(len(lines), 'new step')} of {row.run_id}, which is {row.state}.",
        "run_id": row.run_id,
        "state": row.state,
        "view": "metrics",
        "columns": ["step", *clean_value(chosen)],
        "rows": [_cells(line, chosen, False) for line in lines],
        "next_cursor": f"metrics:{page.end}" if more else "",
        "warnings": warnings,
        "next": [],
    }
    ends = [line.end for line in page.lines]
    while json_chars(result) > BODY_CHARS and len(result["rows"]) > 1:
        result["rows"] = result["rows"][: len(result["rows"]) // 2]
        result["next_cursor"] = f"metrics:{ends[len(result['rows']) - 1]}"
    return result


def _columns(keys: Sequence[str], available: Sequence[str]) -> list[str]:
    for key in keys:
        if key not in available and key not in METRICS:
            near = difflib.get_close_matches(key, available, 1)
            guess = f" Did you mean {near[0]}?" if near else ""
            shown = ", ".join(list(available)[:40]) or "none yet"
            raise _bad("keys", f"no metric is called {key!r}", f"Logged: {shown}.{guess}")
    return list(dict.fromkeys(keys))


def _cells(line: dict[str, Any], columns: Sequence[str], with_model: bool) -> list[Any]:
    values = [number(line.get(name)) for name in columns]
    cells: list[Any] = [None if value is None else short(value) for value in values]
    return [line["step"], *([line.get("model")] if with_model else []), *cells]


def _curve_sentence(
    row: RunRow,
    lines: Sequence[dict[str, Any]],
    curves: dict[str, list[tuple[float, float]]],
    shown: int,
    exam: dict[str, Any],
) -> str:
    if not lines:
        return f"{row.run_id} is {row.state} and has logged no step yet."
    changes = [
        f"{name} {short(points[0][1])} to {short(points[-1][1])}"
        for name, points in list(curves.items())[:3]
        if points
    ]
    thinned = f" ({shown} of {len(lines)} points)" if shown < len(lines) else ""
    half = f" (heldout_*: {exam['tasks']} of {exam['of']} tasks, which choose)" if exam else ""
    curve = ", ".join(changes)
    return f"{row.run_id} is {row.state} at step {lines[-1]['step']}{thinned}: {curve}{half}."


def _fit_rows(result: dict[str, Any]) -> dict[str, Any]:
    """Names of an environment's metrics have no limit: leave out columns until it fits."""
    if json_chars(result) <= BODY_CHARS:
        return result
    while result["available"] and json_chars(result) > BODY_CHARS:
        result["available"] = result["available"][: len(result["available"]) // 2]
    while len(result["columns"]) > 2 and json_chars(result) > BODY_CHARS:
        gone = result["columns"].pop()
        result["rows"] = [cells[:-1] for cells in result["rows"]]
        result["curves"].pop(gone, None)
    return result


# --- text -------------------------------------------------------------------------------------


class _TextReader:
    """Pages of cleaned lines of one run."""

    def __init__(
        self,
        run: RunDir,
        row: RunRow,
        redact: Redactor,
        limit: int,
        matches: Callable[[str], bool] | None,
    ) -> None:
        self.run = run
        self.row = row
        self.redact = redact
        self.limit = limit
        self.matches = matches

    @property
    def live(self) -> bool:
        return self.row.state not in TERMINAL

    def wanted(self, text: str) -> bool:
        return self.matches is None or self.matches(self.redact.text(text))

    def page(
        self, path: Path, offset: int | None, older: bool, match: Callable[[str], bool]
    ) -> Page:
        """The lines before `offset` (None: the end) when `older`, else those after it."""
        if older or offset is None:
            end = complete_size(path) if offset is None else offset
            return page_before(path, end, self.limit, match)
        return page_after(path, min(offset, complete_size(path)), self.limit, match)

    def result(self, view: str, page: Page, body: list[Any], key: str) -> dict[str, Any]:
        return {
            "run_id": self.row.run_id,
            "state": self.row.state,
            "view": view,
            key: body,
            "warnings": _searched(page) if self.matches else [],
            "next": [],
        }


def _events(reader: _TextReader, keys: list[str], cursor: str) -> dict[str, Any]:
    _, offset, older = _parse_cursor(cursor, "events") if cursor else (0, None, True)

    def wanted(text: str) -> bool:
        return reader.wanted(text) and (not keys or (_parsed(text) or {}).get("event") in keys)

    path = reader.run.events
    page = reader.page(path, offset, older, wanted)
    shown = {
        line.start: _ShownEvent.of(reader, fields)
        for line in page.lines
        if (fields := _parsed(line.text)) is not None
    }
    lines = [line for line in page.lines if line.start in shown]
    lines, page = _fitting(lines, page, older, lambda line: shown[line.start].chars)
    events = [shown[line.start].fields for line in lines]
    result = reader.result("events", page, events, "events")
    name = events[-1].get("event", "") if events else ""
    result["summary"] = f"{counted(len(events), 'event')} of {reader.row.run_id}" + (
        f", the last is {name}." if name else "."
    )
    return result | _cursors(reader, cursor, "events", page, path, attempts=())


@dataclass(frozen=True)
class _ShownEvent:
    """An event cleaned and cut, and how many characters it takes."""

    fields: Mapping[str, Any]
    chars: int

    @staticmethod
    def of(reader: _TextReader, fields: Mapping[str, Any]) -> "_ShownEvent":
        event = reader.redact.value(fields)
        chars = json_chars(event)
        if chars > 2 * _LINE_CHARS:
            message = clip(str(event.get("message", "")), _LINE_CHARS)
            short_fields = {
                name: event[name] for name in ("time", "event", "step") if name in event
            }
            event = short_fields | {"message": message}
            chars = json_chars(event)
        return _ShownEvent(event, chars)


def _console(reader: _TextReader, cursor: str, room: int = _ROOM) -> dict[str, Any]:
    attempts = _attempts(reader)
    attempt, offset, older = (
        _parse_cursor(cursor, "console") if cursor else (attempts[-1], None, True)
    )
    path = reader.run.log(attempt)
    page = reader.page(path, offset, older, reader.wanted)
    lines, page = _fitting(
        page.lines, page, older, lambda line: json_chars(_shown(reader, line.text)), room
    )
    body: list[str] = [_shown(reader, line.text) for line in lines]
    # A progress bar has no newline yet; it is shown, and read again once it is complete.
    writing = torn_tail(path) if offset is None else ""
    if writing and reader.wanted(writing):
        body.append(_shown(reader, writing))
    result = reader.result("console", page, body, "lines")
    result["attempt"] = attempt
    if not body and not cursor and reader.matches is None and reader.row.kind == "train":
        # Nothing went wrong and nothing was printed: what the run did stands in its curves.
        curves = {"run_id": reader.row.run_id, "view": "metrics"}
        result["next"] = [Call("read_logs", curves).to_json()]
    result["summary"] = f"{counted(len(body), 'line')} of attempt {attempt} of {reader.row.run_id}."
    return result | _cursors(reader, cursor, f"console:{attempt}", page, path, attempts=attempts)


def _error(reader: _TextReader, cursor: str) -> dict[str, Any]:
    run, row = reader.run, reader.row
    failure, ended = read_object(run.failure), read_object(run.exit_record)
    cursor = cursor.replace("error", "console", 1)
    result = _console(reader, cursor, room=_ROOM - 2500)
    for name in ("next_cursor", "older_cursor"):
        if result.get(name):
            result[name] = result[name].replace("console", "error", 1)
    failed = row.state in ("failed", "cancelled") or bool(row.reason_kind)
    kind = row.reason_kind or str(failure.get("kind") or "")
    message = row.reason or str(failure.get("message") or "")
    latest = run.latest_checkpoint()
    error = {
        "kind": kind,
        "message": clip(message, 600),
        "evidence": clip(str(failure.get("evidence") or ""), 800),
        **_clipped(row.hint or Hint.from_json(failure.get("hint"))).shown(),
        "last_checkpoint": latest.name if latest else "",
        "exit": {name: ended[name] for name in ("rc", "signal") if ended.get(name) is not None},
    }
    result |= {"view": "error", "error": reader.redact.value(error) if failed else {}}
    if not failed:
        result["summary"] = f"{row.run_id} is {row.state} and has not failed."
    else:
        reason = reader.redact.text(message) or "no reason was recorded"
        result["summary"] = clip(f"{row.run_id} {row.state} ({kind or 'unknown'}): {reason}", 400)
        if latest is not None and row.state != "done":
            result["next"] = [Call("submit_train", {"resume": row.run_id}).to_json()]
    return result


def _clipped(hint: Hint) -> Hint:
    return Hint(clip(hint.text, 600), hint.call)


def _attempts(reader: _TextReader) -> list[int]:
    found = [n for n in range(1, reader.row.attempt + 1) if reader.run.log(n).exists()]
    return found or [reader.row.attempt]


def _shown(reader: _TextReader, text: str) -> str:
    return clip(reader.redact.text(text), _LINE_CHARS)


def _fitting(
    lines: list[Line], page: Page, older: bool, chars: Callable[[Line], int], room: int = _ROOM
) -> tuple[list[Line], Page]:
    """As many lines as a result holds, from the end that continues what was read before."""
    kept: list[Line] = []
    for line in reversed(lines) if older else lines:
        room -= chars(line) + 1
        if room < 0 and kept:
            break
        kept.append(line)
    if len(kept) == len(lines):
        return lines, page
    if older:
        kept.reverse()
        return kept, Page(kept, kept[0].start, page.end, page.scanned)
    return kept, Page(kept, page.start, kept[-1].end, page.scanned)


def _cursors(
    reader: _TextReader,
    cursor: str,
    prefix: str,
    page: Page,
    path: Path,
    *,
    attempts: Sequence[int],
) -> dict[str, str]:
    """Where to go on: in the direction `cursor` led; from the start, newer while the run lives."""
    older = f"{prefix}:{page.start}:older" if page.start > 0 else ""
    at_end = page.end >= complete_size(path)
    newer = f"{prefix}:{page.end}" if reader.live or not at_end else ""
    if attempts:
        attempt = int(prefix.rpartition(":")[2])
        before = [n for n in attempts if n < attempt]
        after = [n for n in attempts if n > attempt]
        if not older and before:
            size = complete_size(reader.run.log(before[-1]))
            older = f"console:{before[-1]}:{size}:older"
        if after and at_end:
            newer = f"console:{after[0]}:0"
    backwards = cursor.endswith(":older") or (not cursor and not reader.live)
    found = {"next_cursor": older if backwards else newer}
    return found | ({"older_cursor": older} if older else {})


def _parse_cursor(cursor: str, view: str) -> tuple[int, int, bool]:
    """(attempt, byte offset, whether it leads to older lines). Raises UserError BAD_CURSOR."""
    parts = cursor.split(":")
    older = parts[-1] == "older"
    numbers = parts[1 : len(parts) - older]
    wanted = 2 if view == "console" else 1
    good = parts[0] == view and len(numbers) == wanted
    if not good or not all(n.isascii() and n.isdigit() and len(n) < 16 for n in numbers):
        raise UserError(
            "BAD_CURSOR",
            f"cursor {cursor[:60]!r} was not made by view={view}",
            hint="Pass next_cursor or older_cursor of the last page unchanged, or leave it out.",
            field="cursor",
        )
    return (int(numbers[0]) if wanted == 2 else 0), int(numbers[-1]), older


def _searched(page: Page) -> list[str]:
    if page.scanned < BUDGET:
        return []
    return [f"The search stopped after {page.scanned / 1e6:.1f} MB; the cursor continues it."]


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _bad(field: str, message: str, hint: str) -> UserError:
    return UserError("BAD_ARGUMENT", message, hint=hint, field=field)
