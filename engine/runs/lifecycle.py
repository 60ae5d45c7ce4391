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
from engine.core.files import last_line, read_object
from engine.core.hints import Call
from engine.core.reply import Reply
from engine.home.halves import ChoosingHalf, choosing_half_in, scores_in_words
from engine.home.progress import (
    Progress,
    alerts_in,
    events_end,
    events_from,
    read_progress,
    write_status,
)
from engine.home.rows import TERMINAL, RunRow, taken_as
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.processes import launcher, outcome
from engine.records.lines.line_record import Line
from engine.records.run_config import EvaluateConfig, RegradeConfig
from engine.runs.overview import overview
from engine.runs.submit.admission import check_texts
from engine.runs.submit.evaluation import submit_evaluation
from engine.runs.submit.probe import submit_probe
from engine.runs.submit.training import submit

__all__ = [
    "cancel",
    "overview",
    "status",
    "submit",
    "submit_evaluation",
    "submit_probe",
    "wait",
]

MAX_WAIT_S = 50.0  # many clients give up on a call after a minute
UNTIL = ("end", "first_step", "next_eval", "alert")
_POLL_S = 0.15  # how often a wait reads the run's files and row
_REAP_S = 2.0  # how often a wait settles runs that died
_REPORT_S = 1.0  # how often a wait reports although nothing changed
_MIN_QUIET_S = 60  # a run that wrote nothing for longer is said to be quiet; a step may be slow
_MAX_ALERTS = 10  # new alerts that a status shows
_EVENT_KEYS = ("event", "time", "message")  # of every event; the other keys are its values
# What a status shows of the evidence for a verdict.
_EVIDENCE_KEYS = (
    "metric",
    "before",
    "after",
    "difference",
    "interval",
    "n",
    "p",
    "smallest_detectable_gap",
    "expected",
    "as_expected",
    "go_on_with",
)


def status(home: Home, run_id: str) -> Reply:
    """Where a run stands: its state, progress, metrics, alerts, result or error, and the calls to
    make next. Raises UserError RUN_NOT_FOUND."""
    launcher.reap(home)
    with Store(home) as store:
        return _status(home, store, store.get_run(run_id))


def wait(
    home: Home,
    run_id: str,
    until: str = "end",
    timeout_s: float = 45.0,
    cursor: str = "",
    on_progress: Callable[[Reply], None] | None = None,
) -> Reply:
    """Wait until a run has reached `until`, has ended, or `timeout_s` is over, then return its
    status.

    Args:
        until: "end", "first_step", "next_eval" or "alert". `reached` in the reply says whether the
            run has reached it.
        timeout_s: seconds to wait; values outside 0..50 are moved to the nearer bound.
        cursor: `cursor` of an earlier reply: evaluations and alerts since that reply count, and
            the reply shows these alerts. With "" only those from now on count, and the reply shows
            the latest alerts of the whole run.
        on_progress: called with the status at every change and about once a second. An exception
            that it raises ends the wait.

    Raises UserError RUN_NOT_FOUND, BAD_ARGUMENT (`until`) or BAD_CURSOR.
    """
    _check_until(until)
    deadline = time.monotonic() + min(max(float(timeout_s), 0.0), MAX_WAIT_S)
    launcher.reap(home)
    with Store(home) as store:
        row = store.get_run(run_id)
        run = home.run(row.run_id)
        since_byte = _position_of_cursor(cursor) if cursor else events_end(run)
        reap_at = time.monotonic() + _REAP_S
        reporter = _Reporter(home, store, on_progress)
        while True:
            now = time.monotonic()
            look = _look_at(run, row, until, since_byte)
            if look.has_reached or row.state in TERMINAL or now >= deadline:
                # A caller without a cursor has not seen any alert of the run yet.
                new_alerts = alerts_in(look.events) if cursor else None
                return _reply_after_wait(look, until, _status(home, store, row, new_alerts))
            reporter.report(row, now)
            if now >= reap_at:
                launcher.reap(home)
                reap_at = now + _REAP_S
            time.sleep(min(_POLL_S, max(0.0, deadline - time.monotonic())))
            row = store.get_run(row.run_id)


@dataclass(frozen=True)
class _Look:
    """What one look at a run that is waited for has shown.

    Attributes:
        has_reached: whether the run has reached what is waited for.
        events: its events since the wait began, or since the cursor that the wait was given.
        events_end: the byte of the run's events file at which these events end.
    """

    has_reached: bool
    events: Sequence[Line]
    events_end: int


