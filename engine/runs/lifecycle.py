"""What a client may ask about runs: submit, status, wait, cancel, and the state of the home.

Everything here reads the database and the run's files. The server keeps no state of its own: it may
be killed at any moment, and a second server gives the same answers.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.core.errors import UserError
from engine.core.files import last_line
from engine.core.hints import Call
from engine.core.reply import Reply
from engine.home.halves import ChoosingHalf, scores_in_words
from engine.home.rows import OPEN, TERMINAL, RunRow, abbreviation_warning
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.home.team.owners import PRIORITIES
from engine.machine.pace.heartbeat import EXAM_PHASES
from engine.machine.pace.progress import (
    alerts_in,
    attempt_begin,
    events_end,
    events_from,
    read_progress,
    write_status,
)
from engine.machine.processes import launcher, outcome
from engine.records.lines.line_record import Line
from engine.records.settings import PROMPT
from engine.runs import plan_status
from engine.runs.overview import overview
from engine.runs.run_status import status_of
from engine.runs.submit.admission import check_texts
from engine.runs.submit.evaluation import submit_evaluation
from engine.runs.submit.plans import submit as submit_training
from engine.runs.submit.probe import submit_probe
from engine.runs.submit.requests import TrainRequest
from engine.runs.targets import may_stop_since

__all__ = [
    "cancel",
    "overview",
    "status",
    "submit",
    "submit_evaluation",
    "submit_probe",
    "wait",
]

UNTIL = ("end", "first_step", "next_eval", "alert", "news")
# `until` -> the event that ends a wait for a run. A wait for "news" also ends with the run.
_EVENT_BY_GOAL = {"next_eval": "evaluated", "alert": "alert", "news": "alert"}
_POLL_S = 0.15  # how often a wait reads the run's files and row
_REAP_S = 2.0  # how often a wait looks for runs whose process died
_REPORT_S = 1.0  # how often a wait reports progress if nothing has changed
# States of an open run that nobody has asked to stop.
_WITHOUT_PROCESS, _WITH_PROCESS = ("queued", "interrupted"), ("preparing", "running")
_EVENT_KEYS = ("event", "time", "message")  # every event has these; its other keys hold its values
_MOST_DIGITS = 15  # the most digits of a cursor; no file is longer than such a number


def submit(home: Home, request: TrainRequest) -> Reply:
    """Queue a training run, a plan of several, a search for a prompt, or a new attempt of one;
    returns the reply about it. Raises the errors of the function that does it."""
    is_new_search = request.algorithm == PROMPT and not request.resume and not request.is_plan
    if is_new_search:  # a resumed search goes the way of every resumed run
        # Imported late: few calls need it, and it brings a client for HTTP.
        from engine.runs.prompts.submit import submit_search  # noqa: PLC0415

        return submit_search(home, request)
    return submit_training(home, request)


def status(home: Home, run_id: str) -> Reply:
    """Return the status of a run, or of a plan (several runs that were submitted together).

    The status has the state, progress, metrics, alerts, the result or error, and the calls to make
    next. Raises UserError RUN_NOT_FOUND if `run_id` matches no plan and not exactly one run.
    """
    launcher.reap(home)  # updates the state of runs whose processes are gone
    with Store(home) as store:
        plan_rows = store.plan_runs(run_id)  # [] if `run_id` is not the id of a plan
        if plan_rows:
            marks = plan_status.marks_in_cursor(home, plan_rows, cursor="")
            snapshot = plan_status.read_snapshot(home, plan_rows, marks)
            return plan_status.status_of(home, store, snapshot)
        return status_of(home, store, store.get_run(run_id))


def wait(
    home: Home,
    run_id: str,
    until: str = "end",
    timeout_s: float = 45.0,
    cursor: str = "",
    on_progress: Callable[[Reply], None] | None = None,
) -> Reply:
    """Wait until a run or a plan has reached `until` or has ended, at most `timeout_s` seconds.

    Returns the status, with the added key `until_met`: whether `until` was reached.

    Args:
        until: "end", "first_step", "next_eval", "alert", or "news": an alert, the moment from
            which a run may be stopped at its target, the end, or the end of a step of a plan.
        timeout_s: seconds to wait; the caller must know how long its client keeps a call open.
        cursor: `cursor` of an earlier reply; only evaluations and alerts after that reply count.
            With "" those of the run's whole current attempt count, so that none is missed that came
            before the call.
        on_progress: called with the status at every change and about once a second.

    Raises UserError RUN_NOT_FOUND if `run_id` matches no plan and not exactly one run, BAD_ARGUMENT
    if `until` is none of `UNTIL`, BAD_CURSOR if `cursor` is not the cursor of a reply.
    """
    _check_until(until)
    deadline = time.monotonic() + max(float(timeout_s), 0.0)  # a negative time is not refused
    launcher.reap(home)  # updates the state of runs whose processes are gone
    with Store(home) as store:
        if store.plan_runs(run_id):
            plan_goal = _PlanGoal(until, cursor, deadline, on_progress)
            return _wait_for_plan(home, store, run_id, plan_goal)
        row = store.get_run(run_id)
        run = home.run(row.run_id)
        since_byte = _start_of_events(run, row, cursor)
        goal = _Goal(until, since_byte, asked_at=events_end(run), deadline=deadline)
        snapshot = _poll_until_reached(home, store, row, goal, _Reporter(home, store, on_progress))
        return _reply_of_run(home, store, snapshot, goal, has_cursor=bool(cursor))


@dataclass(frozen=True)
class _PlanGoal:
    """What a wait for a plan waits for.

    `until`, `cursor` and `on_progress` are the arguments of `wait`. `deadline` is the latest end of
    the wait, in seconds on the monotonic clock.
    """

    until: str
    cursor: str
    deadline: float
    on_progress: Callable[[Reply], None] | None


def _wait_for_plan(home: Home, store: Store, plan_id: str, goal: _PlanGoal) -> Reply:
    """Wait until a plan has reached the goal or is over, or the deadline has passed.

    Returns the plan's status with the added key `until_met`. If the goal has a cursor, the status
    shows only what has changed since the reply that gave the cursor.
    """
    cursor_marks = plan_status.marks_in_cursor(home, store.plan_runs(plan_id), goal.cursor)
    # When to look for dead processes and when to report progress next, on the monotonic clock.
    reap_at = report_at = time.monotonic() + _REAP_S
    while True:
        snapshot = plan_status.read_snapshot(home, store.plan_runs(plan_id), cursor_marks)
        reached = plan_status.has_reached(home, snapshot, goal.until)
        now = time.monotonic()
        if reached or snapshot.is_over or now >= goal.deadline:
            status = plan_status.status_of(home, store, snapshot, has_cursor=bool(goal.cursor))
            return status | {"until_met": reached}
        if goal.on_progress is not None and now >= report_at:
            goal.on_progress(plan_status.progress_of(home, snapshot))
            report_at = now + _REPORT_S
        if now >= reap_at:
            launcher.reap(home)  # ends runs whose process was killed, and starts the next ones
            reap_at = now + _REAP_S
        seconds_left = max(0.0, goal.deadline - time.monotonic())
        time.sleep(min(_POLL_S, seconds_left))


@dataclass(frozen=True)
class _Goal:
    """What a wait waits for.

    Attributes:
        until: one of UNTIL.
        since_byte: the byte of the run's events file from which on events count.
        asked_at: the byte at which the events file ended when the wait began.
        deadline: when the wait ends in any case, in seconds on the monotonic clock.
    """

    until: str
    since_byte: int
    asked_at: int
    deadline: float


@dataclass(frozen=True)
class _Snapshot:
    """The state of a run at one moment of a wait.

    Attributes:
        row: the run as the database had it.
        has_reached: whether the run has reached the goal of the wait.
        events: the run's events that count: those from the goal's `since_byte` on.
        events_end: the byte of the run's events file at which these events end.
    """

    row: RunRow
    has_reached: bool
    events: list[Line]
    events_end: int


def _poll_until_reached(
    home: Home, store: Store, row: RunRow, goal: _Goal, reporter: "_Reporter"
) -> _Snapshot:
    """Read a run again and again until it has reached the goal or ended, or the deadline is over.

    `row` is the run's present row; `reporter` reports its progress. Returns the last snapshot.
    """
    reap_at = time.monotonic() + _REAP_S
    while True:
        now = time.monotonic()
        snapshot = _snapshot_of(home.run(row.run_id), row, goal)
        if snapshot.has_reached or row.state in TERMINAL or now >= goal.deadline:
            return snapshot
        reporter.report(row, now)
        if now >= reap_at:
            launcher.reap(home)  # ends the run in the database if its process was killed
            reap_at = now + _REAP_S
        time.sleep(min(_POLL_S, max(0.0, goal.deadline - time.monotonic())))
        row = store.get_run(row.run_id)


def _snapshot_of(run: RunDir, row: RunRow, goal: _Goal) -> _Snapshot:
    """Read the run's events from the goal's `since_byte` on, and check whether they reach it."""
    events, end = events_from(run, goal.since_byte)
    return _Snapshot(row, _has_reached(run, row, goal.until, events), events, end)


def _reply_after_wait(snapshot: _Snapshot, until: str, status: Reply) -> Reply:
    """Make the reply of `wait`: the run's status with `until_met` (whether the goal was reached),
    `cursor`, and after a wait for "next_eval" the evaluation.

    `until` is the goal of the wait, one of `UNTIL`.
    """
    extra_fields: Reply = {}
    if until == "next_eval" and snapshot.has_reached:
        extra_fields = _evaluation_fields(snapshot.events, status)
    # The cursor is the end of the events that were read. The next call reads the later events.
    return (
        status
        | extra_fields
        | {"until_met": snapshot.has_reached, "cursor": str(snapshot.events_end)}
    )


def _reply_of_run(
    home: Home, store: Store, snapshot: _Snapshot, goal: _Goal, *, has_cursor: bool
) -> Reply:
    """Make the reply after a wait for one run: its status, and whether it has reached the goal.

    `has_cursor` says that the caller gave a cursor, so has seen an earlier status.
    """
    # `new_alerts` is None for the latest alerts of the whole run. These are shown to a caller
    # without a cursor, who has seen no alerts yet, and at the end of the run.
    shows_only_new = has_cursor and snapshot.row.state not in TERMINAL
    new_alerts = alerts_in(snapshot.events) if shows_only_new else None
    status = status_of(home, store, snapshot.row, new_alerts)
    reply = _reply_after_wait(snapshot, goal.until, status)
    if not has_cursor and snapshot.has_reached and goal.until in _EVENT_BY_GOAL:
        _warn_of_earlier_event(reply, snapshot, goal)
    return reply


def _warn_of_earlier_event(reply: Reply, snapshot: _Snapshot, goal: _Goal) -> None:
    """Add a warning to the reply if the goal was reached before the wait began.

    `snapshot` is the run as the wait saw it last, `goal` what it waited for. Without the warning a
    caller might repeat the call, which would return the same event again.
    """
    if snapshot.events_end <= goal.asked_at and snapshot.row.state not in TERMINAL:
        reply["warnings"].append(
            f"this was reached before the call; cursor={reply['cursor']!r} waits for a later one"
        )


class _Reporter:
    """Reports the status of a run that is waited for at every change, and about once a second.

    Args:
        on_progress: called with each status; None reports nothing.
    """

    def __init__(
        self, home: Home, store: Store, on_progress: Callable[[Reply], None] | None
    ) -> None:
        """Start with nothing reported; the docstring of the class explains `on_progress`."""
        self._home = home
        self._store = store
        self._on_progress = on_progress
        self._report_at = 0.0  # the first report is made at once
        self._reported_fingerprint: tuple[str, int, int, int] | None = None  # see `report`

    def report(self, row: RunRow, now: float) -> None:
        """Report the status if the run has changed or the last report is long ago.

        Args:
            row: the run as the database has it.
            now: seconds on the monotonic clock.
        """
        if self._on_progress is None:
            return
        run = self._home.run(row.run_id)
        # At least one of these values differs if the run has changed since the last report.
        fingerprint = (row.state, row.attempt, _file_size(run.metrics), _file_size(run.events))
        if fingerprint != self._reported_fingerprint or now >= self._report_at:
            self._on_progress(status_of(self._home, self._store, row))
            self._reported_fingerprint = fingerprint
            self._report_at = now + _REPORT_S


def cancel(home: Home, run_id: str, reason: str = "") -> Reply:
    """Ask a run or a plan to end. A second call changes nothing.

    A queued or interrupted run is cancelled at once. The supervisor of a running run lets the
    trainer write a checkpoint first.

    Args:
        run_id: the id of a run or a plan, or the unique beginning of a run's id.
        reason: the reason, for the record; "" records "cancelled on request".

    Returns the run's state, its last checkpoint, and how to go on, or the status of the plan. If
    `run_id` was only the beginning of an id, a warning names the whole id.

    Raises UserError RUN_NOT_FOUND if `run_id` matches nothing or more than one run, BAD_ARGUMENT if
    `reason` is too long.
    """
    check_texts(reason=reason)
    with Store(home) as store:
        if store.plan_runs(run_id):
            return _cancel_plan(home, store, run_id, reason.strip() or "cancelled on request")
        row = store.get_run(run_id)
        run = home.run(row.run_id)
        _set_cancelled_or_stopping(store, run, reason.strip() or "cancelled on request")
        launcher.reap(home)  # ends the run at once if its supervisor is dead already
        row = store.get_run(row.run_id)
        write_status(run, row)
    if row.is_elsewhere and row.state in TERMINAL:
        launcher.end_elsewhere(run)
    return _cancel_reply(run, row, warnings=abbreviation_warning("run_id", run_id, row.run_id))


def set_priority(home: Home, run_id: str, priority: str) -> Reply:
    """Set the priority of a queued run, and return the reply about its place in the queue.

    `run_id` may be the unique beginning of the id; a warning then names the whole id.

    Raises UserError BAD_ARGUMENT if `priority` is not one of `PRIORITIES` (low, normal, high),
    RUN_NOT_FOUND if there is no such run, and RUN_STATE if the run is not queued.
    """
    if priority not in PRIORITIES:
        raise UserError(
            "BAD_ARGUMENT",
            f"priority={priority[:40]!r} does not exist",
            hint=f"Use one of {', '.join(PRIORITIES)}.",
            field="priority",
        )
    with Store(home) as store:
        row = store.get_run(run_id)
        if not store.update_run(row.run_id, only_in={"queued"}, priority=priority):
            raise UserError(
                "RUN_STATE",
                f"{row.run_id} is {row.state}; only a run that waits has a place in the queue",
                hint="Nothing was changed.",
            )
        position = store.queue_position(row.run_id)
    return {
        "run_id": row.run_id,
        "priority": priority,
        "queue_position": position,
        "summary": f"{row.run_id} has priority {priority}: position {position}.",
        "next": [],
        "warnings": abbreviation_warning("run_id", run_id, row.run_id),
    }


def _cancel_plan(home: Home, store: Store, plan_id: str, reason: str) -> Reply:
    """Ask every run of the plan `plan_id` to end, and return the status of the plan. `reason` is
    recorded with each run.

    The runs are cancelled from the last to the first. So no later run is started meanwhile, and
    none fails because the run before it was cancelled.
    """
    for row in reversed(store.plan_runs(plan_id)):
        if row.state in OPEN:
            run = home.run(row.run_id)
            _set_cancelled_or_stopping(store, run, reason)
            write_status(run, store.get_run(row.run_id))
    launcher.reap(home)  # ends at once the runs whose supervisor is dead already
    rows = store.plan_runs(plan_id)
    for row in rows:
        if row.is_elsewhere and row.state == "cancelled":
            launcher.end_elsewhere(home.run(row.run_id))
    marks = plan_status.marks_in_cursor(home, rows, cursor="")
    snapshot = plan_status.read_snapshot(home, rows, marks)
    status = plan_status.status_of(home, store, snapshot)
    if not snapshot.is_over or snapshot.state == "done":  # there is nothing to resume, or not yet
        return status
    return status | {"next": [Call("submit_train", {"resume": plan_id}).to_json()]}


def _set_cancelled_or_stopping(store: Store, run: RunDir, reason: str) -> None:
    """Set a run without a process to "cancelled", and a run with a process to "stopping".

    `reason` is recorded as the reason of its end. A run that is stopping already or has ended stays
    as it is.
    """
    values = {"reason_kind": "cancelled", "reason": reason}
    # A loop, because the run may get or lose its process between the two calls of `set_state`.
    while store.get_run(run.id).state in (*_WITHOUT_PROCESS, *_WITH_PROCESS):
        was_cancelled = store.set_state(
            run.id,
            "cancelled",
            only_from=set(_WITHOUT_PROCESS),
            ended=time.time(),
            hint=outcome.resume_hint(run),
            **values,
        )
        if not was_cancelled:
            store.set_state(run.id, "stopping", only_from=set(_WITH_PROCESS), **values)


def _cancel_reply(run: RunDir, row: RunRow, warnings: list[str]) -> Reply:
    """Make the reply of `cancel`: the run's state, its last checkpoint, and how to go on."""
    checkpoint = outcome.checkpoint_name(run)
    return {
        "run_id": row.run_id,
        "state": row.state,
        "last_checkpoint": checkpoint,
        # A run that is done has no steps left. A run that is stopping may still save a checkpoint,
        # so it is too early to say where a resume would start.
        "resume": "" if row.state in ("done", "stopping") else str(outcome.resume_hint(run)),
        "summary": _cancel_summary(run, row, checkpoint),
        "next": _after_cancel(row),
        "warnings": warnings,
    }


