"""Checkpoints that the user keeps: pinned ones survive what `keep_checkpoints` removes."""

from engine.core.errors import UserError
from engine.core.format import counted
from engine.core.hints import Call, Hint
from engine.core.reply import Reply
from engine.home.owner_marks import pinned_steps, write_pinned
from engine.home.rows import abbreviation_warning
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store

_MAX_NAMED = 12  # steps that a message lists


def pin(home: Home, run_id: str, step: int) -> Reply:
    """Pin the checkpoint of `step`, so that `keep_checkpoints` never removes it; return a reply.

    Pinning the same step twice changes nothing. Raises UserError RUN_NOT_FOUND if `run_id` does not
    name exactly one run, MODEL_NOT_FOUND if the run has no checkpoint of that step.
    """
    run, warnings = _find_run(home, run_id)
    _require_checkpoint(run, step)
    pinned_before = pinned_steps(run)
    write_pinned(run, pinned_before | {step})
    # The trainer may have removed the checkpoint before it could read the pin. Then the pin is
    # taken back, and the error is raised.
    if step not in run.checkpoint_steps():
        write_pinned(run, pinned_before)
        _require_checkpoint(run, step)
    return _reply(run, f"The checkpoint of step {step} of {run.id} is kept.", warnings)


def unpin(home: Home, run_id: str, step: int) -> Reply:
    """Unpin the checkpoint of `step`, and return the reply about that.

    The checkpoint stays on the disk until the run saves its next one. Raises UserError
    RUN_NOT_FOUND if `run_id` does not name exactly one run, BAD_ARGUMENT if `step` is not pinned.
    """
    run, warnings = _find_run(home, run_id)
    pinned = pinned_steps(run)
    if step not in pinned:
        raise UserError(
            "BAD_ARGUMENT",
            f"step {step} of {run.id} is not pinned",
            hint=f"Pinned are: {_list_steps(pinned) or 'none'}.",
            field="step",
        )
    write_pinned(run, pinned - {step})
    return _reply(run, f"The checkpoint of step {step} of {run.id} is no longer pinned.", warnings)


def _find_run(home: Home, run_id: str) -> tuple[RunDir, list[str]]:
    """Find the run whose id is `run_id` or begins with `run_id`.

    Returns the run's folder, and a list with one warning if `run_id` was only the beginning of the
    id. Raises UserError RUN_NOT_FOUND if no run, or more than one, matches.
    """
    with Store(home) as store:
        row = store.get_run(run_id)
    return home.run(row.run_id), abbreviation_warning("run_id", run_id, row.run_id)


def _require_checkpoint(run: RunDir, step: int) -> None:
    """Raise UserError MODEL_NOT_FOUND unless the run has a complete checkpoint of `step`."""
    steps = run.checkpoint_steps()
    if step in steps:
        return
    raise UserError(
        "MODEL_NOT_FOUND",
        f"{run.id} has no checkpoint of step {step}",
        hint=Hint(
            f"It has those of: {_list_steps(set(steps)) or 'none yet'}.",
            Call("get_status", {"scope": "runs"}),
        ),
        field="step",
    )


def _list_steps(steps: set[int]) -> str:
    """Write the steps in ascending order, such as "10, 20, 30"; "" for no steps.

    If there are more than `_MAX_NAMED` steps, only the last `_MAX_NAMED` are listed, after a count
    of the others: "3 earlier ones, 40, 50, ...".
    """
    ordered = sorted(steps)
    text = ", ".join(str(step) for step in ordered[-_MAX_NAMED:])
    earlier_count = len(ordered) - _MAX_NAMED
    return f"{counted(earlier_count, 'earlier one')}, {text}" if earlier_count > 0 else text


def _reply(run: RunDir, summary: str, warnings: list[str]) -> Reply:
    """Make the reply of `pin` and `unpin`: it lists the pinned steps and the steps of all
    checkpoints, beside `summary` and `warnings`."""
    return {
        "run_id": run.id,
        "pinned": sorted(pinned_steps(run)),
        "checkpoints": run.checkpoint_steps(),
        "summary": summary,
        "warnings": warnings,
        "next": [],
    }
