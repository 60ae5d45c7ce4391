"""How an attempt ended: from an exit status and the files the trainer left to a final state.

The supervisor decides and writes `exit.json`; should it die before the row is set, the next
process that touches the home reads the record and finishes the work.
"""

import os
import signal as signals
import time
from dataclasses import asdict, dataclass
from typing import Any

from engine.core.errors import FAILURE_KINDS
from engine.core.files import append_line, last_line, read_json, read_tail, write_json
from engine.core.hints import Call, Hint
from engine.home.rows import DEFAULT_GPU_HOURS, RunRow
from engine.home.run_dir import RunDir
from engine.home.sanitize import redactor_for
from engine.home.store import Store

EXIT_DONE = 0
EXIT_FAILED = 3
EXIT_STOPPED = 4
MAX_CONTINUATIONS = 3
_NO_ROOM = 16_384  # bytes: less than a failure record, its event and a traceback need


@dataclass(frozen=True)
class Outcome:
    """The end of one attempt; the content of `exit.json`."""

    attempt: int
    rc: int | None
    signal: int | None
    state: str
    reason_kind: str
    reason: str
    hint: Hint
    verdict: str
    last_checkpoint: str
    elapsed_s: float
    time: float


@dataclass(frozen=True)
class Failure:
    """Why a worker could not go on; the content of `failure.json`.

    Attributes:
        kind: one of engine.core.errors.FAILURE_KINDS.
        message: what happened, one sentence.
        evidence: numbers or a line of output that show it.
        hint: the next move.
        last_checkpoint: its name, None where none is complete.
    """

    kind: str
    message: str
    evidence: str
    hint: Hint
    last_checkpoint: str | None = None

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "hint": self.hint.to_json()}


def checkpoint_name(run: RunDir) -> str:
    """The last complete checkpoint as "step_000020", "" without one."""
    latest = run.latest_checkpoint()
    return latest.name if latest else ""


def evidence(run: RunDir) -> str:
    """The line that shows why the run failed, safe to show; "" where there is none."""
    failure = find_failure(run)
    return _safe(run, failure.evidence if failure else "")


def _safe(run: RunDir, text: str) -> str:
    """`text`, which user code may have worded, without secrets; "" costs no look at the config."""
    if not text:
        return ""
    config = run.find_config()  # how a run ended is said of one with a damaged config too
    return redactor_for(run.home, config.env_dir if config else None).text(text)


def resume_hint(run: RunDir) -> Hint:
    """How to go on with a run that ended before it was done."""
    name = checkpoint_name(run)
    resume = Call("submit_train", {"resume": run.id})
    if name:
        return Hint(f"To continue from {name}:", resume)
    return Hint("No checkpoint is complete. To start again from step 0:", resume)


def decide(
    run: RunDir, row: RunRow, *, status: int, elapsed_s: float, memory_ran_out: bool = False
) -> Outcome:
    """What `status` (an exit status, or minus a signal) makes of the attempt.

    `row` is read after the trainer ended: a row that is stopping says who asked for the end.
    """
    killed_by = -status if status < 0 else None
    state, kind, reason, hint, verdict = _verdict(run, row, status, memory_ran_out)
    return Outcome(
        attempt=row.attempt,
        rc=None if killed_by else status,
        signal=killed_by,
        state=state,
        reason_kind=kind,
        reason=_safe(run, reason),
        hint=Hint(_safe(run, hint.text), hint.call),
        verdict=verdict,
        last_checkpoint=checkpoint_name(run),
        elapsed_s=round(elapsed_s, 3),
        time=time.time(),
    )


def abandon(run: RunDir, row: RunRow, kind: str, reason: str, hint: Hint) -> Outcome:
    """The outcome of an attempt that ends `failed` without a trainer's word."""
    return Outcome(
        attempt=row.attempt,
        rc=None,
        signal=None,
        state="failed",
        reason_kind=kind,
        reason=reason,
        hint=hint,
        verdict="unknown",
        last_checkpoint=checkpoint_name(run),
        elapsed_s=0.0,
        time=time.time(),
    )


def record(run: RunDir, outcome: Outcome) -> None:
    """Write `exit.json`, durably."""
    write_json(run.exit_record, asdict(outcome) | {"hint": outcome.hint.to_json()})


