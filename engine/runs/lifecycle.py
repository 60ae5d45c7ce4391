"""What a client may ask about runs: submit, look, wait, cancel, and the state of the home.

Everything here reads the database and the run's files; nothing keeps state in the server, so it
may be killed at any moment and a second server gives the same answers.
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
from engine.home.halves import ChoosingHalf, chosen_by, scores_in_words
from engine.home.progress import alerts_in, events_end, events_from, read_progress, write_status
from engine.home.rows import TERMINAL, RunRow, taken_as
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.processes import launcher, outcome
from engine.records.lines.line_record import Line
from engine.records.run_config import EvaluateConfig, RegradeConfig
from engine.runs.overview import overview
from engine.runs.submit.admission import check_words
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

MAX_WAIT_S = 50.0
UNTIL = ("end", "first_step", "next_eval", "alert")
_POLL_S = 0.15
_REAP_S = 2.0  # how often a wait looks for runs that died
_TELL_S = 1.0  # how often a wait reports although nothing changed
_EVENT_WORDS = ("event", "time", "message")
_EVIDENCE = (
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
    """Everything about one run that fits an answer. Raises UserError RUN_NOT_FOUND."""
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
    """The status when `until` has come, the run has ended, or `timeout_s` (0..50) is over.

    `cursor` from an earlier wait makes an evaluation or alert since then count; without it they
    count from now. `on_progress` gets the status at every change and about once a second; what it
    raises ends the wait. Raises UserError RUN_NOT_FOUND, BAD_ARGUMENT, BAD_CURSOR.
    """
    if until not in UNTIL:
        raise UserError(
            "BAD_ARGUMENT",
            f"until={until!r} is not something to wait for",
            hint=f"Use one of {', '.join(UNTIL)}.",
            field="until",
        )
    deadline = time.monotonic() + min(max(float(timeout_s), 0.0), MAX_WAIT_S)
    launcher.reap(home)
    with Store(home) as store:
        row = store.get_run(run_id)
        run = home.run(row.run_id)
        since = _parse_cursor(cursor) if cursor else events_end(run)
        reap_at, tell_at, seen = time.monotonic() + _REAP_S, 0.0, None
        while True:
            now = time.monotonic()
            events, end = events_from(run, since)
            reached = _reached(run, row, until, events)
            if reached or row.state in TERMINAL or now >= deadline:
                status = _status(home, store, row, alerts_in(events) if cursor else None)
                if until == "next_eval" and reached:
                    status |= _evaluated(events, status)
                # The cursor ends where this look ended: what came meanwhile is for the next call.
                return status | {"reached": reached, "cursor": str(end)}
            mark = (row.state, row.attempt, _size(run.metrics), _size(run.events))
            if on_progress is not None and (mark != seen or now >= tell_at):
                on_progress(_status(home, store, row))
                seen, tell_at = mark, now + _TELL_S
            if now >= reap_at:
                launcher.reap(home)
                reap_at = now + _REAP_S
            time.sleep(min(_POLL_S, max(0.0, deadline - time.monotonic())))
            row = store.get_run(row.run_id)


def cancel(home: Home, run_id: str, reason: str = "") -> Reply:
    """Ask a run to end; asking again changes nothing.

    A queued run is cancelled at once; a running one stops after writing a checkpoint, which its
    supervisor sees to whether or not any server lives. Raises UserError RUN_NOT_FOUND or
    BAD_ARGUMENT.
    """
    check_words(reason=reason)
    reason_given = reason.strip() or "cancelled on request"
    with Store(home) as store:
        row = store.get_run(run_id)
        run = home.run(row.run_id)
        values = {"reason_kind": "cancelled", "reason": reason_given}
        waiting = {"ended": time.time(), "hint": outcome.resume_hint(run), **values}
        if not store.set_state(
            row.run_id, "cancelled", only_from={"queued", "interrupted"}, **waiting
        ):
            store.set_state(row.run_id, "stopping", only_from={"preparing", "running"}, **values)
        launcher.reap(home)  # nobody may be there to obey
        row = store.get_run(row.run_id)
        write_status(run, row)
        saved = outcome.checkpoint_name(run)
        return {
            "run_id": row.run_id,
            "state": row.state,
            "last_checkpoint": saved,
            "resume": str(outcome.resume_hint(run)) if row.state != "done" else "",
            "summary": _cancel_summary(row, saved),
            "next": _after_cancel(row),
            "warnings": taken_as("run_id", run_id, row.run_id),
        }


def _status(home: Home, store: Store, row: RunRow, alerts: list[Line] | None = None) -> Reply:
    """Where a run stands, as `wait_run` answers it; `alerts` replaces those of the whole run."""
    run = home.run(row.run_id)
    now = read_progress(run, row)
    status: Reply = {
        "run_id": row.run_id,
        "state": row.state,
        "kind": row.kind,
        "algorithm": row.algorithm,
        "env_id": row.env_id,
        "model": row.model,
        "attempt": row.attempt,
        "device": row.device,
        "step": now.step,
        "total_steps": now.total_steps,
        "eta_s": now.eta_s,
        "metrics": now.metrics,
        "alerts": now.alerts if alerts is None else alerts[-10:],
        "verdict": row.verdict,
        "spent_hours": round(row.spent_hours, 5),
        "cursor": str(now.cursor),
        "warnings": [],
    }
    if run.deleted.exists():
        status["warnings"].append("its checkpoints, answers and curves were deleted")
    if row.state == "queued":
        status["queue_position"] = store.queue_position(row.run_id)
        status["warnings"] += _why_waiting(run)
    if now.quiet_s is not None and now.quiet_s > 60:
        status["quiet_s"] = now.quiet_s
        status["warnings"].append(f"nothing was written for {now.quiet_s:.0f} s")
    if row.state == "done":
        earlier = status["warnings"]
        status |= _result(run)
        status["warnings"] = earlier + [note for note in status["warnings"] if note not in earlier]
        if row.kind == "evaluate":
            status["next"] = _after_evaluation(run, row)
        status = _errors_first(run, row, status)
    if row.state in ("failed", "cancelled", "stopping") and row.reason_kind:
        status["error"] = {
            "kind": row.reason_kind,
            "message": row.reason,
            **(row.hint or outcome.resume_hint(run)).as_fields(),
            "evidence": outcome.evidence(run) if row.state == "failed" else "",
            "last_checkpoint": outcome.checkpoint_name(run),
        }
    if run.deleted.exists():
        status["next"] = []  # nothing is left to read, to deploy or to continue
        if "error" in status:
            status["error"] |= {"hint": "Submit a new run."}
            status["error"].pop("call", None)
    if row.kind == "train" and (half := chosen_by(now.started)):
        status["heldout"] = half.to_json()
    status["summary"] = _summary(row, status)
    return status


def _evaluated(events: Sequence[Line], status: Reply) -> Reply:
    """The evaluation that was waited for, from its event: the line of metrics comes after it."""
    last = [event for event in events if event.get("event") == "evaluated"][-1]
    scores = {name: value for name, value in last.items() if name not in _EVENT_WORDS}
    half = ChoosingHalf(**status["heldout"]) if "heldout" in status else None
    text = scores_in_words(scores, half) or str(last.get("message") or "")
    about: Reply = {"evaluation": scores}
    where, step = "", scores.get("step")
    if isinstance(step, int) and not isinstance(step, bool):
        about["step"] = max(step, status["step"] or 0)
        where = f" at step {step}"
    return about | {"summary": f"{status['summary']} Evaluated{where}: {text}."}


def _reached(run: RunDir, row: RunRow, until: str, events: Sequence[Line]) -> bool:
    if until == "end":
        return row.state in TERMINAL
    if until == "first_step":
        last = last_line(run.metrics) or {}
        return isinstance(last.get("step"), int) and last["step"] >= 1
    wanted = "evaluated" if until == "next_eval" else "alert"
    return any(event.get("event") == wanted for event in events)


def _parse_cursor(cursor: str) -> int:
    if not (cursor.isascii() and cursor.isdigit()) or len(cursor) > 15:
        raise UserError(
            "BAD_CURSOR",
            f"cursor={cursor[:40]!r} was not made by wait_run",
            hint="Pass the cursor of the last answer unchanged, or leave it out.",
            field="cursor",
        )
    return int(cursor)


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1


def _why_waiting(run: RunDir) -> list[str]:
    missing = launcher.missing_secrets(run)
    if not missing:
        return []
    names = ", ".join(missing)
    return [f"it waits for a server that has the secrets {names} in its environment"]


def _result(run: RunDir) -> Reply:
    """What the worker concluded, without its long lists."""
    result = read_object(run.result)
    if not result:
        return {}
    evidence = result.get("evidence")
    evidence = evidence if isinstance(evidence, dict) else {}
    shown = {name: evidence[name] for name in _EVIDENCE if evidence.get(name) is not None}
    kept = {key: value for key, value in result.items() if key not in ("evidence", "verdict")}
    about: Reply = {"result": kept | ({"evidence": shown} if shown else {})}
    if evidence.get("warnings"):
        about["warnings"] = list(evidence["warnings"])
    if evidence.get("next"):
        about["next"] = evidence["next"]
    return about


def _errors_first(run: RunDir, row: RunRow, status: Reply) -> Reply:
    """Scores that failed stand before whatever was scored, with the calls that say why."""
    failed = _failed_scores(status.get("result") or {})
    if not failed.get("failed"):
        return status
    asked = {"run_id": row.run_id}
    calls = [
        Call("diagnose", asked).to_json(),
        Call("read_rollouts", asked | {"pick": "error"}).to_json(),
    ]
    sentence = f"{failed['failed']} of {failed['of']} scores failed"
    if (last := failed.get("last_step")) and last["failed"]:
        sentence += f", {last['failed']} of {last['of']} in the last step"
    sentence += ": the calls in next say why and show them"
    if row.kind == "evaluate":  # what it measured is read before anything is made of it
        calls += [call for call in status["next"] if call["tool"] != "curate"]
    else:
        calls += status.get("next", [])
    return status | {"warnings": [sentence, *status["warnings"]], "next": calls}


def _failed_scores(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """How many of how many: of all models of an evaluation, else as the worker counted."""
    models = result.get("models")
    if not isinstance(models, list):
        return result.get("failed_scores") or {}
    counts = (("failed", "errors"), ("of", "attempts"))
    return {name: sum(model.get(key) or 0 for model in models) for name, key in counts}


def _after_evaluation(run: RunDir, row: RunRow) -> list[Reply]:
    """Compare what was evaluated, and read it; an evaluation left no model to deploy."""
    config = run.find_config()  # the end of a run with a damaged config is shown all the same
    models = config.model_refs if config else []
    look = {"run_id": row.run_id}
    if len(models) > 1:
        both = {"ids": models, "env_id": row.env_id}
        calls = [Call("compare_runs", both), Call("read_rollouts", look | {"pick": "changed"})]
    else:
        calls = [Call("read_rollouts", look)]
    evaluation = config if isinstance(config, EvaluateConfig | RegradeConfig) else None
    if evaluation and evaluation.split == "train" and evaluation.attempts > 1:
        name = f"{row.env_id.partition('@')[0][:35]}-best"
        chosen = {"source_ids": [row.run_id], "name": name, "where": "0 < avg < 1"}
        calls.insert(0, Call("curate", chosen))
    return [call.to_json() for call in calls]


def _summary(row: RunRow, status: Reply) -> str:
    """One sentence for the state a run is in."""
    where = ""
    if status["step"] is not None:
        of = f" of {status['total_steps']}" if status["total_steps"] is not None else ""
        where = f" at step {status['step']}{of}"
    match row.state:
        case "queued":
            return f"{row.run_id} is queued at position {status['queue_position']}."
        case "done":
            text = status.get("result", {}).get("summary", "")
            verdict = f", verdict {row.verdict}" if row.kind == "train" else ""
            return f"{row.run_id} is done{verdict}. {text}".strip()
        case "failed":
            return f"{row.run_id} failed{where} ({row.reason_kind}): {row.reason.rstrip('.')}."
        case "cancelled":
            return f"{row.run_id} is cancelled{where}: {row.reason.rstrip('.')}."
        case _:
            left = status["eta_s"]
            return f"{row.run_id} is {row.state}{where}" + (
                f", {left:.0f} s left." if left else "."
            )


def _cancel_summary(row: RunRow, saved: str) -> str:
    match row.state:
        case "cancelled":
            return f"{row.run_id} is cancelled; last checkpoint: {saved or 'none'}."
        case "stopping":
            return f"{row.run_id} is stopping: it writes a checkpoint first."
        case _:
            return f"{row.run_id} is {row.state} already; nothing was changed."


def _after_cancel(row: RunRow) -> list[Reply]:
    if row.state == "stopping":
        return [Call("wait_run", {"run_id": row.run_id}).to_json()]
    if row.state in ("cancelled", "failed"):
        return [Call("submit_train", {"resume": row.run_id}).to_json()]
    return []
