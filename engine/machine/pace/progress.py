"""Reads how far a run is from its files, and writes it to STATUS.md for people."""

import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.core.errors import UserError
from engine.core.files import JsonObject, last_line, read_json, read_lines, write_text
from engine.core.format import words
from engine.home.rows import HOLDS_DEVICE, TERMINAL, RunRow
from engine.home.run_dir import RunDir
from engine.home.user_config import DEFAULT_STOP_MINUTES
from engine.machine.pace.forecast import Remaining, estimated_seconds, remaining
from engine.machine.pace.heartbeat import EXAM_PHASES, Heartbeat, read_heartbeat
from engine.machine.pace.staleness import patience

_PACE_STEPS = 20  # the pace is measured over this many of the last steps
_PACE_BYTES = 64_000  # how much of the end of metrics.jsonl is read to find these steps
_MAX_ALERTS = 10  # how many of the latest alerts are shown


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
        step, total_steps: the last step that was measured, and how many steps there will be; None
            until a file says so.
        eta_s: seconds left; None if unknown, or if the run has ended.
        metrics: the last line of metrics.jsonl; {} before the first.
        remaining: what is left of the attempt under way; None if no trainer runs, or before it has
            planned its work.
        phase: what the trainer is doing; "" if it has written no heartbeat.
        phase_percent: how much of that phase is done, in percent; None if nothing in it is counted.
        quiet_s: seconds since the trainer gave a sign of life or wrote anything; None if no trainer
            is running.
        stalled: why the run counts as stalled; "" if it does not.
        alerts: the events of the latest alerts.
        cursor: the byte after the last event in events.jsonl.
        started: the event of each start, oldest first.
    """

    step: int | None
    total_steps: int | None
    eta_s: float | None
    metrics: JsonObject
    remaining: Remaining | None
    phase: str
    phase_percent: float | None
    quiet_s: float | None
    stalled: str
    alerts: list[JsonObject]
    cursor: int
    started: list[JsonObject]


def events_from(run: RunDir, cursor: int) -> tuple[list[JsonObject], int]:
    """Read all complete events of a run from byte `cursor` of events.jsonl on.

    Returns (events, next_cursor): `next_cursor` is the byte after the last of them, and never less
    than `cursor`.
    """
    events: list[JsonObject] = []
    while True:  # `read_lines` reads about a megabyte at a time
        rows, end = read_lines(run.events, cursor)
        events += rows
        if end == cursor or not rows:  # no whole line is left
            # `end` is less than `cursor` if the file was shortened.
            return events, max(end, cursor)
        cursor = end


def events_end(run: RunDir) -> int:
    """Return the byte of events.jsonl after the last complete event of a run."""
    _, cursor = events_from(run, cursor=0)
    return cursor


def attempt_begin(run: RunDir, attempt: int) -> int:
    """Return the cursor (in bytes of events.jsonl) of the first event of an attempt.

    If the attempt has written no event yet, this is 0 for the first attempt, and the end of the
    file for a later one, because all existing events belong to earlier attempts.
    """
    try:
        lines = run.events.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return 0
    begin = 0
    for line in lines:
        if b"attempt_started" in line and _starts_attempt(line, attempt):
            return begin
        begin += len(line)
    return 0 if attempt <= 1 else events_end(run)


def _starts_attempt(line: bytes, attempt: int) -> bool:
    """Return whether a line of events.jsonl says that attempt number `attempt` has started."""
    try:
        event = json.loads(line)
    except ValueError:  # the line is damaged, or still being written
        return False
    return event.get("event") == "attempt_started" and event.get("attempt") == attempt


def alerts_in(events: list[JsonObject]) -> list[JsonObject]:
    """Return those of the events that are alerts."""
    return [event for event in events if event.get("event") == "alert"]


def read_progress(run: RunDir, row: RunRow) -> Progress:
    """Read how far a run is, from its events and the last line of its metrics. Only the run's state
    and attempt are taken from its database row `row`."""
    events, cursor = events_from(run, cursor=0)
    last_metrics = last_line(run.metrics) or {}
    starts = [event for event in events if event.get("event") == "started"]
    total = _total_steps(starts)
    step = _as_whole_number(last_metrics.get("step"))
    # Only in these states, from preparation to the stop, does the run have a process.
    has_process = row.state in HOLDS_DEVICE
    heartbeat = _own_heartbeat(run, row) if has_process else None
    left = remaining(run, heartbeat) if heartbeat is not None else None
    quiet_s = _quiet_seconds(run, heartbeat) if has_process else None
    phase_percent = None
    if heartbeat is not None and heartbeat.phase in EXAM_PHASES:  # phases that count answers
        phase_percent = heartbeat.percent
    return Progress(
        step=step,
        total_steps=total,
        eta_s=_time_left(run, row, left, step, total),
        metrics=last_metrics,
        remaining=left,
        phase=heartbeat.phase if heartbeat is not None else "",
        phase_percent=phase_percent,
        quiet_s=quiet_s,
        stalled=_why_stalled(run, row, heartbeat, quiet_s),
        alerts=alerts_in(events)[-_MAX_ALERTS:],
        cursor=cursor,
        started=starts,
    )


def _own_heartbeat(run: RunDir, row: RunRow) -> Heartbeat | None:
    """Read the last heartbeat (report of the trainer) of the attempt under way. Returns None if
    this attempt has written none."""
    heartbeat = read_heartbeat(run)
    if heartbeat is None or heartbeat.attempt != row.attempt:
        return None
    return heartbeat


def _time_left(
    run: RunDir, row: RunRow, left: Remaining | None, step: int | None, total: int | None
) -> float | None:
    """Return the likely seconds until the run has ended, or None if unknown or if the run has
    ended.

    Args:
        left: the forecast from its heartbeats; None for a run without heartbeats (of an earlier
            version): then the times of its last steps are used.
        step: the last step that was measured; None for none.
        total: how many steps the run has; None if unknown.
    """
    if row.state in TERMINAL:
        return None
    if left is None:
        return _seconds_left(run, step, total)
    return round(left.seconds.likely, 1)


def _why_stalled(
    run: RunDir, row: RunRow, heartbeat: Heartbeat | None, quiet_s: float | None
) -> str:
    """Say why a run counts as stalled: it has been silent for `quiet_s` seconds, longer than its
    pace explains. Returns "" if it does not, or if `quiet_s` is None (no trainer runs)."""
    # These processes write no heartbeats: one that scores stored answers again ("regrade"), and one
    # that asks models behind a URL (and so has no GPU).
    if quiet_s is None or row.algorithm == "regrade" or row.gpus == 0:
        return ""
    limits = patience(heartbeat, estimated_seconds(run), _stop_minutes(run))
    if quiet_s < limits.stalled_s:
        return ""
    usual = f", usually at most {words(limits.usual_s / 3600)}" if limits.usual_s else ""
    return f"no sign of life for {words(quiet_s / 3600)} in the phase {limits.phase}{usual}"


def _stop_minutes(run: RunDir) -> float:
    """Read the setting `stop_stalled_minutes` of the home. If config.toml is damaged, which is
    reported elsewhere, return the default."""
    try:
        return run.home.user_config().stop_stalled_minutes
    except UserError:
        return DEFAULT_STOP_MINUTES


def _total_steps(starts: Iterable[Mapping[str, Any]]) -> int | None:
    """Return how many steps the run has, or None if no event says so. `starts` are its "started"
    events; the last one with a number counts, because a resumed run may have another number than
    before."""
    total = None
    for event in starts:
        steps_of_start = _as_whole_number(event.get("total_steps"))
        if steps_of_start is not None:
            total = steps_of_start
    return total


def answer_count(run: RunDir) -> int:
    """Count the answers that an evaluation has written for all its models, one per line of their
    files."""
    count = 0
    for path in run.evals_dir.glob("model_*.jsonl"):
        try:
            count += path.read_bytes().count(b"\n")
        except FileNotFoundError:  # a new attempt has just deleted the file to write its own
            continue
    return count


def write_status(run: RunDir, row: RunRow) -> None:
    """Write STATUS.md anew. Errors of the disk are ignored: a run must not fail just because its
    STATUS.md cannot be written."""
    try:
        write_text(run.status_md, status_text(run, row), fsync=False)
    except OSError:
        return


def status_text(run: RunDir, row: RunRow) -> str:
    """Compose the text of STATUS.md: a heading such as `# sums-grpo-3: running`, a list of facts,
    and when it was written. engine/home/recovery.py reads this text back."""
    progress = read_progress(run, row)
    lines = [
        f"# {row.run_id}: {row.state}",
        "",
        f"- {row.algorithm} of {row.model} on {row.env_id}",
        f"- attempt {row.attempt}, device {row.device or 'none yet'}",
        f"- step {_steps_done(progress)}",
        f"- device hours spent: {row.spent_hours:.3f}",
        *_end_lines(row),
    ]
    lines += [f"- alert: {alert.get('message', '')}" for alert in progress.alerts]
    stamp = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return "\n".join([*lines, "", f"Written {stamp}; the database has the last word.", ""])


def _steps_done(progress: Progress) -> str:
    """Return the step of a run and how many it has, such as "3 of 20"; "-" stands for no step
    yet."""
    step = progress.step if progress.step is not None else "-"
    of_total = f" of {progress.total_steps}" if progress.total_steps is not None else ""
    return f"{step}{of_total}"


def _end_lines(row: RunRow) -> list[str]:
    """Return the lines of STATUS.md about the verdict, the reason of the end and what to do
    next."""
    lines = []
    if row.verdict:
        lines.append(f"- verdict: {row.verdict}")
    if row.reason:
        lines.append(f"- reason ({row.reason_kind}): {row.reason}")
    if row.hint:
        lines.append(f"- next: {row.hint}")
    return lines


def _as_whole_number(value: Any) -> int | None:
    """Convert `value` to an int, dropping any fraction. Returns None for anything but a finite
    number, since a damaged line may hold text or an infinity."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        return None
    return int(value)