def recorded(run: RunDir, attempt: int) -> Outcome | None:
    """The outcome `exit.json` holds of this attempt, if any."""
    try:
        stored = read_json(run.exit_record)
        outcome = Outcome(**stored | {"hint": Hint.from_json(stored["hint"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return outcome if outcome.attempt == attempt else None


def apply(store: Store, run: RunDir, row: RunRow, outcome: Outcome) -> bool:
    """Bring the row to the outcome's state; True when this call did it."""
    origins = {
        "done": {"running", "stopping"},
        "failed": {"preparing", "running", "stopping"},
        "cancelled": {"stopping"},
    }
    if outcome.state == "done":  # a trainer so quick, or so mute, that it never said running
        store.set_state(row.run_id, "running", only_from={"preparing"})
    return store.set_state(
        row.run_id,
        outcome.state,
        only_from=origins[outcome.state],
        ended=outcome.time,
        spent_hours=row.spent_hours + outcome.elapsed_s / 3600,
        reason_kind=outcome.reason_kind,
        reason=outcome.reason,
        hint=outcome.hint,
        verdict=outcome.verdict,
    )


def note_event(run: RunDir, event: str, message: str, **values: Any) -> None:
    """Append a life-cycle event to the run's `events.jsonl`."""
    append_line(run.events, {"time": time.time(), "event": event, "message": message, **values})


def _verdict(
    run: RunDir, row: RunRow, status: int, memory_ran_out: bool
) -> tuple[str, str, str, Hint, str]:
    """State, reason kind, reason, hint, verdict."""
    if status == EXIT_DONE:
        return _done(run)
    if row.state == "stopping":
        return _stopped(run, row, status)
    if status < 0 or status == EXIT_STOPPED:
        return _killed(run, -status if status < 0 else int(signals.SIGTERM), memory_ran_out)
    failure = find_failure(run) if status == EXIT_FAILED else None
    if failure is None:
        left = _room(run)
        if left < _NO_ROOM:  # it had no room to say so itself
            reason = f"the disk under {run.path} has no room: {left} bytes are left"
            return "failed", "infra", reason, resume_hint(run).after("Free some space."), "unknown"
        tail = read_tail(run.log(row.attempt), 2000).strip().splitlines()
        last_words = f": {tail[-1][:300]}" if tail else ""
        reason = f"the trainer ended with exit status {status}{last_words}"
        words = Call("read_logs", {"run_id": run.id, "view": "error"})
        hint = Hint("It can be resumed. What it wrote last:", words)
        return "failed", "internal", reason, hint, "unknown"
    kind = failure.kind if failure.kind in FAILURE_KINDS else "internal"
    hint = failure.hint or resume_hint(run)
    if kind == "internal" and hint.call is None:
        hint = Hint(hint.text, Call("read_logs", {"run_id": run.id, "view": "console"}))
    reason = failure.message or FAILURE_KINDS[kind]
    return "failed", kind, reason, hint, "unknown"


def _done(run: RunDir) -> tuple[str, str, str, Hint, str]:
    try:
        result = read_json(run.result)
        return "done", "", "", Hint(), str(result.get("verdict") or "unknown")
    except (OSError, ValueError, AttributeError):
        reason = "the trainer ended without writing a result"
        return "failed", "internal", reason, resume_hint(run), "unknown"


def _stopped(run: RunDir, row: RunRow, status: int) -> tuple[str, str, str, Hint, str]:
    """The end of an attempt that was told to stop: cancelled, or over its cap."""
    reason, hint = row.reason, resume_hint(run)
    # SIGTERM is how a trainer is asked: one that is still importing ends by it at once.
    if status < 0 and -status != signals.SIGTERM:
        ended = f"it did not stop by itself and was ended by {_signal_name(-status)}"
        reason = f"{reason}; {ended}"
    if row.reason_kind in ("budget", "timeout"):
        cap = float(f"{row.max_gpu_hours or DEFAULT_GPU_HOURS:g}")  # as many digits as are typed
        again = Call("submit_train", {"resume": run.id, "max_gpu_hours": cap})
        hint = Hint("The new attempt gets a cap of its own.", again)
        return "failed", row.reason_kind, reason, hint, "unknown"
    return "cancelled", "cancelled", reason, hint, "unknown"


def _killed(run: RunDir, number: int, memory_ran_out: bool) -> tuple[str, str, str, Hint, str]:
    """The end of an attempt whose trainer was killed from outside."""
    name = checkpoint_name(run)
    last = last_line(run.metrics)
    when = f" after step {last['step']}" if last and "step" in last else ""
    saved = f"the last complete checkpoint is {name}" if name else "no checkpoint was complete"
    reason = f"the trainer was killed by signal {number} ({_signal_name(number)}){when}; {saved}"
    hint = resume_hint(run)
    if memory_ran_out:
        reason += "; the kernel ended processes for lack of memory at that time"
        hint = hint.after(
            "Free memory, or lower max_length, batch_size or group_size in a new run."
        )
    return "failed", "killed", reason, hint, "unknown"


def _room(run: RunDir) -> int:
    """Bytes that are left on the disk of the run."""
    try:
        disk = os.statvfs(run.path)
    except OSError:
        return _NO_ROOM
    return disk.f_bavail * disk.f_frsize if disk.f_favail or not disk.f_files else 0


def find_failure(run: RunDir) -> Failure | None:
    """What the worker wrote of its failure; None where there is no such file or it is no object.

    A key that is missing or odd counts as empty: how the run ended is said all the same.
    """
    try:
        stored = read_json(run.failure)
    except (OSError, ValueError):
        return None
    if not isinstance(stored, dict):
        return None
    saved = stored.get("last_checkpoint")
    return Failure(
        kind=str(stored.get("kind", "")),
        message=str(stored.get("message") or ""),
        evidence=str(stored.get("evidence") or ""),
        hint=Hint.from_json(stored.get("hint")),
        last_checkpoint=str(saved) if saved else None,
    )


def _signal_name(number: int) -> str:
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"