def _look_at(run: RunDir, row: RunRow, until: str, since_byte: int) -> _Look:
    """Read the run's events from `since_byte` on and see whether it has reached `until`."""
    events, end = events_from(run, since_byte)
    return _Look(_has_reached(run, row, until, events), events, end)


def _reply_after_wait(look: _Look, until: str, status: Reply) -> Reply:
    """The reply of `wait`: the run's status, and what the last look at the run has shown."""
    added: Reply = {}
    if until == "next_eval" and look.has_reached:
        added = _evaluation_fields(look.events, status)
    # The cursor is the end of the events just read: later events are left to the next call.
    return status | added | {"reached": look.has_reached, "cursor": str(look.events_end)}


class _Reporter:
    """Reports the status of a run that is waited for at every change, and about once a second.

    Args:
        on_progress: called with each status; None reports nothing.
    """

    def __init__(
        self, home: Home, store: Store, on_progress: Callable[[Reply], None] | None
    ) -> None:
        self._home = home
        self._store = store
        self._on_progress = on_progress
        self._report_at = 0.0  # the first report is made at once
        self._reported_signs: tuple[str, int, int, int] | None = None  # at the last report

    def report(self, row: RunRow, now: float) -> None:
        """Report the status if the run has changed or the last report is long ago.

        Args:
            row: the run as the database has it.
            now: seconds on the monotonic clock.
        """
        if self._on_progress is None:
            return
        run = self._home.run(row.run_id)
        # These differ whenever the run has changed.
        signs = (row.state, row.attempt, _file_size(run.metrics), _file_size(run.events))
        if signs != self._reported_signs or now >= self._report_at:
            self._on_progress(_status(self._home, self._store, row))
            self._reported_signs = signs
            self._report_at = now + _REPORT_S


def cancel(home: Home, run_id: str, reason: str = "") -> Reply:
    """Ask a run to end; asking again changes nothing.

    A queued or interrupted run is cancelled at once. A running one is set to "stopping": its
    supervisor, which needs no server, lets the trainer write a checkpoint and then ends it.

    Args:
        reason: why, for the record; "" records "cancelled on request".

    Raises UserError RUN_NOT_FOUND, or BAD_ARGUMENT where `reason` is too long.
    """
    check_texts(reason=reason)
    with Store(home) as store:
        row = store.get_run(run_id)
        run = home.run(row.run_id)
        _set_cancelled_or_stopping(store, run, reason.strip() or "cancelled on request")
        launcher.reap(home)  # the supervisor may be dead already; then the run ends here
        row = store.get_run(row.run_id)
        write_status(run, row)
    return _cancel_reply(run, row, warnings=taken_as("run_id", run_id, row.run_id))


def _set_cancelled_or_stopping(store: Store, run: RunDir, reason: str) -> None:
    """Set a run without a process to "cancelled" and one with a process to "stopping". A run that
    is stopping already or has ended stays as it is."""
    values = {"reason_kind": "cancelled", "reason": reason}
    was_cancelled = store.set_state(
        run.id,
        "cancelled",
        only_from={"queued", "interrupted"},
        ended=time.time(),
        hint=outcome.resume_hint(run),
        **values,
    )
    if not was_cancelled:
        store.set_state(run.id, "stopping", only_from={"preparing", "running"}, **values)


def _cancel_reply(run: RunDir, row: RunRow, warnings: list[str]) -> Reply:
    """The reply of `cancel`: the run's state, its last checkpoint, and how to go on."""
    checkpoint = outcome.checkpoint_name(run)
    return {
        "run_id": row.run_id,
        "state": row.state,
        "last_checkpoint": checkpoint,
        "resume": str(outcome.resume_hint(run)) if row.state != "done" else "",
        "summary": _cancel_summary(row, checkpoint),
        "next": _after_cancel(row),
        "warnings": warnings,
    }


