"""Decides how an attempt of a run ended: its final state, from the exit status and the trainer's
files.

The supervisor decides and writes `exit.json`. If it dies before the run's row is updated, the next
process that opens the home reads that file and finishes the work.
"""

import contextlib
import json
import os
import signal as signals
import time
from dataclasses import asdict, dataclass, replace
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
MAX_CONTINUATIONS = 3  # how often an interrupted run is queued again by itself
_MIN_FREE_BYTES = 16_384  # room for a failure record, its event and a traceback


@dataclass(frozen=True)
class _End:
    """How an attempt ended; its fields have the same meaning as in `Outcome`."""

    state: str
    reason_kind: str
    reason: str
    hint: Hint
    verdict: str = "unknown"
    moves_to: str = ""


@dataclass(frozen=True)
class Outcome:
    """The end of one attempt; the content of `exit.json`.

    Attributes:
        attempt: the number of the attempt.
        rc, signal: the exit status, or the signal that ended the trainer; the other one is None.
        state: done, failed or cancelled.
        reason_kind: one of engine.core.errors.FAILURE_KINDS; "" for done.
        reason, hint: why it ended, and what to do next; for people.
        verdict: the verdict of the result; "unknown" if there is no result.
        last_checkpoint: name of the last complete checkpoint; "" for none.
        elapsed_s: seconds that the attempt took.
        time: when it ended, in seconds since the epoch.
        moves_to: where the run goes on, as `compute` names places, because the place of this
            attempt has failed; "" for nowhere.
    """

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
    moves_to: str = ""


@dataclass(frozen=True)
class Failure:
    """Why a worker could not go on; the content of `failure.json`.

    Attributes:
        kind: one of engine.core.errors.FAILURE_KINDS.
        message: what happened, in one sentence.
        evidence: numbers or a line of output that show it.
        hint: the next move.
        last_checkpoint: name of the last complete checkpoint; None for none.
        moves_to: as in `Outcome`.
    """

    kind: str
    message: str
    evidence: str
    hint: Hint
    last_checkpoint: str | None = None
    moves_to: str = ""

    def to_json(self) -> dict[str, object]:
        """Return the content of `failure.json`."""
        return {**asdict(self), "hint": self.hint.to_json()}


def checkpoint_name(run: RunDir) -> str:
    """Return the name of the last complete checkpoint, e.g. "step_000020"; "" if there is none."""
    latest = run.latest_checkpoint()
    return latest.name if latest else ""


def evidence(run: RunDir) -> str:
    """Return the line of output that shows why the run failed, without secrets; "" if there is
    none."""
    failure = find_failure(run)
    return _redacted(run, failure.evidence if failure else "")


def _redacted(run: RunDir, text: str) -> str:
    """Return `text`, which user code may have written, with the values of secrets replaced."""
    if not text:  # an empty text needs no reading of the config
        return ""
    config = run.find_config()  # None if damaged; the end of such a run must be recorded too
    return redactor_for(run.home, config.env_dir if config else None).text(text)


def resume_hint(run: RunDir) -> Hint:
    """Return the advice how to continue a run that ended early: a sentence and the call to make.

    The sentence names the last complete checkpoint, or says that there is none.
    """
    name = checkpoint_name(run)
    resume = Call("submit_train", {"resume": run.id})
    if name:
        return Hint(f"To continue from {name}:", resume)
    return Hint("No checkpoint is complete. To start again from step 0:", resume)