def _evaluation_fields(events: Sequence[Line], status: Reply) -> Reply:
    """Return the fields that `wait` adds to a status after an evaluation.

    - `evaluation`: the values of the newest "evaluated" event; `events` must hold such an event.
    - `step`: the newest known step of the run; left out if the event names no step.
    - `summary`: the summary of the status, and a sentence about the evaluation.
    """
    evaluations = [event for event in events if event.get("event") == "evaluated"]
    newest = evaluations[-1]
    scores = {name: value for name, value in newest.items() if name not in _EVENT_KEYS}
    evaluated_step = scores.get("step")
    names_step = isinstance(evaluated_step, int) and not isinstance(evaluated_step, bool)
    fields: Reply = {"evaluation": scores}
    if names_step:
        # The status has the newest step of the metrics. It may be lower than the step of the
        # evaluation, because metrics are written after the event, or it may be higher already.
        fields["step"] = max(evaluated_step, status["step"] or 0)
    at_step = f" at step {evaluated_step}" if names_step else ""
    text = _scores_text(scores, status) or str(newest.get("message") or "")
    return fields | {"summary": f"{status['summary']} Evaluated{at_step}: {text}."}


def _scores_text(scores: Mapping[str, Any], status: Reply) -> str:
    """Write the scores of an evaluation as text; "" if there are no scores.

    `scores` maps names of metrics to values. If the status knows how many held-out tasks choose the
    best checkpoint, the text names this number.
    """
    choosing_half = ChoosingHalf(**status["heldout"]) if "heldout" in status else None
    return scores_in_words(scores, choosing_half)