def _status(home: Home, store: Store, row: RunRow, alerts: list[Line] | None = None) -> Reply:
    """Build the status of a run.

    Args:
        alerts: the alerts to show, of which the newest ten are kept; None shows the latest alerts
            of the whole run.
    """
    run = home.run(row.run_id)
    progress = read_progress(run, row)
    status = _basic_fields(row, progress)
    if alerts is not None:
        status["alerts"] = alerts[-_MAX_ALERTS:]  # the newest ones
    was_deleted = run.deleted.exists()
    if was_deleted:
        status["warnings"].append("its checkpoints, answers and curves were deleted")
    if row.state == "queued":
        status["queue_position"] = store.queue_position(row.run_id)
        status["warnings"] += _why_waiting(run)
    _add_quiet_time(status, progress)
    if row.state == "done":
        status = _with_result(run, row, status)
    if row.state in ("failed", "cancelled", "stopping") and row.reason_kind:
        status["error"] = _reason_of_end(run, row)
    if was_deleted:
        _remove_calls(status)
    _add_choosing_tasks(status, row, progress)
    status["summary"] = _summary(row, status)
    return status


def _add_quiet_time(status: Reply, progress: Progress) -> None:
    """Add `quiet_s`, with a warning, where the run has written nothing for over a minute."""
    quiet_s = progress.quiet_s
    if quiet_s is not None and quiet_s > _MIN_QUIET_S:
        status["quiet_s"] = quiet_s
        status["warnings"].append(f"nothing was written for {quiet_s:.0f} s")


def _add_choosing_tasks(status: Reply, row: RunRow, progress: Progress) -> None:
    """Add `heldout`, the held-out tasks by which a training run chooses its best checkpoint; only
    where the run has recorded them."""
    half = choosing_half_in(progress.started) if row.kind == "train" else None
    if half is not None:
        status["heldout"] = half.to_json()


def _basic_fields(row: RunRow, progress: Progress) -> Reply:
    """The fields that the status of every run has, with its latest alerts and no warnings."""
    return {
        "run_id": row.run_id,
        "state": row.state,
        "kind": row.kind,
        "algorithm": row.algorithm,
        "env_id": row.env_id,
        "model": row.model,
        "attempt": row.attempt,
        "device": row.device,
        "step": progress.step,
        "total_steps": progress.total_steps,
        "eta_s": progress.eta_s,
        "metrics": progress.metrics,
        "alerts": progress.alerts,
        "verdict": row.verdict,
        "spent_hours": round(row.spent_hours, 5),
        "cursor": str(progress.cursor),
        "warnings": [],
    }


def _remove_calls(status: Reply) -> None:
    """Take the calls out of the status of a deleted run: nothing of it is left to read, to deploy
    or to continue."""
    status["next"] = []
    if "error" in status:
        status["error"]["hint"] = "Submit a new run."
        status["error"].pop("call", None)


def _with_result(run: RunDir, row: RunRow, status: Reply) -> Reply:
    """The status of a run that is done, with its result, and the warnings and next calls of it."""
    result_fields = _result_fields(run)
    warnings = status["warnings"]
    new_warnings = [
        warning for warning in result_fields.get("warnings", []) if warning not in warnings
    ]
    status = status | result_fields | {"warnings": warnings + new_warnings}
    if row.kind == "evaluate":
        status["next"] = _after_evaluation(run, row)
    return _errors_first(run, row, status)


def _reason_of_end(run: RunDir, row: RunRow) -> Reply:
    """Why a run failed, was cancelled or is stopping, and how to go on.

    The keys are `kind` and `message` of the reason, `hint` with its `call`, `evidence` (of a failed
    run), and `last_checkpoint`.
    """
    hint = row.hint or outcome.resume_hint(run)
    return {
        "kind": row.reason_kind,
        "message": row.reason,
        **hint.as_fields(),
        "evidence": outcome.evidence(run) if row.state == "failed" else "",
        "last_checkpoint": outcome.checkpoint_name(run),
    }


def _evaluation_fields(events: Sequence[Line], status: Reply) -> Reply:
    """What `wait` adds to the status for the evaluation that it waited for.

    - `evaluation`: the values of the newest "evaluated" event of `events`, which has one.
    - `step`: the newest step known of the run, where the event names its own step.
    - `summary`: that of the status, with a sentence about the evaluation.
    """
    newest = [event for event in events if event.get("event") == "evaluated"][-1]
    scores = {name: value for name, value in newest.items() if name not in _EVENT_KEYS}
    evaluated_step = scores.get("step")
    names_step = isinstance(evaluated_step, int) and not isinstance(evaluated_step, bool)
    added: Reply = {"evaluation": scores}
    if names_step:
        # The status has the step of the metrics, which may be behind this evaluation: they get
        # their line after the event. They may be ahead of it already, too.
        added["step"] = max(evaluated_step, status["step"] or 0)
    at_step = f" at step {evaluated_step}" if names_step else ""
    text = _scores_text(scores, status) or str(newest.get("message") or "")
    return added | {"summary": f"{status['summary']} Evaluated{at_step}: {text}."}