def decide(
    run: RunDir, row: RunRow, *, status: int, elapsed_s: float, memory_ran_out: bool = False
) -> Outcome:
    """Return the outcome of an attempt whose trainer has ended.

    The values of secrets are replaced in its texts, because the trainer or user code may have
    written them.

    Args:
        run: the run's folder.
        row: the run's row, read after the trainer ended; if its state is "stopping", it says why.
        status: exit status, or minus the number of the signal that ended the trainer.
        elapsed_s: seconds the attempt took.
        memory_ran_out: whether the kernel killed processes for lack of memory during the attempt.
    """
    signal_number = -status if status < 0 else None  # None if the trainer was not killed
    end = _end_of_attempt(run, row, status, memory_ran_out)
    return Outcome(
        attempt=row.attempt,
        rc=None if signal_number else status,
        signal=signal_number,
        state=end.state,
        reason_kind=end.reason_kind,
        reason=_redacted(run, end.reason),
        hint=Hint(_redacted(run, end.hint.text), end.hint.call),
        verdict=end.verdict,
        last_checkpoint=checkpoint_name(run),
        elapsed_s=round(elapsed_s, 3),
        time=time.time(),
        moves_to=end.moves_to,
    )


def abandon(run: RunDir, row: RunRow, kind: str, reason: str, hint: Hint) -> Outcome:
    """Return the outcome "failed" for an attempt whose trainer left no record; the attempt counts
    as having taken no time.

    `kind` is one of engine.core.errors.FAILURE_KINDS; `reason` and `hint` are shown to the user.
    """
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
    """Write the outcome to the run's `exit.json`, durably, so that it survives a power failure."""
    write_json(run.exit_record, asdict(outcome) | {"hint": outcome.hint.to_json()})


def recorded(run: RunDir, attempt: int) -> Outcome | None:
    """Read the outcome of attempt number `attempt` from `exit.json`.

    Returns None if the file is missing or damaged, or is about another attempt.
    """
    try:
        stored = read_json(run.exit_record)
        values = stored | {"hint": Hint.from_json(stored["hint"])}
        outcome = Outcome(**values)
    except (OSError, ValueError, TypeError, KeyError):  # missing, damaged or incomplete
        return None
    return outcome if outcome.attempt == attempt else None


def apply(store: Store, run: RunDir, row: RunRow, outcome: Outcome) -> bool:
    """Set the run's row to the state of the outcome, with its reason, hint and verdict; or queue
    the run for another place, if the outcome names one.

    Returns False, and changes nothing, if the row's present state does not allow that, because
    another process was faster.
    """
    if outcome.moves_to and row.state != "stopping":  # else it was cancelled meanwhile
        return _move(store, run, row, outcome)
    allowed_from = {
        "done": {"running", "stopping"},
        "failed": {"preparing", "running", "stopping"},
        "cancelled": {"stopping"},
    }
    # A trainer may finish without ever reporting that it runs, so its run is still "preparing".
    # Only a running run may become done.
    if outcome.state == "done":
        store.set_state(row.run_id, "running", only_from={"preparing"})
    return store.set_state(
        row.run_id,
        outcome.state,
        only_from=allowed_from[outcome.state],
        ended=outcome.time,
        spent_hours=row.spent_hours + row.device_hours(outcome.elapsed_s),
        reason_kind=outcome.reason_kind,
        reason=outcome.reason,
        hint=outcome.hint,
        verdict=outcome.verdict,
    )


def _move(store: Store, run: RunDir, row: RunRow, outcome: Outcome) -> bool:
    """Queue a new attempt of a run whose place has failed, at the place `outcome.moves_to`; note
    it in the run's `place.json`, from which a lost database is rebuilt.

    The hours that it has taken stay with the places where it took them. Returns False, and changes
    nothing, if the run's state has changed: it was cancelled, or another process was faster.
    """
    spent_hours = row.spent_hours + row.device_hours(outcome.elapsed_s)
    earlier_hours = replace(row, spent_hours=spent_hours).hours_by_place()
    is_moved = store.set_state(
        row.run_id,
        "interrupted",
        only_from={"preparing", "running"},
        spent_hours=spent_hours,
        earlier_hours=json.dumps(earlier_hours),
        compute=outcome.moves_to,
        device="",
        continuations=0,
    )
    if not is_moved:
        return False
    with contextlib.suppress(OSError):  # a full disk: the row says it
        place = {"compute": outcome.moves_to, "earlier_hours": earlier_hours}
        write_json(run.far("place"), place)
    store.set_state(row.run_id, "queued", only_from={"interrupted"}, attempt=row.attempt + 1)
    message = f"{outcome.reason}: it goes on at {outcome.moves_to}, from {outcome.last_checkpoint}"
    if not outcome.last_checkpoint:
        message = f"{outcome.reason}: it begins again at {outcome.moves_to}"
    with contextlib.suppress(OSError):
        note_event(run, "moved", message, attempt=row.attempt + 1)
    return True