def _has_reached(run: RunDir, row: RunRow, until: str, events: Sequence[Line]) -> bool:
    """Return whether the run has reached `until`, one of `UNTIL`.

    Args:
        events: the run's events since the wait began, or since the cursor that the caller gave. An
            evaluation or an alert counts only if it is among them.
    """
    if until == "news" and may_stop_since(run, row, events):
        return True
    if until == "end" or (until == "news" and row.state in TERMINAL):
        return row.state in TERMINAL
    if until == "first_step":
        last_metrics = last_line(run.metrics) or {}  # {}: nothing has been measured yet
        return isinstance(last_metrics.get("step"), int) and last_metrics["step"] >= 1
    awaited_event = _EVENT_BY_GOAL[until]
    return any(event.get("event") == awaited_event for event in events)


def _check_until(until: str) -> None:
    """Raise UserError BAD_ARGUMENT unless `until` is something that can be waited for."""
    if until not in UNTIL:
        raise UserError(
            "BAD_ARGUMENT",
            f"until={until!r} is not something to wait for",
            hint=f"Use one of {', '.join(UNTIL)}.",
            field="until",
        )


def _start_of_events(run: RunDir, row: RunRow, cursor: str) -> int:
    """Return the byte of the run's events file from which a wait reads events.

    This is the number in `cursor`, or the beginning of the present attempt if `cursor` is "".
    Raises UserError BAD_CURSOR if `cursor` is not a number of at most 15 digits.
    """
    if not cursor:
        return attempt_begin(run, row.attempt)
    # isascii(), because isdigit() alone also accepts the digits of other scripts.
    is_number = cursor.isascii() and cursor.isdigit()
    if not is_number or len(cursor) > _MOST_DIGITS:
        raise UserError(
            "BAD_CURSOR",
            f"cursor={cursor[:40]!r} was not made by wait_run",
            hint="Pass the cursor of the last answer unchanged, or leave it out.",
            field="cursor",
        )
    return int(cursor)


