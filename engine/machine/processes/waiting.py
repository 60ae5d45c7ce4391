"""Queued runs that wait for the models of other runs: released when those are done, failed when
they cannot be done any more; and those that another machine queued here, which fail when it gives
no word for the time of their lease.

The rows and configs say which runs wait for which. Whoever starts queued runs calls
`release_waiting` first, so no process has to live for this.
"""

import logging
import os
import shutil
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

from engine.core.errors import UserError
from engine.core.files import JsonObject, read_json, read_object, sync_folder, write_json
from engine.core.format import words
from engine.core.hints import Call, Hint
from engine.home.rows import OPEN, SKIPPED, RunRow
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.machine.pace.progress import write_status
from engine.machine.processes import outcome

_log = logging.getLogger("honesmith")
# Errors that mean that a checkpoint is unusable; other errors may be temporary faults of the disk.
_UNREADABLE = (FileNotFoundError, PermissionError, NotADirectoryError)


def release_waiting(home: Home, store: Store) -> None:
    """Release or fail queued runs that wait for the models of others, the oldest first.

    - If all the others are done, the run gets their checkpoints into its own folder and stops
      waiting.
    - If the run is a step of a plan whose target the step before it reached, it is skipped.
    - If one of them failed, was cancelled, is gone or lacks the checkpoint, the run fails, and so
      do the runs that wait for it.

    If the process dies in between, nothing is left half done: the next call repeats the work.
    """
    has_failed = True
    while has_failed:  # the next round finds the runs that wait for the one that has just failed
        # `any` stops at the first run that fails; the next round treats the others.
        has_failed = any(_release_or_fail(home, store, row) for row in store.waiting_runs())


def link_checkpoint(source: Path, target: Path) -> None:
    """Fill the folder `target` with hard links to the files of a checkpoint of this home.

    Files are copied if links are impossible. So they stay even if the run that wrote the checkpoint
    deletes it. Files that an interrupted call has linked already are kept.
    """
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_dir():
            continue  # checkpoints have no folders; somebody else put this one there
        try:
            os.link(file, target / file.name)
        except FileExistsError:
            continue  # put there by an interrupted call, or by another process just now
        except OSError:  # no hard links here, or another disk
            _copy_atomically(file, target / file.name)
    sync_folder(target)


