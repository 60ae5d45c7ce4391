"""Runs that wait for the models of other runs: let go when those are done, failed when they cannot
be.

Which runs wait for which stands in their rows and configs. Whoever starts queued runs calls
`release_waiting` first, so no process has to live for it.
"""

import logging
import os
import shutil
import time
from pathlib import Path

from engine.core.errors import UserError
from engine.core.files import sync_folder
from engine.core.hints import Call, Hint
from engine.home.rows import OPEN, RunRow
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.pace.progress import write_status
from engine.processes import outcome

_log = logging.getLogger("honesmith")
# Errors that say that a checkpoint is not usable, while the home may be.
_UNREADABLE = (FileNotFoundError, PermissionError, NotADirectoryError)


def release_waiting(home: Home, store: Store) -> None:
    """Go through the queued runs that wait for others, the oldest first.

    - All of those are done: the run gets their checkpoints into its own folder and waits no more.
    - One of them failed, was cancelled or is gone, or has no such checkpoint: the run fails, and
      with it those that wait for it.

    A process that dies in between leaves nothing half done: the next call does the same again.
    """
    has_failed = True
    while has_failed:  # a run that waits for one that failed now is found in the next round
        waiting = [row for row in store.queue() if row.waits_for]
        has_failed = any(_is_failed_now(home, store, row) for row in waiting)


def link_checkpoint(source: Path, target: Path) -> None:
    """Fill the folder `target` with hard links to the files of a checkpoint of this home, or with
    copies where links are not possible: they stay even if the run that wrote the checkpoint
    deletes it. What an interrupted call has linked already stays."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_dir():
            continue  # no checkpoint has folders: somebody put it there
        try:
            os.link(file, target / file.name)
        except FileExistsError:
            continue  # an interrupted call put it there, or another process does the same now
        except OSError:  # no hard links here, or another disk
            _copy_whole(file, target / file.name)
    sync_folder(target)


def _copy_whole(source: Path, target: Path) -> None:
    """Copy a file so that `target` is never there in part: not for a process that does the same at
    this time, nor after a death half way."""
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with open(source, "rb") as original, open(aside, "wb") as copy:
            shutil.copyfileobj(original, copy)
            copy.flush()
            os.fsync(copy.fileno())
        os.replace(aside, target)
    finally:
        aside.unlink(missing_ok=True)


def _is_failed_now(home: Home, store: Store, row: RunRow) -> bool:
    """Let a waiting run go if all that it waits for is there, or fail it if that cannot come any
    more. Returns whether it failed."""
    awaited = [_row_of(store, run_id) for run_id in row.awaited_ids]
    fault = _fault_of(row, awaited)
    if fault is None:
        if any(other is not None and other.state in OPEN for other in awaited):
            return False  # it waits on
        try:
            fault = _fetch_adapters(home, row)
        except _UNREADABLE as error:
            resume = Call("submit_train", {"resume": row.plan or row.run_id})
            fault = f"the model it waited for cannot be read: {error}", Hint("Mend that.", resume)
        except OSError as error:  # a full disk, say: the runs behind it need not wait for that
            _log.warning("%s waits on: %s", row.run_id, error)
            return False
    if fault is None:
        store.update_run(row.run_id, only_in={"queued"}, waits_for="")
        return False
    _fail(home, store, row, *fault)
    return True


def _row_of(store: Store, run_id: str) -> RunRow | None:
    """The row of a run; None where there is none."""
    try:
        row = store.get_run(run_id)
    except UserError:
        return None
    return row if row.run_id == run_id else None  # another, whose id begins with this one


def _fault_of(row: RunRow, awaited: list[RunRow | None]) -> tuple[str, Hint] | None:
    """Why what a run waits for cannot come any more, with the next move; None while it can.

    `awaited` are the runs that it waits for, None for one that is gone.
    """
    for run_id, other in zip(row.awaited_ids, awaited, strict=True):
        if other is None:
            return f"{run_id}, whose model it waited for, is gone", Hint("Submit a new run.")
        if other.state in ("failed", "cancelled"):
            resume = Call("submit_train", {"resume": row.plan or run_id})
            text = (
                "To go on with the plan:" if row.plan else f"Then resume {row.run_id} too. First:"
            )
            hint = Hint(text, resume)
            reason = f": {other.reason.rstrip('.')}" if other.reason else ""
            return f"{run_id}, whose model it waited for, {_end_in_words(other)}{reason}", hint
    return None


def _end_in_words(row: RunRow) -> str:
    """How a run ended that did not get done."""
    return "failed" if row.state == "failed" else "was cancelled"


def _fetch_adapters(home: Home, row: RunRow) -> tuple[str, Hint] | None:
    """Link the checkpoints that the run waited for into its own folder. Returns why that is not
    possible, with the next move; None where it was done.

    Raises OSError where nothing can be written.
    """
    config = home.run(row.run_id).find_config()
    if config is None:
        return None  # its trainer says what is wrong with the config
    for adapter in config.waits_for:
        maker = home.run(adapter.run_id)
        checkpoint = maker.resolve_checkpoint(adapter.checkpoint)
        if checkpoint is None:
            return _no_checkpoint(maker, adapter.checkpoint)
        link_checkpoint(checkpoint, Path(adapter.folder))
    return None


def _no_checkpoint(maker: RunDir, checkpoint: str) -> tuple[str, Hint]:
    """Why a run that is done has not left the model that was waited for, with the next move."""
    if maker.deleted.exists():
        return f"{maker.id}, whose model it waited for, was deleted", Hint("Submit a new run.")
    steps = ", ".join(f"@step{step}" for step in maker.checkpoint_steps()) or "none"
    reason = f"{maker.id} is done and left no checkpoint {checkpoint or 'at all'}"
    return reason, Hint(f"Submit a new run from one that it has: {steps}.")


def _fail(home: Home, store: Store, row: RunRow, reason: str, hint: Hint) -> None:
    """Record that a run failed before it could start."""
    was_set = store.set_state(
        row.run_id,
        "failed",
        only_from={"queued"},
        ended=time.time(),
        reason_kind="awaited",
        reason=reason,
        hint=hint,
        verdict="unknown",
    )
    if was_set:
        run = home.run(row.run_id)
        outcome.note_event(run, "not_started", reason, attempt=row.attempt)
        write_status(run, store.get_run(row.run_id))