def note_event(run: RunDir, event: str, message: str, **values: Any) -> None:
    """Append an event to the run's `events.jsonl`: its name, a message for people, and other
    values."""
    append_line(run.events, {"time": time.time(), "event": event, "message": message, **values})


def _end_of_attempt(run: RunDir, row: RunRow, status: int, memory_ran_out: bool) -> _End:
    """Return how an attempt ended, given the exit status of its trainer.

    Args:
        run: the run's folder.
        row: the run's row after the end; its state is "stopping" if the run was told to stop.
        status: the exit status, or minus the number of the signal that ended the trainer.
        memory_ran_out: whether the kernel killed processes for lack of memory during the attempt.
    """
    if status == EXIT_DONE:
        return _done(run)
    if row.state == "stopping":
        return _stopped(run, row, status)
    if status < 0:
        return _killed(run, -status, memory_ran_out)
    # The trainer stopped at a SIGTERM, but nobody told the run to stop: it came from outside.
    if status == EXIT_STOPPED:
        return _killed(run, int(signals.SIGTERM), memory_ran_out)
    failure = find_failure(run) if status == EXIT_FAILED else None
    if failure is None:
        return _failed_without_record(run, row, status)
    return _failed(run, row, failure)


def _failed(run: RunDir, row: RunRow, failure: Failure) -> _End:
    """Return the end of an attempt whose trainer left the failure record `failure`."""
    kind = failure.kind if failure.kind in FAILURE_KINDS else "internal"
    hint = failure.hint or resume_hint(run)
    if kind == "internal" and hint.call is None:  # the console has its traceback
        hint = Hint(hint.text, Call("read_logs", {"run_id": run.id, "view": "console"}))
    message = failure.message or FAILURE_KINDS[kind]
    moves_to = failure.moves_to if row.is_elsewhere else ""  # an attendant wrote it
    return _End("failed", kind, message, hint, moves_to=moves_to)


def _failed_without_record(run: RunDir, row: RunRow, status: int) -> _End:
    """Return the end of an attempt whose trainer failed with `status` and left no failure record.

    The reason is a full disk, or else the last line that the trainer printed.
    """
    free_bytes = _free_bytes(run)
    if free_bytes < _MIN_FREE_BYTES:  # the trainer had no room for its failure record
        reason = f"the disk under {run.path} has no room: {free_bytes} bytes are left"
        return _End("failed", "infra", reason, resume_hint(run).after("Free some space."))
    last_lines = read_tail(run.log(row.attempt), 2000).strip().splitlines()
    last_line_text = f": {last_lines[-1][:300]}" if last_lines else ""
    reason = f"the trainer ended with exit status {status}{last_line_text}"
    read_log = Call("read_logs", {"run_id": run.id, "view": "error"})
    hint = Hint("It can be resumed. What it wrote last:", read_log)
    return _End("failed", "internal", reason, hint)


def _done(run: RunDir) -> _End:
    """Return the end of an attempt whose trainer ended with exit status 0: "done", or "failed" if
    its result cannot be read."""
    try:
        verdict = str(read_json(run.result).get("verdict") or "unknown")
        return _End("done", reason_kind="", reason="", hint=Hint(), verdict=verdict)
    except (OSError, ValueError, AttributeError):  # missing, no JSON, or no object
        reason = "the trainer ended without writing a result"
        return _End("failed", "internal", reason, resume_hint(run))