def _seconds_left(run: RunDir, step: int | None, total: int | None) -> float | None:
    """Forecast the seconds until the last step is done, at the pace of the last steps that the
    current attempt has measured.

    Returns 0 if every step is done. Returns None if `step` or `total` is None or the pace is
    unknown, because fewer than two different steps were measured.

    Args:
        step: the last step that was measured.
        total: how many steps the run has.
    """
    if step is None or total is None:
        return None
    if step >= total:
        return 0.0
    step_times = _last_step_times(run)
    if len(step_times) < 2:
        return None
    first_time, first_step = step_times[0]
    last_time, last_step = step_times[-1]
    # Without started.json the steps of all attempts count, and a resumed attempt goes back some.
    if last_step <= first_step:
        return None
    # max: if the clock was set back in between, the pace must not become negative.
    seconds_per_step = max(0.0, last_time - first_time) / (last_step - first_step)
    return round(seconds_per_step * (total - step), 1)


def _last_step_times(run: RunDir) -> list[tuple[float, int]]:
    """Return (time in unix seconds, step) of the last steps that this attempt has measured, oldest
    first. At most `_PACE_STEPS` lines of metrics that have both numbers are used."""
    try:
        tail_start = max(0, os.stat(run.metrics).st_size - _PACE_BYTES)
    except OSError:  # nothing has been measured yet
        return []
    rows, _ = read_lines(run.metrics, tail_start, _PACE_BYTES)
    attempt_began = _attempt_start(run)
    step_times = [step_time for step_time in map(_step_time, rows) if step_time is not None]
    of_attempt = [(time_s, step) for time_s, step in step_times if time_s >= attempt_began]
    return of_attempt[-_PACE_STEPS:]


def _step_time(line: Mapping[str, Any]) -> tuple[float, int] | None:
    """Return the time in unix seconds and the step of a line of metrics, or None if either is
    missing."""
    written_at = line.get("time")
    step = _as_whole_number(line.get("step"))
    if not isinstance(written_at, int | float) or step is None:
        return None
    return float(written_at), step


def _attempt_start(run: RunDir) -> float:
    """Return when the run's last attempt began, in unix seconds. Returns 0 if started.json is
    missing or damaged, so that the steps of all attempts count."""
    try:
        return float(read_json(run.started_record)["time"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0


def _quiet_seconds(run: RunDir, heartbeat: Heartbeat | None) -> float | None:
    """Return the seconds since the trainer's last sign of life. Without heartbeats, these are
    the seconds since it last wrote to its metrics, events or logs, or None if it has written
    nothing."""
    if heartbeat is not None:
        return round(max(0.0, time.time() - heartbeat.time), 1)
    last_written = 0.0
    for path in (run.metrics, run.events, *run.logs.glob("attempt_*.log")):
        try:
            last_written = max(last_written, path.stat().st_mtime)
        except OSError:
            continue
    return round(max(0.0, time.time() - last_written), 1) if last_written else None