def _scores_text(scores: Mapping[str, Any], status: Reply) -> str:
    """The scores of an evaluation in words, with the number of held-out tasks that choose the
    checkpoint where the status has it; "" where there is no score."""
    half = ChoosingHalf(**status["heldout"]) if "heldout" in status else None
    return scores_in_words(scores, half)


def _has_reached(run: RunDir, row: RunRow, until: str, events: Sequence[Line]) -> bool:
    """Whether the run has reached `until`, one of UNTIL.

    Args:
        events: the run's events since the wait began, or since the cursor it was given. An
            evaluation or an alert counts only if it is among them.
    """
    if until == "end":
        return row.state in TERMINAL
    if until == "first_step":
        last_metrics = last_line(run.metrics) or {}
        return isinstance(last_metrics.get("step"), int) and last_metrics["step"] >= 1
    event_name = "evaluated" if until == "next_eval" else "alert"
    return any(event.get("event") == event_name for event in events)


def _check_until(until: str) -> None:
    """Raises UserError BAD_ARGUMENT for something that cannot be waited for."""
    if until not in UNTIL:
        raise UserError(
            "BAD_ARGUMENT",
            f"until={until!r} is not something to wait for",
            hint=f"Use one of {', '.join(UNTIL)}.",
            field="until",
        )


def _position_of_cursor(cursor: str) -> int:
    """The byte in the run's events that the cursor of a wait stands for. Raises UserError
    BAD_CURSOR."""
    # A number of more than 15 digits is no position in any file.
    if not (cursor.isascii() and cursor.isdigit()) or len(cursor) > 15:
        raise UserError(
            "BAD_CURSOR",
            f"cursor={cursor[:40]!r} was not made by wait_run",
            hint="Pass the cursor of the last answer unchanged, or leave it out.",
            field="cursor",
        )
    return int(cursor)


def _file_size(path: Path) -> int:
    """The size of a file in bytes; -1 where there is no file."""
    try:
        return os.stat(path).st_size
    except OSError:
        return -1


def _why_waiting(run: RunDir) -> list[str]:
    """A warning that names the secrets that the queued run needs and this server lacks; [] where it
    lacks none."""
    missing = launcher.missing_secrets(run)
    if not missing:
        return []
    names = ", ".join(missing)
    return [f"it waits for a server that has the secrets {names} in its environment"]


def _result_fields(run: RunDir) -> Reply:
    """The part of a status that comes from the worker's result.json; empty where there is none.

    - `result`: the content of the file. Of its evidence only `_EVIDENCE_KEYS` are shown; the
      verdict is left out, because the status itself has it.
    - `warnings` and `next` of the evidence, each only where it has any.
    """
    result = read_object(run.result)
    if not result:
        return {}
    evidence = result.get("evidence")
    if not isinstance(evidence, dict):
        evidence = {}
    shown_result = {
        key: value for key, value in result.items() if key not in ("evidence", "verdict")
    }
    shown_evidence = {
        name: evidence[name] for name in _EVIDENCE_KEYS if evidence.get(name) is not None
    }
    if shown_evidence:
        shown_result["evidence"] = shown_evidence
    result_fields: Reply = {"result": shown_result}
    if evidence.get("warnings"):
        result_fields["warnings"] = list(evidence["warnings"])
    if evidence.get("next"):
        result_fields["next"] = evidence["next"]
    return result_fields


def _errors_first(run: RunDir, row: RunRow, status: Reply) -> Reply:
    """The status with a warning about failed scores before all others; unchanged where none failed.

    The calls that show the failures come before all other next calls.
    """
    failed = _failed_scores(status.get("result") or {})
    if not failed.get("failed"):
        return status
    following = status.get("next", [])
    if row.kind == "evaluate":  # nobody should curate a dataset before having read the failures
        following = [call for call in following if call["tool"] != "curate"]
    return status | {
        "warnings": [_failed_scores_warning(failed), *status["warnings"]],
        "next": [*_calls_showing_failures(row), *following],
    }


def _failed_scores_warning(failed: Mapping[str, Any]) -> str:
    """The warning that scores failed, from the counts that `_failed_scores` returns."""
    warning = f"{failed['failed']} of {failed['of']} scores failed"
    last_step = failed.get("last_step")
    if last_step and last_step["failed"]:
        warning += f", {last_step['failed']} of {last_step['of']} in the last step"
    return f"{warning}: the calls in next say why and show them"