def _stopped(run: RunDir, row: RunRow, status: int) -> _End:
    """Return the end of an attempt that was told to stop.

    It is "failed" if the cause was a cap on hours or a hanging trainer, else "cancelled".
    """
    reason = row.reason
    # A trainer is told to stop by SIGTERM, which kills it while it is still importing. Any other
    # signal means that it was killed, e.g. by SIGKILL after the grace period.
    if status < 0 and -status != signals.SIGTERM:
        reason += f"; it did not stop by itself and was ended by {_signal_name(-status)}"
    if row.reason_kind == "stalled":
        advice = "What it hung in stands at the end of its console (read_logs, view console)."
        return _End("failed", "stalled", reason, resume_hint(run).after(advice))
    if row.reason_kind == "lease":
        return _End("failed", "lease", reason, resume_hint(run))
    if row.reason_kind not in ("budget", "timeout"):  # no cap was reached, so it was cancelled
        return _End("cancelled", "cancelled", reason, resume_hint(run))
    # Rounded to six digits, as a user would type it.
    cap_hours = float(f"{row.max_gpu_hours or DEFAULT_GPU_HOURS:g}")
    resume_again = Call("submit_train", {"resume": row.plan or run.id, "max_gpu_hours": cap_hours})
    hint = Hint("The new attempt gets a cap of its own.", resume_again)
    return _End("failed", row.reason_kind, reason, hint)


def _killed(run: RunDir, signal_number: int, memory_ran_out: bool) -> _End:
    """Return the end of an attempt whose trainer was killed from outside by a signal.

    The reason says after which step, which checkpoint is left, and with `memory_ran_out` that the
    kernel ran out of memory.
    """
    name = checkpoint_name(run)
    last_metrics = last_line(run.metrics) or {}
    after_step = f" after step {last_metrics['step']}" if "step" in last_metrics else ""
    progress = f"the last complete checkpoint is {name}" if name else "no checkpoint was complete"
    reason = (
        f"the trainer was killed by signal {signal_number} ({_signal_name(signal_number)})"
        f"{after_step}; {progress}"
    )
    hint = resume_hint(run)
    if memory_ran_out:
        reason += "; the kernel ended processes for lack of memory at that time"
        hint = hint.after(
            "Free memory, or lower max_length, batch_size or group_size in a new run."
        )
    return _End("failed", "killed", reason, hint)


def _free_bytes(run: RunDir) -> int:
    """Return the free bytes on the disk of the run; 0 if no inode is free, so that no file can be
    made.

    If the disk cannot be asked, returns `_MIN_FREE_BYTES`, which counts as enough.
    """
    try:
        disk = os.statvfs(run.path)
    except OSError:
        return _MIN_FREE_BYTES
    # `f_files` is 0 on file systems that have no fixed number of inodes.
    if disk.f_files and not disk.f_favail:
        return 0
    return disk.f_bavail * disk.f_frsize


def find_failure(run: RunDir) -> Failure | None:
    """Read the trainer's failure record; None if it is missing or not a JSON object.

    Missing keys become "", so that the others can still be used.
    """
    try:
        stored = read_json(run.failure)
    except (OSError, ValueError):
        return None
    if not isinstance(stored, dict):
        return None
    checkpoint = stored.get("last_checkpoint")
    return Failure(
        kind=str(stored.get("kind", "")),
        message=str(stored.get("message") or ""),
        evidence=str(stored.get("evidence") or ""),
        hint=Hint.from_json(stored.get("hint")),
        last_checkpoint=str(checkpoint) if checkpoint else None,
        moves_to=str(stored.get("moves_to") or ""),
    )


def _signal_name(signal_number: int) -> str:
    """Return the name of a signal, e.g. "SIGKILL"; "signal 99" if it has no name."""
    try:
        return signals.Signals(signal_number).name
    except ValueError:
        return f"signal {signal_number}"
