"""Checkpoints that the user keeps: pinned ones survive what `keep_checkpoints` removes."""

from engine.core.errors import UserError
from engine.core.format import counted
from engine.core.hints import Call, Hint
from engine.core.reply import Reply
from engine.home.pinned import pinned_steps, write_pinned
from engine.home.rows import taken_as
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store

_MAX_NAMED = 12  # steps that a message lists


def pin(home: Home, run_id: str, step: int) -> Reply:
    """Keep the checkpoint of `step`, whatever else is removed. Pinning again changes nothing.

    Raises UserError RUN_NOT_FOUND, or MODEL_NOT_FOUND where that checkpoint does not exist.
    """
    run, warnings = _find(home, run_id)
    _require_checkpoint(run, step)
    pinned_before = pinned_steps(run)
    write_pinned(run, pinned_before | {step})
    # The trainer may have removed the checkpoint before it could read the pin.
    if step not in run.checkpoint_steps():
        write_pinned(run, pinned_before)
        _require_checkpoint(run, step)
    return _reply(run, f"The checkpoint of step {step} of {run.id} is kept.", warnings)


def unpin(home: Home, run_id: str, step: int) -> Reply:
    """Keep the checkpoint of `step` no longer than any other; it stays until the run saves another
    one. Raises UserError RUN_NOT_FOUND, or BAD_ARGUMENT where it is not pinned."""
    run, warnings = _find(home, run_id)
    pinned = pinned_steps(run)
    if step not in pinned:
        raise UserError(
            "BAD_ARGUMENT",
            f"step {step} of {run.id} is not pinned",
            hint=f"Pinned are: {_named(pinned) or 'none'}.",
            field="step",
        )
    write_pinned(run, pinned - {step})
    return _reply(run, f"The checkpoint of step {step} of {run.id} is no longer pinned.", warnings)


def _find(home: Home, run_id: str) -> tuple[RunDir, list[str]]:
    """The run that an id or a unique beginning of one names, and a warning for a beginning."""
    with Store(home) as store:
        row = store.get_run(run_id)
    return home.run(row.run_id), taken_as("run_id", run_id, row.run_id)


def _require_checkpoint(run: RunDir, step: int) -> None:
    """Raises UserError MODEL_NOT_FOUND where the run has no complete checkpoint of `step`."""
    steps = run.checkpoint_steps()
    if step in steps:
        return
    raise UserError(
        "MODEL_NOT_FOUND",
        f"{run.id} has no checkpoint of step {step}",
        hint=Hint(
            f"It has those of: {_named(set(steps)) or 'none yet'}.",
            Call("get_status", {"scope": "runs"}),
        ),
        field="step",
    )


def _named(steps: set[int]) -> str:
    """Steps as text, in order; of more than `_MAX_NAMED` the last ones and the number of the
    others, such as "12 earlier ones, 130, 140"."""
    ordered = sorted(steps)
    text = ", ".join(str(step) for step in ordered[-_MAX_NAMED:])
    left_out = len(ordered) - _MAX_NAMED
    return f"{counted(left_out, 'earlier one')}, {text}" if left_out > 0 else text


def _reply(run: RunDir, summary: str, warnings: list[str]) -> Reply:
    """The reply of `pin` and `unpin`: the steps pinned now, and the steps of all checkpoints."""
    return {
        "run_id": run.id,
        "pinned": sorted(pinned_steps(run)),
        "checkpoints": run.checkpoint_steps(),
        "summary": summary,
        "warnings": warnings,
        "next": [],
    }