def _calls_showing_failures(row: RunRow) -> list[Reply]:
    """The calls that say why scores of a run failed, and show the answers, as JSON."""
    argument = {"run_id": row.run_id}
    return [
        Call("diagnose", argument).to_json(),
        Call("read_rollouts", argument | {"pick": "error"}).to_json(),
    ]


def _failed_scores(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """How many scores failed: {"failed", "of"}; empty where nothing was counted.

    For an evaluation these are summed over its models. For a training run its worker counted them,
    and added the same counts of the last step as "last_step".
    """
    models = result.get("models")
    if not isinstance(models, list):
        return result.get("failed_scores") or {}
    return {
        "failed": sum(model.get("errors") or 0 for model in models),
        "of": sum(model.get("attempts") or 0 for model in models),
    }


def _after_evaluation(run: RunDir, row: RunRow) -> list[Reply]:
    """The calls to make after an evaluation, as JSON:

    - of one model: read its answers;
    - of several models: compare them, and read the answers that differ;
    - first of all, where training tasks were tried several times each: curate a dataset.
    """
    config = run.find_config()  # None if damaged; the status is shown all the same
    models = config.model_refs if config else []
    if len(models) > 1:
        calls = [
            Call("compare_runs", {"ids": models, "env_id": row.env_id}),
            Call("read_rollouts", {"run_id": row.run_id, "pick": "changed"}),
        ]
    else:
        calls = [Call("read_rollouts", {"run_id": row.run_id})]
    evaluation = config if isinstance(config, EvaluateConfig | RegradeConfig) else None
    # Where the rewards of a task differ, a dataset can be made of its best answers.
    if evaluation and evaluation.split == "train" and evaluation.attempts > 1:
        dataset = f"{row.env_id.partition('@')[0][:35]}-best"
        arguments = {"source_ids": [row.run_id], "name": dataset, "where": "0 < avg < 1"}
        calls.insert(0, Call("curate", arguments))
    return [call.to_json() for call in calls]


def _summary(row: RunRow, status: Reply) -> str:
    """One sentence about a run's state, such as `sums-grpo-3 is running at step 12 of 60, 340 s
    left.`"""
    at_step = _at_step(status)
    match row.state:
        case "queued":
            return f"{row.run_id} is queued at position {status['queue_position']}."
        case "done":
            return _done_summary(row, status)
        case "failed":
            return f"{row.run_id} failed{at_step} ({row.reason_kind}): {row.reason.rstrip('.')}."
        case "cancelled":
            return f"{row.run_id} is cancelled{at_step}: {row.reason.rstrip('.')}."
        case _:  # it holds a device, or is interrupted
            seconds_left = status["eta_s"]
            time_left = f", {seconds_left:.0f} s left" if seconds_left else ""
            return f"{row.run_id} is {row.state}{at_step}{time_left}."


def _at_step(status: Reply) -> str:
    """The run's step as part of a sentence, such as ` at step 12 of 60`; "" before it has one."""
    if status["step"] is None:
        return ""
    of_steps = f" of {status['total_steps']}" if status["total_steps"] is not None else ""
    return f" at step {status['step']}{of_steps}"


def _done_summary(row: RunRow, status: Reply) -> str:
    """A sentence that the run is done, and what its result says of itself."""
    text = status.get("result", {}).get("summary", "")
    verdict = f", verdict {row.verdict}" if row.kind == "train" else ""
    return f"{row.run_id} is done{verdict}. {text}".strip()


def _cancel_summary(row: RunRow, checkpoint: str) -> str:
    """What `cancel` did, in one sentence. `checkpoint` is the name of the run's last checkpoint, ""
    where it has none."""
    match row.state:
        case "cancelled":
            return f"{row.run_id} is cancelled; last checkpoint: {checkpoint or 'none'}."
        case "stopping":
            return f"{row.run_id} is stopping: it writes a checkpoint first."
        case _:
            return f"{row.run_id} is {row.state} already; nothing was changed."


def _after_cancel(row: RunRow) -> list[Reply]:
    """The call to make after `cancel`: wait for a run that is stopping, or resume one that is
    cancelled or failed. [] for a run that is done."""
    if row.state == "stopping":
        return [Call("wait_run", {"run_id": row.run_id}).to_json()]
    if row.state in ("cancelled", "failed"):
        return [Call("submit_train", {"resume": row.run_id}).to_json()]
    return []
