"""What a key may still start: runs at once, device hours in a day.

Counted from the audit log (whose runs) and the rows of the runs (what became of them), so there is
no counter that could go wrong.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

from engine.errors import UserError
from engine.rows import OPEN, RunRow
from engine.run_dir import Home
from engine.store import Store
from engine.submit import EVALUATION_WALL_HOURS
from mcp_server.audit import STARTS, Audit
from mcp_server.keys import Key

DAY_S = 86_400.0
ROUNDING = 1e-6  # of hours: 0.4 + 0.4 + 0.2 is within 1
DEFAULT_HOURS = 2.0  # max_gpu_hours of a submit that names none


def starts_a_run(tool: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a call of `tool` takes a device."""
    return tool in STARTS and (tool != "dry_run" or bool(arguments.get("samples")))


def check_quota(
    home: Home,
    key: Key,
    tool: str,
    arguments: Mapping[str, Any],
    clock: Callable[[], float] = time.time,
) -> None:
    """Raises UserError QUOTA when `key` may not start what this call would start.

    Of a day's hours a run counts with what it took; while it is open, with the cap it was given,
    an evaluation or a probe with the hours after which it is ended. A call that was answered
    before starts nothing.
    """
    audit = Audit(home)
    with Store(home) as store:
        if tool == "submit_train" and _answered(store, str(arguments.get("request_id", ""))):
            return
        mine = {name: row for name in audit.runs_of(key.name) if (row := _row(store, name))}
        today = audit.runs_of(key.name, clock() - DAY_S)
    going = [row.run_id for row in mine.values() if row.state in OPEN]
    if key.max_runs and len(going) >= key.max_runs:
        raise UserError(
            "QUOTA",
            f"the key {key.name} has {len(going)} runs open ({', '.join(going[:5])}) and may have "
            f"{key.max_runs}",
            hint=f'wait_run(run_id="{going[0]}") or cancel_run it, then call again.',
            retryable=True,
        )
    if not key.gpu_hours_per_day:
        return
    used = sum(_hours(mine[name]) for name in today if name in mine)
    submits = tool == "submit_train"
    asked = (
        float(arguments.get("max_gpu_hours", DEFAULT_HOURS)) if submits else EVALUATION_WALL_HOURS
    )
    left = key.gpu_hours_per_day - used
    if asked > left + ROUNDING or left <= ROUNDING:
        fit = (
            f"Call again with max_gpu_hours={left:.3g}, or later"
            if submits and left > ROUNDING
            else "Call later"
        )
        raise UserError(
            "QUOTA",
            f"the key {key.name} may use {key.gpu_hours_per_day:g} GPU-hours a day and has used or "
            f"promised {used:.3g}; this call asks for {asked:g}",
            hint=f"{fit}: hours come back a day after their run was submitted.",
            field="max_gpu_hours" if submits else "",
            retryable=True,
        )


def _answered(store: Store, request_id: str) -> bool:
    try:
        return store.requested_run(request_id, {}) is not None
    except UserError:
        return True  # with other arguments than none, which the submit will compare


def _row(store: Store, run_id: str) -> RunRow | None:
    try:
        return store.get_run(run_id)
    except UserError:
        return None  # deleted meanwhile


def _hours(row: RunRow) -> float:
    if row.state in OPEN:
        cap = row.max_gpu_hours or row.estimated_hours or EVALUATION_WALL_HOURS
        return max(row.spent_hours, row.spent_before + cap)
    return row.spent_hours
