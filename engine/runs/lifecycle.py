"""What a client may ask about runs: submit, status, wait, cancel, and the state of the home.

Everything here reads the database and the run's files. The server keeps no state of its own: it may
be killed at any moment, and a second server gives the same answers.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
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
        reporter = _Reporter(home, store, on_progress) if on_progress is not None else None
        while True:
            now = time.monotonic()
            events, end = events_from(run, since_byte)
            reached = _has_reached(run, row, until, events)
            if reached or row.state in TERMINAL or now >= deadline:
                # A caller without a cursor has not seen any alert of the run yet.
                new_alerts = alerts_in(events) if cursor else None
                reply = _status(home, store, row, new_alerts)
                if until == "next_eval" and reached:
                    reply |= _evaluation_fields(events, reply)
                # `end` belongs to the events just read: later ones are left to the next call.
                return reply | {"reached": reached, "cursor": str(end)}
            if reporter is not None:
                reporter.report(row, now)
            if now >= reap_at:
                launcher.reap(home)
                reap_at = now + _REAP_S
            time.sleep(min(_POLL_S, max(0.0, deadline - time.monotonic())))
            row = store.get_run(row.run_id)


class _Reporter:
    """Reports the status of a run that is waited for at every change, and about once a second."""

    def __init__(self, home: Home, store: Store, on_progress: Callable[[Reply], None]) -> None:
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
    final_reason = reason.strip() or "cancelled on request"
    with Store(home) as store:
        row = store.get_run(run_id)
        run = home.run(row.run_id)
        values = {"reason_kind": "cancelled", "reason": final_reason}
        was_cancelled = store.set_state(
            row.run_id,
            "cancelled",
            only_from={"queued", "interrupted"},
            ended=time.time(),
            hint=outcome.resume_hint(run),
            **values,
        )
        if not was_cancelled:
            store.set_state(row.run_id, "stopping", only_from={"preparing", "running"}, **values)
        launcher.reap(home)  # the supervisor may be dead already; then the run ends here
        row = store.get_run(row.run_id)
        write_status(run, row)
        checkpoint = outcome.checkpoint_name(run)
        return {
            "run_id": row.run_id,
            "state": row.state,
            "last_checkpoint": checkpoint,
            "resume": str(outcome.resume_hint(run)) if row.state != "done" else "",
            "summary": _cancel_summary(row, checkpoint),
            "next": _after_cancel(row),
            "warnings": taken_as("run_id", run_id, row.run_id),
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
        status["alerts"] = alerts[-10:]  # the newest ten
    was_deleted = run.deleted.exists()
    if was_deleted:
        status["warnings"].append("its checkpoints, answers and curves were deleted")
    if row.state == "queued":
        status["queue_position"] = store.queue_position(row.run_id)
        status["warnings"] += _why_waiting(run)
    if progress.quiet_s is not None and progress.quiet_s > 60:  # a minute may be a slow step
        status["quiet_s"] = progress.quiet_s
        status["warnings"].append(f"nothing was written for {progress.quiet_s:.0f} s")
    if row.state == "done":
        status = _with_result(run, row, status)
    if row.state in ("failed", "cancelled", "stopping") and row.reason_kind:
        status["error"] = _reason_of_end(run, row)
    if was_deleted:
        _remove_calls(status)
    half = choosing_half_in(progress.started) if row.kind == "train" else None
    if half is not None:
        status["heldout"] = half.to_json()
    status["summary"] = _summary(row, status)
    return status


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

    The keys are `evaluation` (the scores), `step`, and a `summary` that names both. They are read
    from the newest "evaluated" event, because the metrics get their line only after that event.

    Args:
        events: the events since the wait began, at least one of them "evaluated".
    """
    newest = [event for event in events if event.get("event") == "evaluated"][-1]
    scores = {name: value for name, value in newest.items() if name not in _EVENT_KEYS}
    half = ChoosingHalf(**status["heldout"]) if "heldout" in status else None
    text = scores_in_words(scores, half) or str(newest.get("message") or "")
    added: Reply = {"evaluation": scores}
    at_step = ""
    step = scores.get("step")
    if isinstance(step, int) and not isinstance(step, bool):
        # The metrics may be behind this evaluation, or already ahead of it.
        added["step"] = max(step, status["step"] or 0)
        at_step = f" at step {step}"
    return added | {"summary": f"{status['summary']} Evaluated{at_step}: {text}."}


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
    argument = {"run_id": row.run_id}
    calls = [
        Call("diagnose", argument).to_json(),
        Call("read_rollouts", argument | {"pick": "error"}).to_json(),
    ]
    warning = f"{failed['failed']} of {failed['of']} scores failed"
    last_step = failed.get("last_step")
    if last_step and last_step["failed"]:
        warning += f", {last_step['failed']} of {last_step['of']} in the last step"
    warning += ": the calls in next say why and show them"
    following = status.get("next", [])
    if row.kind == "evaluate":  # nobody should curate a dataset before having read the failures
        following = [call for call in following if call["tool"] != "curate"]
    calls += following
    return status | {"warnings": [warning, *status["warnings"]], "next": calls}


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
    at_step = ""
    if status["step"] is not None:
        of_steps = f" of {status['total_steps']}" if status["total_steps"] is not None else ""
        at_step = f" at step {status['step']}{of_steps}"
    match row.state:
        case "queued":
            return f"{row.run_id} is queued at position {status['queue_position']}."
        case "done":
            text = status.get("result", {}).get("summary", "")
            verdict = f", verdict {row.verdict}" if row.kind == "train" else ""
            return f"{row.run_id} is done{verdict}. {text}".strip()
        case "failed":
            return f"{row.run_id} failed{at_step} ({row.reason_kind}): {row.reason.rstrip('.')}."
        case "cancelled":
            return f"{row.run_id} is cancelled{at_step}: {row.reason.rstrip('.')}."
        case _:
            seconds_left = status["eta_s"]
            time_left = f", {seconds_left:.0f} s left" if seconds_left else ""
            return f"{row.run_id} is {row.state}{at_step}{time_left}."


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