def _file_size(path: Path) -> int:
    """Return the size of a file in bytes; -1 if the file does not exist or cannot be read."""
    try:
        return os.stat(path).st_size
    except OSError:
        return -1


def _cancel_summary(run: RunDir, row: RunRow, checkpoint: str) -> str:
    """Say in one sentence what `cancel` did.

    `checkpoint` is the name of the run's last checkpoint, "" if the run has none.
    """
    match row.state:
        case "cancelled":
            return f"{row.run_id} is cancelled; last checkpoint: {checkpoint or 'none'}."
        case "stopping":
            return f"{row.run_id} is stopping: {_last_work(run, row)}."
        case _:
            return f"{row.run_id} is {row.state} already; nothing was changed."


def _last_work(run: RunDir, row: RunRow) -> str:
    """Say what a stopping run still does, and whether it saves a checkpoint.

    The text is a part of a sentence, such as "it saves a checkpoint of step 12 or the next first".
    """
    if row.kind != "train":
        return "the answers that it has stay; it has no checkpoint"
    progress = read_progress(run, row)
    if not progress.step:
        return "no step is done, so no checkpoint comes of it"
    # An evaluation under way is finished before the run looks whether it is to stop.
    after_exam = f" when its {progress.phase} is over" if progress.phase in EXAM_PHASES else ""
    return f"it saves a checkpoint of step {progress.step} or the next first{after_exam}"


def _after_cancel(row: RunRow) -> list[Reply]:
    """Return a list with the call to make after `cancel`, as JSON.

    The call is a wait if the run is stopping, and a resume if it is cancelled or failed. Returns []
    in any other state, for example if the run is done.
    """
    if row.state == "stopping":
        return [Call("wait_run", {"run_id": row.run_id}).to_json()]
    if row.state in ("cancelled", "failed"):
        return [Call("submit_train", {"resume": row.run_id}).to_json()]
    return []
