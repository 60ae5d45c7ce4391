"""How far a run is, read from its files; and STATUS.md, the same for a person with a pager."""

import math
import os
import time
from dataclasses import dataclass
from typing import Any

from engine.core.files import JsonObject, last_line, read_json, read_lines, write_text
from engine.home.rows import TERMINAL, RunRow
from engine.home.run_dir import RunDir

_ETA_LINES = 20  # steps the speed is taken from
_ETA_BYTES = 64_000


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
        step, total_steps: None where nothing says so yet.
        eta_s: seconds left; None when unknown, or when the run has ended.
        metrics: the last line of them.
        quiet_s: seconds since the trainer wrote anything; None where no trainer is to write.
        alerts: events of the last alerts.
        cursor: byte after the last event.
        started: the events of each start.
    """

    step: int | None
    total_steps: int | None
    eta_s: float | None
    metrics: JsonObject
    quiet_s: float | None
    alerts: list[JsonObject]
    cursor: int
    started: list[JsonObject]


def events_from(run: RunDir, cursor: int) -> tuple[list[JsonObject], int]:
    """All complete events from byte `cursor` on, and where they end."""
    events: list[JsonObject] = []
    while True:
        rows, end = read_lines(run.events, cursor)
        events += rows
        if end == cursor or not rows:
            return events, max(end, cursor)
        cursor = end


def events_end(run: RunDir) -> int:
    """The cursor after the last complete event."""
    return events_from(run, 0)[1]


def alerts_in(events: list[JsonObject]) -> list[JsonObject]:
    return [event for event in events if event.get("event") == "alert"]


def read_progress(run: RunDir, row: RunRow) -> Progress:
    """How far a run is, from its events and the end of its metrics."""
    events, cursor = events_from(run, 0)
    last = last_line(run.metrics) or {}
    started = [event for event in events if event.get("event") == "started"]
    totals = [_whole(event.get("total_steps")) for event in reversed(started)]
    total = next((number for number in totals if number is not None), None)
    step = _whole(last.get("step"))
    return Progress(
        step=step,
        total_steps=total,
        eta_s=None if row.state in TERMINAL else _eta(run, step, total),
        metrics=last,
        quiet_s=_quiet(run) if row.state in ("preparing", "running", "stopping") else None,
        alerts=alerts_in(events)[-10:],
        cursor=cursor,
        started=started,
    )


def write_status(run: RunDir, row: RunRow) -> None:
    """Renew STATUS.md; a run must not fail for want of it, so a full disk is passed over."""
    try:
        write_text(run.status_md, status_text(run, row), fsync=False)
    except OSError:
        return


def status_text(run: RunDir, row: RunRow) -> str:
    """The text of STATUS.md."""
    now = read_progress(run, row)
    of = f" of {now.total_steps}" if now.total_steps is not None else ""
    lines = [
        f"# {row.run_id}: {row.state}",
        "",
        f"- {row.algorithm} of {row.model} on {row.env_id}",
        f"- attempt {row.attempt}, device {row.device or 'none yet'}",
        f"- step {now.step if now.step is not None else '-'}{of}",
        f"- device hours spent: {row.spent_hours:.3f}",
    ]
    if row.verdict:
        lines.append(f"- verdict: {row.verdict}")
    if row.reason:
        lines.append(f"- reason ({row.reason_kind}): {row.reason}")
    if row.hint:
        lines.append(f"- next: {row.hint}")
    lines += [f"- alert: {alert.get('message', '')}" for alert in now.alerts]
    stamp = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return "\n".join([*lines, "", f"Written {stamp}; the database has the last word.", ""])


def _whole(value: Any) -> int | None:
    """`value` as a whole number; None for what is none, an infinity out of a damaged line too."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return int(value) if number and math.isfinite(value) else None


def _eta(run: RunDir, step: int | None, total: int | None) -> float | None:
    """Seconds left, from the pace of the last steps of this attempt."""
    if step is None or total is None or step >= total:
        return 0.0 if step is not None and total is not None else None
    try:
        began = float(read_json(run.started_record)["time"])
    except (OSError, ValueError, KeyError, TypeError):
        began = 0.0
    try:
        start = max(0, os.stat(run.metrics).st_size - _ETA_BYTES)
    except OSError:
        return None
    rows, _ = read_lines(run.metrics, start, _ETA_BYTES)
    points: list[tuple[float, int]] = []
    for row in rows:
        written, reached = row.get("time"), _whole(row.get("step"))
        if isinstance(written, int | float) and reached is not None:
            points.append((float(written), reached))
    points = [point for point in points if point[0] >= began][-_ETA_LINES:]
    if len(points) < 2 or points[-1][1] <= points[0][1]:
        return None
    pace = max(0.0, points[-1][0] - points[0][0]) / (points[-1][1] - points[0][1])
    return round(pace * (total - step), 1)


def _quiet(run: RunDir) -> float | None:
    """Seconds since the trainer last wrote anything: a deadlock shows here."""
    newest = 0.0
    for path in (run.metrics, run.events, *run.logs.glob("attempt_*.log")):
        try:
            newest = max(newest, path.stat().st_mtime)
        except OSError:
            continue
    return round(max(0.0, time.time() - newest), 1) if newest else None
