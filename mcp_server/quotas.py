"""What a key may still start: runs at once, device hours in a day.

Counted from the audit log (whose runs) and the rows of the runs (what became of them), so there is
no counter that could go wrong.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from engine.admission import EVALUATION_WALL_HOURS, Afford
from engine.errors import UserError
from engine.rows import OPEN, RunRow
from engine.run_dir import Home
from engine.store import Store
from mcp_server.audit import STARTS, Audit
from mcp_server.keys import Key

DAY_S = 86_400.0
ROUNDING = 1e-6  # of hours: 0.4 + 0.4 + 0.2 is within 1
LEAST_HOURS = 0.05  # of an evaluation: on a busy machine the start alone takes a minute
MARGIN = 2.0  # an evaluation is given so many times what it is estimated to take at most
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

    Of a day's hours a run counts with what it took; while it is open, with the cap it was given.
    What an evaluation or a probe asks for is known when it is planned: see `afford_of`, which alone
    counts the hours of a probe. A call that was answered before starts nothing.
    """
    audit = Audit(home)
    with Store(home) as store:
        if tool == "submit_train" and _answered(store, str(arguments.get("request_id", ""))):
            return
        names = audit.runs_of(key.name) if key.max_runs else ()
        mine = {name: row for name in names if (row := _row(store, name))}
        counts = bool(key.gpu_hours_per_day) and tool != "dry_run"
        used = _used(audit, store, key, clock() - DAY_S) if counts else 0.0
    going = [row.run_id for row in mine.values() if row.state in OPEN]
    if key.max_runs and len(going) >= key.max_runs:
        raise UserError(
            "QUOTA",
            f"the key {key.name} has {len(going)} runs open ({', '.join(going[:5])}) and may have "
            f"{key.max_runs}",
            hint=f'wait_run(run_id="{going[0]}") or cancel_run it, then call again.',
            retryable=True,
        )
    if not counts:
        return
    submits = tool == "submit_train"
    asked = float(arguments.get("max_gpu_hours", DEFAULT_HOURS)) if submits else 0.0
    left = key.gpu_hours_per_day - used
    if asked > left + ROUNDING or left <= ROUNDING:
        fits = submits and left > ROUNDING
        fit = f"Call again with max_gpu_hours={left:.3g}, or later" if fits else "Call later"
        raise _too_much(key, used, asked, fit, "max_gpu_hours" if submits else "")


def afford_of(home: Home, key: Key, clock: Callable[[], float] = time.time) -> Afford | None:
    """What gives an evaluation or a probe of `key` its cap; None where no hours are counted."""
    return partial(_afford, home, key, clock) if key.gpu_hours_per_day else None


def _afford(home: Home, key: Key, clock: Callable[[], float], hours: float) -> float:
    """The cap of work that takes at most `hours`: twice that, or what is left of the day.

    Raises UserError QUOTA when less than `hours` is left.
    """
    with Store(home) as store:
        used = _used(Audit(home), store, key, clock() - DAY_S)
    hours, left = max(LEAST_HOURS, hours), key.gpu_hours_per_day - used
    if hours > left + ROUNDING:
        raise _too_much(key, used, hours, "Ask for fewer rows, attempts or models, or call later")
    return min(MARGIN * hours, left)


def _used(audit: Audit, store: Store, key: Key, since: float) -> float:
    """Hours of the runs that `key` started or resumed since then.

    A run made before without a line of its own, in a home whose log was moved away, may be named
    by a later one: only a resumed run is older than its day.
    """
    rows = (_row(store, name) for name in audit.runs_of(key.name, since))
    return sum(_hours(row) for row in rows if row and (row.created >= since or row.attempt > 1))


def _too_much(key: Key, used: float, asked: float, fit: str, field: str = "") -> UserError:
    wants = f"; this call asks for {asked:.3g}" if asked else ""
    return UserError(
        "QUOTA",
        f"the key {key.name} may use {key.gpu_hours_per_day:g} GPU-hours a day and has used or "
        f"promised {used:.3g}{wants}",
        hint=f"{fit}: hours come back a day after their run was submitted.",
        field=field,
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
