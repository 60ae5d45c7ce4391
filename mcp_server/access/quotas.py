"""What a key may still start: runs at once, device hours in a day.

Counted from the audit log (whose runs) and the rows of the runs (what became of them), so there is
no counter that could go wrong.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine.core.errors import UserError
from engine.core.hints import Call, Hint
from engine.core.reply import Reply
from engine.home.rows import DEFAULT_GPU_HOURS, OPEN, RunRow
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.runs.submit.admission import EVALUATION_WALL_HOURS, Afford
from mcp_server.access.audit_log import STARTS, Audit
from mcp_server.access.keys import Key, own_request_id

DAY_S = 86_400.0
ROUNDING = 1e-6  # of hours: 0.4 + 0.4 + 0.2 is within 1
LEAST_HOURS = 0.05  # of an evaluation: on a busy machine the start alone takes a minute
MARGIN = 2.0  # an evaluation is given so many times what it is estimated to take at most
ALL_RUNS = 1_000_000


def starts_a_run(tool: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a call of `tool` takes a device."""
    return tool in STARTS and (tool != "dry_run" or bool(arguments.get("samples")))


@dataclass(frozen=True)
class Cap:
    """The `max_gpu_hours` given to a submit that named none; `warning` says why, "" for nothing."""

    hours: float
    warning: str = ""


def check_quota(
    home: Home,
    key: Key,
    tool: str,
    arguments: Mapping[str, Any],
    clock: Callable[[], float] = time.time,
) -> Cap | None:
    """Raises UserError QUOTA when `key` may not start what this call would start.

    Of a day's hours a run counts with what it took; while it is open, with the cap it was given.
    A submit that names no cap is given one that fits, which is returned. What an evaluation or a
    probe asks for is known when it is planned: see `afford_of`, which alone counts the hours of a
    probe. A call that was answered before starts nothing.
    """
    submits = tool == "submit_train"
    counts = bool(key.gpu_hours_per_day) and tool != "dry_run"
    unnamed = submits and counts and "max_gpu_hours" not in arguments
    request_id = own_request_id(key, str(arguments.get("request_id", "")))
    with Store(home) as store:
        resumed = _row(store, str(arguments.get("resume", ""))) if unnamed else None
        if submits and _answered(store, request_id):
            return _cap_of_before(home, store, request_id, resumed) if unnamed else None
        going = _open_runs(home, store, key) if key.max_runs else []
        used = _used_in_a_day(home, store, key, clock) if counts else 0.0
    if key.max_runs and len(going) >= key.max_runs:
        raise UserError(
            "QUOTA",
            f"the key {key.name} has {len(going)} runs open ({', '.join(going[:5])}) and may have "
            f"{key.max_runs}",
            hint=Hint(
                "Wait for one or cancel it, then call again.",
                Call("wait_run", {"run_id": going[0]}),
            ),
            retryable=True,
        )
    if not counts:
        return None
    left = key.gpu_hours_per_day - used
    fitting = _down(left) if submits else 0.0
    if unnamed and fitting:
        return _cap_within(fitting, resumed)
    asked = float(arguments.get("max_gpu_hours", 0.0)) if submits else 0.0
    if unnamed or asked > left + ROUNDING or left <= ROUNDING:
        fit = f"call again with max_gpu_hours={_plain(fitting)}" if fitting else ""
        raise _too_much(key, used, asked, fit, "max_gpu_hours" if submits else "")
    return None


def standing(home: Home, key: Key, clock: Callable[[], float] = time.time) -> Reply:
    """The limits of `key` and what is left of them, for `get_status`."""
    with Store(home) as store:
        limits: Reply = {"name": key.name, "open_runs": _open_runs(home, store, key)}
        if key.max_runs:
            limits["max_runs"] = key.max_runs
        if key.gpu_hours_per_day:
            used = _used_in_a_day(home, store, key, clock)
            limits["gpu_hours_per_day"] = key.gpu_hours_per_day
            limits["used_gpu_hours"] = round(used, 3)
            limits["left_gpu_hours"] = _down(key.gpu_hours_per_day - used)
    return limits