def _copy_atomically(source: Path, target: Path) -> None:
    """Copy a file so that `target` never holds only a part of it.

    That is true even if another process does the same at this time, or if this one dies half way.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with open(source, "rb") as original, open(temporary, "wb") as copy:
            shutil.copyfileobj(original, copy)
            copy.flush()
            os.fsync(copy.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _release_or_fail(home: Home, store: Store, row: RunRow) -> bool:
    """Release a waiting run if the models it waits for exist; end it if they cannot come any more,
    or if it is a step of a plan that is not needed.

    Returns whether it was ended.
    """
    # The runs that make the models; None for a run that is gone.
    awaited: Sequence[RunRow | None] = [_exact_row(store, run_id) for run_id in row.awaited_ids]
    some_are_open = any(
        making_run is not None and making_run.state in OPEN for making_run in awaited
    )
    if _can_do_without_some(row, awaited):
        if some_are_open:
            return False  # the open runs may still get done
        awaited = _leave_out_missing(home, row, awaited)
    reason_to_skip = _why_not_needed(home, store, row, awaited)
    if reason_to_skip:
        _skip(home, store, row, reason_to_skip)
        return True
    fault = _why_model_cannot_come(awaited, row)
    if fault is None and some_are_open:
        return False  # it keeps waiting
    if fault is None:
        try:
            fault = _fetch_adapters(home, row)
        except OSError as error:  # e.g. a full disk, which must not hold up the other runs
            _log.warning("%s waits on: %s", row.run_id, error)
            return False
    if fault is None:
        store.update_run(row.run_id, only_in={"queued"}, waits_for="")
        return False
    reason, next_move = fault
    _fail(home, store, row, reason, next_move)
    return True


def _can_do_without_some(row: RunRow, awaited: Sequence[RunRow | None]) -> bool:
    """Return whether a run is the evaluation of a plan and has to ask fewer models than planned.

    That is so if some models cannot come any more while others have come or still can. `awaited`
    are the rows of the runs that make the models; None for a run that is gone.
    """
    if row.kind != "evaluate" or not row.plan:
        return False
    are_lost = [
        making_run is None or making_run.state in ("failed", "cancelled") for making_run in awaited
    ]
    return any(are_lost) and not all(are_lost)


def _leave_out_missing(home: Home, row: RunRow, awaited: Sequence[RunRow | None]) -> list[RunRow]:
    """Remove the models that were not made from the stored config of the evaluation `row`; the
    config keeps their names.

    `awaited` are the rows of the runs that were to make the models; None for a run that is gone.
    Returns the rows of the runs that made theirs.
    """
    run = home.run(row.run_id)
    made_rows = [
        making_run
        for making_run in awaited
        if making_run is not None and making_run.state == "done"
    ]
    made_ids = {making_run.run_id for making_run in made_rows}
    config = read_json(run.config)
    missing_names = _remove_missing(config, made_ids)
    write_json(run.config, config)
    if missing_names:  # empty if an interrupted call has done this already
        message = f"{', '.join(missing_names)} left out: not made"
        outcome.note_event(run, "models_missing", message, models=missing_names)
    return made_rows


def _remove_missing(config: JsonObject, made_ids: Collection[str]) -> list[str]:
    """Remove from the config of a waiting evaluation, in place, the awaited models of all runs but
    `made_ids`.

    Their names are kept in the config's `missing_models`. Returns the names that this call removed.
    """
    # The folders that were meant for the adapters of the missing models.
    missing_folders = {
        wait["folder"] for wait in config["waits_for"] if wait["run_id"] not in made_ids
    }
    kept_models = [
        model for model in config["models"] if model.get("adapter") not in missing_folders
    ]
    removed_names = [
        model["ref"] for model in config["models"] if model.get("adapter") in missing_folders
    ]
    config |= {
        "models": kept_models,
        "waits_for": [wait for wait in config["waits_for"] if wait["run_id"] in made_ids],
        "missing_models": [*config.get("missing_models", []), *removed_names],
    }
    return removed_names


def _exact_row(store: Store, run_id: str) -> RunRow | None:
    """Return the row of the run with exactly this id; None if there is no such run."""
    try:
        row = store.get_run(run_id)
    except UserError:
        return None
    # `get_run` also finds another run whose id begins with this one.
    return row if row.run_id == run_id else None


def _why_model_cannot_come(
    awaited: Sequence[RunRow | None], row: RunRow
) -> tuple[str, Hint] | None:
    """Return why a model that the run `row` waits for cannot come any more, as (reason, next move);
    None if all of them have come or still can.

    `awaited` are the rows of the runs that make the models, in the order of `row.awaited_ids`; None
    for a run that is gone.
    """
    for index, making_run in enumerate(awaited):
        if making_run is None:
            run_id = row.awaited_ids[index]
            return f"{run_id}, whose model it waited for, is gone", Hint("Submit a new run.")
        if making_run.state in ("failed", "cancelled"):
            run_id = making_run.run_id
            resume = Call("submit_train", {"resume": row.plan or run_id})
            advice = f"Then resume {row.run_id} too. First:"
            if row.plan:
                advice = "To go on with the plan:"
            cause = f": {making_run.reason.rstrip('.')}" if making_run.reason else ""
            reason = f"{run_id}, whose model it waited for, {_end_in_words(making_run)}{cause}"
            return reason, Hint(advice, resume)
    return None


def _why_not_needed(home: Home, store: Store, row: RunRow, awaited: Sequence[RunRow | None]) -> str:
    """Say why the run `row`, a training step of a plan, is not needed; "" if it is.

    It is not needed if the step before it reached the target on the same environment, or was
    skipped itself. It is needed all the same if the step says `always`, if the plan was resumed, or
    if the plan's evaluation asks for its model and not for that of the step before. `awaited` are
    the rows of the runs that it waits for; None for a run that is gone.
    """
    config = home.run(row.run_id).find_config()
    maker = awaited[0] if len(awaited) == 1 else None  # the step before, which makes its model
    if maker is None or not (row.plan and maker.plan == row.plan and row.kind == "train"):
        return ""
    if row.attempt > 1 or config is None or config.plan is None or config.plan.always:
        return ""
    evaluations = [run for run in store.plan_runs(row.plan) if run.kind == "evaluate"]
    is_evaluated_alone = any(
        row.run_id in evaluation.awaited_ids and maker.run_id not in evaluation.awaited_ids
        for evaluation in evaluations
    )
    if is_evaluated_alone:
        return ""
    if maker.is_skipped:
        return maker.reason
    if maker.state != "done" or not row.has_target or maker.env_id != row.env_id:
        return ""
    evidence = read_object(home.run(maker.run_id).result).get("evidence")
    if not isinstance(evidence, dict) or evidence.get("as_expected") is not True:
        return ""
    return (
        f"not needed: {maker.run_id} reached the target {row.expect} on its held-out tasks. "
        f'Resuming {row.plan} trains it all the same, as "always": true in its step would have'
    )


def _skip(home: Home, store: Store, row: RunRow, reason: str) -> None:
    """Record that a step of a plan was skipped for `reason`, if it is still queued."""
    hint = Hint("To train it all the same:", Call("submit_train", {"resume": row.plan}))
    _end_queued(home, store, row, "cancelled", SKIPPED, reason, hint)


def _end_in_words(row: RunRow) -> str:
    """Return how a run ended that did not get done, e.g. "was cancelled"."""
    return "failed" if row.state == "failed" else "was cancelled"


def _fetch_adapters(home: Home, row: RunRow) -> tuple[str, Hint] | None:
    """Link the checkpoints that the run `row` waited for into its own folder.

    Returns None if that worked, else why the run fails, as (reason, next move). Raises OSError if
    nothing can be written.
    """
    config = home.run(row.run_id).find_config()
    if config is None:
        return None  # its trainer will report what is wrong with the config
    for adapter in config.waits_for:
        making_run = home.run(adapter.run_id)
        checkpoint = making_run.resolve_checkpoint(adapter.checkpoint)
        if checkpoint is None:
            return _no_checkpoint_fault(making_run, adapter.checkpoint)
        try:
            link_checkpoint(checkpoint, Path(adapter.folder))
        except _UNREADABLE as error:
            resume = Call("submit_train", {"resume": row.plan or row.run_id})
            return f"the model it waited for cannot be read: {error}", Hint("Mend that.", resume)
    return None


def _no_checkpoint_fault(making_run: RunDir, checkpoint: str) -> tuple[str, Hint]:
    """Return (reason, next move) for a run that fails because the run which it waited for,
    `making_run`, is done and has not left the awaited checkpoint.

    `checkpoint` is the one that was waited for, e.g. "best"; "" for the last one.
    """
    if making_run.deleted.exists():
        return f"{making_run.id}, whose model it waited for, was deleted", Hint("Submit a new run.")
    steps = ", ".join(f"@step{step}" for step in making_run.checkpoint_steps()) or "none"
    reason = f"{making_run.id} is done and left no checkpoint {checkpoint or 'at all'}"
    return reason, Hint(f"Submit a new run from one that it has: {steps}.")


def why_lease_lapsed(run: RunDir) -> str:
    """Say why a run that another machine queued here is not started any more: that machine has not
    renewed the run's lease in time.

    Returns "" if the run may start, as may every run that was queued on this machine. The wall
    clock is used, because it goes on while this machine restarts. Once the run has started, its
    supervisor watches the lease (limits.py).
    """
    lease = read_object(run.far("lease"))
    seconds, renewed = lease.get("seconds"), lease.get("time")
    if not isinstance(seconds, int | float) or not isinstance(renewed, int | float):
        return ""
    if time.time() - renewed <= seconds:
        return ""
    return (
        f"the machine that started it gave no word for {words(seconds / 3600)} while it waited "
        "for a device"
    )


def end_lapsed(home: Home, store: Store, row: RunRow) -> None:
    """Record that a queued run failed, if the machine that queued it here has not renewed its lease
    in time."""
    reason = why_lease_lapsed(home.run(row.run_id))
    if reason:
        hint = outcome.resume_hint(home.run(row.run_id))
        _fail(home, store, row, reason, hint, kind="lease")


def _fail(
    home: Home, store: Store, row: RunRow, reason: str, hint: Hint, *, kind: str = "awaited"
) -> None:
    """Record that a run failed before it could start, if it is still queued. `kind` is its failure
    kind (FAILURE_KINDS in engine.core.errors)."""
    _end_queued(home, store, row, "failed", kind, reason, hint)


def _end_queued(
    home: Home,
    store: Store,
    row: RunRow,
    state: Literal["cancelled", "failed"],
    kind: str,
    reason: str,
    hint: Hint,
) -> None:
    """End a run that is still queued in `state`, and write the event that says why; do nothing if
    it is not queued any more.

    `kind` is stored as `reason_kind`: a failure kind, or SKIPPED.
    """
    was_set = store.set_state(
        row.run_id,
        state,
        only_from={"queued"},
        ended=time.time(),
        reason_kind=kind,
        reason=reason,
        hint=hint,
        verdict="unknown",
    )
    if was_set:
        run = home.run(row.run_id)
        event = "skipped" if kind == SKIPPED else "not_started"
        outcome.note_event(run, event, reason, attempt=row.attempt)
        write_status(run, store.get_run(row.run_id))