def _cap_within(left: float, resumed: RunRow | None) -> Cap:
    """The cap of a submit that named none: the default, of a resumed run its own, or `left`."""
    former = _cap_of_row(resumed)
    hours = min(former, left)
    if hours == DEFAULT_GPU_HOURS:
        return Cap(hours)
    why = "what is left of this key's day" if hours < former else "as the run had"
    return Cap(hours, f"max_gpu_hours was not given: it is {_plain(hours)}, {why}")


def former_cap(home: Home, run_id: str) -> float:
    """The cap that a resumed run gets where none is named: the one it had."""
    with Store(home) as store:
        row = _row(store, run_id)
    return _cap_of_row(row)


def _cap_of_row(row: RunRow | None) -> float:
    return (row.max_gpu_hours if row else 0.0) or float(DEFAULT_GPU_HOURS)


def _cap_of_before(home: Home, store: Store, request_id: str, resumed: RunRow | None) -> Cap | None:
    """The cap that the first call with this `request_id` was given: a repeated call must ask for
    the same one, although less may be left of the day now."""
    if resumed is not None:
        return Cap(resumed.max_gpu_hours)
    rows = store.list_runs(ALL_RUNS, kind="train")
    made = next((row for row in rows if row.request_id == request_id), None)
    config = home.run(made.run_id).find_config() if made else None
    return Cap(config.max_gpu_hours) if config and config.max_gpu_hours else None


def afford_of(home: Home, key: Key, clock: Callable[[], float] = time.time) -> Afford | None:
    """A function that caps an evaluation or a probe of `key`; None where no hours are counted."""
    return partial(_afford, home, key, clock) if key.gpu_hours_per_day else None


def _afford(home: Home, key: Key, clock: Callable[[], float], hours: float) -> float:
    """The cap of work that takes at most `hours`: twice that, or what is left of the day.

    Raises UserError QUOTA when less than `hours` is left.
    """
    with Store(home) as store:
        used = _used_in_a_day(home, store, key, clock)
    hours, left = max(LEAST_HOURS, hours), key.gpu_hours_per_day - used
    if hours > left + ROUNDING:
        raise _too_much(key, used, hours, "ask for fewer rows, attempts or models")
    return min(MARGIN * hours, left)


def _used_in_a_day(home: Home, store: Store, key: Key, clock: Callable[[], float]) -> float:
    """Hours of the runs that `key` started or resumed in the last 24 hours.

    A run made before without a line of its own, in a home whose log was moved away, may be named
    by a later one: only a resumed run is older than its day.
    """
    since = clock() - DAY_S
    rows = (_row(store, name) for name in Audit(home).runs_of(key.name, since))
    return sum(_hours(row) for row in rows if row and (row.created >= since or row.attempt > 1))


def _open_runs(home: Home, store: Store, key: Key) -> list[str]:
    rows = (_row(store, name) for name in Audit(home).runs_of(key.name))
    return list(dict.fromkeys(row.run_id for row in rows if row and row.state in OPEN))


def _too_much(key: Key, used: float, asked: float, fit: str, field: str = "") -> UserError:
    """The refusal. `fit` says what could be asked for now, "" where nothing is left."""
    day = key.gpu_hours_per_day
    helps = asked <= day + ROUNDING  # a wait; more than a day has fits on no day
    ways = [fit] if fit else []
    if not ways or helps:
        ways.append("call later" if helps else f"call later with max_gpu_hours={_plain(day)}")
    wants = f"; this call asks for {asked:.3g}" if asked else ""
    back = ": hours come back a day after their run was submitted." if "later" in ways[-1] else "."
    hint = ", or ".join(ways) + back
    return UserError(
        "QUOTA",
        f"the key {key.name} may use {day:g} GPU-hours a day and has used or "
        f"promised {used:.3g}{wants}",
        hint=hint[0].upper() + hint[1:],
        field=field,
        retryable=helps,
    )


def _down(hours: float) -> float:
    """`hours` rounded down to thousandths: a call with this number must fit."""
    return max(0.0, math.floor((hours + ROUNDING / 2) * 1000) / 1000)


def _plain(hours: float) -> str:
    return f"{hours:.3f}".rstrip("0").rstrip(".")


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
