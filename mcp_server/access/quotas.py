"""Quotas: how many runs a key may have open at once, and how many device hours it may use: a day,
in all, and together with the other keys of its project.

The use is counted anew each time, from the audit log (which key started which runs in the last day)
and the rows of the runs (whose they are, and how many hours they took). So there is no counter that
could go wrong.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine.core.errors import UserError
from engine.core.hints import Call, Hint
from engine.core.reply import Reply
from engine.home.rows import DEFAULT_GPU_HOURS, OPEN, RunRow
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.home.store_runs import RESUMABLE
from engine.runs.submit.admission import EVALUATION_WALL_HOURS, CapFunction
from mcp_server.access.audit_log import TOOLS_THAT_START_RUNS, Audit
from mcp_server.access.keys import Key, projects_of, stored_request_id

DAY_S = 86_400.0
ROUNDING = 1e-6  # tolerance in hours, so that 0.4 + 0.4 + 0.2 fits into 1
LEAST_HOURS = 0.05  # the least that an evaluation counts: a slow start alone takes a minute
MARGIN = 2.0  # the cap of an evaluation is its estimate times this, because estimates are rough
LISTED_RUNS = 5  # how many open runs an error names at most
ALL_RUNS = 1_000_000  # a limit that no home reaches


def starts_a_run(tool: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a call of `tool` with these `arguments` starts a run."""
    if tool == "dry_run":  # it starts one only to try the model on some tasks
        return bool(arguments.get("samples"))
    return tool in TOOLS_THAT_START_RUNS


@dataclass(frozen=True)
class Allowance:
    """Hours that a key may use, and those of them that are used or promised.

    Attributes:
        hours: how many it may use.
        used: what ended runs took, and the caps of open ones.
        period: what the hours are for, such as "a day" or "in all"; stands in messages.
        comes_back: whether used hours may be used again later.
    """

    hours: float
    used: float
    period: str = "a day"
    comes_back: bool = True

    @property
    def left(self) -> float:
        """The hours that are left; below 0 if more were used than allowed."""
        return self.hours - self.used


@dataclass(frozen=True)
class Cap:
    """The cap on GPU-hours for a submit that does not name `max_gpu_hours`.

    Attributes:
        hours: the cap.
        warning: why it differs from `DEFAULT_GPU_HOURS`; "" if there is nothing to warn of.
    """

    hours: float
    warning: str = ""


def check_quota(
    home: Home,
    key: Key,
    tool: str,
    arguments: Mapping[str, Any],
    clock: Callable[[], float] = time.time,
) -> Cap | None:
    """Check that the quota of `key` allows the run that a call of `tool` would start.

    A run of the last 24 hours counts with the hours it took, an open run with its cap (the hours
    after which it is stopped). How many hours an evaluation needs is known only once it is planned,
    so for an evaluation this function only checks that some hours are left.

    Args:
        home: the home that holds the runs and the audit log.
        key: the caller.
        tool: the tool that is called; `starts_a_run` is true for this call.
        arguments: the arguments of the call, without nulls.
        clock: returns the present time in unix seconds.

    Returns the cap for the new run, if the hours of `key` are limited and the call is a submit
    without `max_gpu_hours`; otherwise None. Raises UserError QUOTA if too many runs are open, or
    too few hours are left.
    """
    if tool == "submit_train":
        return _check_submit(home, key, arguments, clock)
    with Store(home) as store:
        _check_open_runs(home, store, key)
        # A dry run tries the model on a few tasks. That may be too short to become a run, so its
        # hours are checked later, when the engine has planned it.
        allowance = _tightest_allowance(home, store, key, clock)
        if allowance is not None and tool != "dry_run":
            _check_any_hours_left(key, allowance)
    return None


def _check_submit(
    home: Home, key: Key, arguments: Mapping[str, Any], clock: Callable[[], float]
) -> Cap | None:
    """Check that `key` may submit the training run that these arguments ask for.

    A submit with a `request_id` that was used before starts nothing new, so it passes.

    Returns the cap on GPU-hours for the run, if the hours of `key` are limited and the arguments
    name no cap; else None. A repeated call gets the result of the first call.

    Raises UserError QUOTA if too many runs are open, or the hours of the day do not suffice.
    """
    needs_cap = has_hours_limit(home, key) and "max_gpu_hours" not in arguments
    request_id = stored_request_id(key, str(arguments.get("request_id", "")))
    with Store(home) as store:
        new_runs = _run_count(store, arguments)
        resumed_run = _resumed_run(store, arguments) if needs_cap else None
        if _was_submitted(store, request_id):
            if not needs_cap:
                return None
            # With another cap the submit would refuse the call: same `request_id`, other arguments.
            return _cap_of_first_call(home, store, request_id, resumed_run)
        _check_open_runs(home, store, key, new_runs)
        allowance = _tightest_allowance(home, store, key, clock)
    if allowance is None:
        return None
    if needs_cap:
        return _cap_within(_largest_cap(key, allowance), resumed_run, allowance)
    _check_requested_hours(key, allowance, float(arguments["max_gpu_hours"]))
    return None


def _resumed_run(store: Store, arguments: Mapping[str, Any]) -> RunRow | None:
    """Return the row of the run that a submit resumes; None if the submit starts a new run."""
    return _find_row(store, str(arguments["resume"])) if arguments.get("resume") else None


def has_hours_limit(home: Home, key: Key) -> bool:
    """Whether the GPU-hours of `key` are limited, by themselves or with those of its project."""
    if key.gpu_hours_per_day or key.max_gpu_hours:  # 0: no limit
        return True
    return bool(key.project and projects_of(home).get(key.project))


def _check_any_hours_left(key: Key, allowance: Allowance) -> None:
    """Raise UserError QUOTA if `key` has used up its hours. Less than `ROUNDING` hours left count
    as none, because sums of fractions are inexact."""
    if allowance.left <= ROUNDING:
        raise _hours_refusal(key, allowance, requested_hours=0.0, suggestion="")


def _largest_cap(key: Key, allowance: Allowance) -> float:
    """Return the largest cap on GPU-hours that a submit may have now, rounded down to thousandths.
    Raises UserError QUOTA if no hours are left."""
    largest_cap = _rounded_down(allowance.left)
    if largest_cap == 0:
        raise _submit_refusal(key, allowance, requested_hours=0.0)
    return largest_cap


def _check_requested_hours(key: Key, allowance: Allowance, requested_hours: float) -> None:
    """Raise UserError QUOTA if a submit asks for more hours than are left. `ROUNDING` makes up for
    the inexactness of sums of fractions."""
    if allowance.left <= ROUNDING or requested_hours > allowance.left + ROUNDING:
        raise _submit_refusal(key, allowance, requested_hours)


def _run_count(store: Store, arguments: Mapping[str, Any]) -> int:
    """Count the runs that a submit with these arguments queues; at least 1.

    A resume queues those runs of the plan that did not finish. A plan (several runs, submitted
    together) queues one chain of runs for each combination of varied values; an evaluation at the
    end of the plan is one run for all chains. The arguments are not checked yet, so a plan that the
    submit will refuse is counted too.
    """
    if arguments.get("resume"):
        rows = _rows_of(store, str(arguments["resume"]))
        return max(1, sum(row.state in RESUMABLE for row in rows))
    next_steps, varied = arguments.get("then") or [], arguments.get("vary") or {}
    value_counts = [len(values) if isinstance(values, list) else 1 for values in varied.values()]
    chains = math.prod(value_counts)  # one chain of runs for each combination of the values
    is_evaluated = bool(next_steps) and next_steps[-1].get("algorithm") == "evaluate"
    evaluations = 1 if is_evaluated else 0  # all chains share one evaluation
    trainings_of_chain = 1 + len(next_steps) - evaluations
    return max(1, chains * trainings_of_chain + evaluations)


def _check_open_runs(home: Home, store: Store, key: Key, new_runs: int = 1) -> None:
    """Raise UserError QUOTA if `new_runs` more runs would exceed the limit of open runs of `key`.

    The two errors differ in what helps: a plan may be too large, or earlier runs must end first.
    """
    if not key.max_runs:  # 0: the number of open runs is not limited
        return
    open_runs = _open_runs(home, store, key)
    # At least 1: a single run is never too large a plan; the second check refuses it.
    largest_plan = max(1, key.max_runs - len(open_runs))
    if new_runs > largest_plan:
        raise UserError(
            "QUOTA",
            f"the plan has {new_runs} runs; the key {key.name} has {len(open_runs)} open and may "
            f"have {key.max_runs}",
            hint="Submit a smaller plan.",
            retryable=bool(open_runs),
        )
    if len(open_runs) >= key.max_runs:
        raise UserError(
            "QUOTA",
            f"the key {key.name} has {len(open_runs)} runs open "
            f"({', '.join(open_runs[:LISTED_RUNS])}) and may have {key.max_runs}",
            hint=Hint(
                "Wait for one or cancel it, then call again.",
                Call("wait_run", {"run_id": open_runs[0]}),
            ),
            retryable=True,
        )


def limits_and_use(home: Home, key: Key, clock: Callable[[], float] = time.time) -> Reply:
    """Return the limits of `key` and how much of each is used, as `get_status` shows them.

    `clock` returns the present time in unix seconds. Fields of the result:
    - `name` of the key, and the ids of its `open_runs`.
    - `max_runs`, if the number of open runs is limited.
    - `gpu_hours_per_day`, `used_gpu_hours` and `left_gpu_hours`, if those of a day are limited.
    - `budgets`: one entry for the GPU-hours that the key may use in all, and one for those of its
      project, each only if it is limited. An entry has `of` (which of the two it is: "in all" or
      "in all with the project NAME"), and in hours `hours` (the limit), `used` and `left`.
    """
    with Store(home) as store:
        limits: Reply = {"name": key.name, "open_runs": _open_runs(home, store, key)}
        if key.max_runs:
            limits["max_runs"] = key.max_runs
        if key.gpu_hours_per_day:
            used_hours = _hours_of_last_day(home, store, key, clock)
            limits["gpu_hours_per_day"] = key.gpu_hours_per_day
            limits["used_gpu_hours"] = round(used_hours, 3)
            limits["left_gpu_hours"] = _rounded_down(key.gpu_hours_per_day - used_hours)
        budgets = [
            {
                "of": allowance.period,  # such as "in all": these hours do not come back
                "hours": allowance.hours,
                "used": round(allowance.used, 3),
                "left": _rounded_down(allowance.left),
            }
            for allowance in _budgets(home, store, key)
        ]
    return limits | ({"budgets": budgets} if budgets else {})


def _cap_within(hours_left: float, resumed_run: RunRow | None, allowance: Allowance) -> Cap:
    """Return the cap for a submit that names none, with a warning if it is not the default.

    The cap is the one that the resumed run had, or the default if `resumed_run` is None (a new
    run), but never more than `hours_left`: what is left of `allowance`, rounded down.
    """
    preferred_hours = _cap_of_row(resumed_run)
    hours = min(preferred_hours, hours_left)
    if hours == DEFAULT_GPU_HOURS:
        return Cap(hours)  # without a warning
    # Any other cap is what is left of the day, or that of the resumed run.
    period = "this key's day" if allowance.comes_back else f"the hours {allowance.period}"
    reason = f"what is left of {period}" if hours < preferred_hours else "as the run had"
    return Cap(hours, f"max_gpu_hours was not given: it is {_hours_text(hours)}, {reason}")


def cap_of_resumed_run(home: Home, run_id: str) -> float:
    """Return the cap for a call that resumes a run and names none: the GPU-hours that the run was
    limited to before; the default if the run had no limit or does not exist."""
    with Store(home) as store:
        row = _find_row(store, run_id)
    return _cap_of_row(row)


def _cap_of_row(row: RunRow | None) -> float:
    """Return the cap of a run in GPU-hours; the default if `row` is None or the run has no cap."""
    if row is None or not row.max_gpu_hours:  # 0: the run has no cap
        return float(DEFAULT_GPU_HOURS)
    return row.max_gpu_hours


def _cap_of_first_call(
    home: Home, store: Store, request_id: str, resumed_run: RunRow | None
) -> Cap | None:
    """Return the cap that the first call with this `request_id` got; None if it is not recorded.

    A repeated call must have the same cap as the first call, although fewer hours may be left of
    the day by now. `resumed_run` is the run that the call resumes; None if it starts a new one.
    """
    if resumed_run is not None:
        # The first call has written its cap into the row of the run that it resumed.
        return Cap(resumed_run.max_gpu_hours)
    rows = store.list_runs(ALL_RUNS, kind="train")
    earlier_run = next((row for row in rows if row.request_id == request_id), None)
    config = home.run(earlier_run.run_id).find_config() if earlier_run else None
    if config is None or not config.max_gpu_hours:
        return None
    return Cap(config.max_gpu_hours)


def cap_function_of(
    home: Home, key: Key, clock: Callable[[], float] = time.time
) -> CapFunction | None:
    """Make the function by which the engine limits the hours of an evaluation or a probe (a short
    trial of a model) that `key` starts. Returns None if the hours of the key are not limited.

    The function takes the most hours that the work is estimated to need, and returns the hours
    after which the engine stops the work. It raises UserError QUOTA if the estimate exceeds the
    hours that the key has left.
    """
    if not has_hours_limit(home, key):
        return None
    return partial(_cap_of_estimate, home, key, clock)


def _cap_of_estimate(
    home: Home, key: Key, clock: Callable[[], float], estimated_hours: float
) -> float:
    """Return the cap in hours for work that is estimated to take at most `estimated_hours`.

    The cap is `MARGIN` times the estimate, but never more than the hours that `key` has left. An
    estimate below `LEAST_HOURS` counts as `LEAST_HOURS`. `clock` returns the present time in unix
    seconds.

    Raises:
        UserError: QUOTA if the estimate is longer than the hours that are left.
    """
    with Store(home) as store:
        allowance = _tightest_allowance(home, store, key, clock)
    hours = max(LEAST_HOURS, estimated_hours)
    if allowance is None:  # the limit was taken away meanwhile
        return MARGIN * hours
    if hours > allowance.left + ROUNDING:
        raise _hours_refusal(
            key, allowance, hours, suggestion="ask for fewer rows, attempts or models"
        )
    return min(MARGIN * hours, allowance.left)


def _tightest_allowance(
    home: Home, store: Store, key: Key, clock: Callable[[], float]
) -> Allowance | None:
    """Return the hours of which `key` has the least left: of its day, of its own in all, or of its
    project. Returns None if none of these is limited."""
    allowances = _budgets(home, store, key)
    if key.gpu_hours_per_day:
        used_hours = _hours_of_last_day(home, store, key, clock)
        allowances.append(Allowance(key.gpu_hours_per_day, used_hours))
    return min(allowances, key=lambda allowance: allowance.left, default=None)


def _budgets(home: Home, store: Store, key: Key) -> list[Allowance]:
    """Return the allowances that never come back: the GPU-hours that `key` may use in all, and
    those of its project, which all keys of the project share. One without a limit is left out."""
    budgets = []
    if key.max_gpu_hours:
        used = total_counted_hours(store.owned_runs(key.caller_id))
        budgets.append(Allowance(key.max_gpu_hours, used, "in all", comes_back=False))
    project_hours = projects_of(home).get(key.project) if key.project else None
    if project_hours:
        used = total_counted_hours(store.owned_runs(project=key.project))
        period = f"in all with the project {key.project}"
        budgets.append(Allowance(project_hours, used, period, comes_back=False))
    return budgets


def total_counted_hours(rows: Sequence[RunRow]) -> float:
    """Return how many hours of a quota these runs take together. What has ended counts with the
    hours that it took, an open run or plan with its cap: the most that it may take."""
    rows_by_cap: dict[str, list[RunRow]] = {}  # the runs of a plan share one cap
    for row in rows:
        rows_by_cap.setdefault(row.plan or row.run_id, []).append(row)
    return sum(_counted_hours(group) for group in rows_by_cap.values())


def _hours_of_last_day(home: Home, store: Store, key: Key, clock: Callable[[], float]) -> float:
    """Sum the GPU-hours of the runs that `key` started or resumed in the last 24 hours.

    An open run counts with its cap. `clock` returns the present time in unix seconds.
    """
    day_start = clock() - DAY_S
    counted_hours = []
    ids = Audit(home).runs_of(key.name, day_start)  # of runs and of plans
    logged_ids = set(ids)
    for run_id in ids:
        # A run of a plan may also have been resumed alone. It counts once, with its plan.
        rows = [
            row
            for row in _rows_of(store, run_id)
            if row.plan == run_id or row.plan not in logged_ids
        ]
        # If the first lines of the audit log were moved away, a repeated call looks like the start
        # of a run that is in fact older. So an older run counts only if it was resumed.
        if any(row.created >= day_start or row.attempt > 1 for row in rows):
            counted_hours.append(_counted_hours(rows))
    return sum(counted_hours)


def _open_runs(home: Home, store: Store, key: Key) -> list[str]:
    """Return the ids of the runs that `key` started and that have not ended, oldest first."""
    # The audit log names runs and plans; a plan stands for all of its runs.
    rows = [row for run_id in Audit(home).runs_of(key.name) for row in _rows_of(store, run_id)]
    open_ids = [row.run_id for row in rows if row.state in OPEN]
    return list(dict.fromkeys(open_ids))  # each once, in order


def _submit_refusal(key: Key, allowance: Allowance, requested_hours: float) -> UserError:
    """Make the QUOTA error for a submit whose cap exceeds the hours that are left.

    The hint suggests the largest cap that would still fit, if any hours are left.
    `requested_hours` is 0 if the submit names no cap.
    """
    largest_cap = _rounded_down(allowance.left)
    suggestion = ""
    if largest_cap > 0:
        suggestion = f"call again with max_gpu_hours={_hours_text(largest_cap)}"
    return _hours_refusal(key, allowance, requested_hours, suggestion, field="max_gpu_hours")


def _hours_refusal(
    key: Key, allowance: Allowance, requested_hours: float, suggestion: str, field: str = ""
) -> UserError:
    """Make the QUOTA error for too many hours.

    Args:
        key: the caller.
        allowance: the hours of which too few are left.
        requested_hours: hours that the call asks for; 0: not known.
        suggestion: what to do now, such as "call again with max_gpu_hours=0.5"; "" for nothing.
        field: the argument that is too large; "": none.
    """
    # More hours than the key has in a day fit on no later day either.
    waiting_helps = allowance.comes_back and requested_hours <= allowance.hours + ROUNDING
    request_text = f"; this call asks for {requested_hours:.3g}" if requested_hours else ""
    return UserError(
        "QUOTA",
        f"the key {key.name} may use {allowance.hours:g} GPU-hours {allowance.period} and has used "
        f"or promised {allowance.used:.3g}{request_text}",
        hint=_hours_hint(allowance, waiting_helps, suggestion),
        field=field,
        retryable=waiting_helps,
    )


def _hours_hint(allowance: Allowance, waiting_helps: bool, suggestion: str) -> str:
    """Make the hint for a caller who asks for more hours than are left.

    Example: "Call again with max_gpu_hours=0.5, or call later: hours come back a day after ...".

    Args:
        allowance: the hours of which too few are left.
        waiting_helps: whether the same call would fit on a later day.
        suggestion: what to do at once; "" for none.
    """
    if not allowance.comes_back:
        request = "ask the person who runs this server for more hours (honesmith key budget)."
        return _capitalized(f"{suggestion}, or {request}" if suggestion else request)
    call_later = ""
    if waiting_helps:
        call_later = "call later"
    elif not suggestion:  # the call never fits as it is, so a smaller cap is suggested
        call_later = f"call later with max_gpu_hours={_hours_text(allowance.hours)}"
    hint = ", or ".join(remedy for remedy in (suggestion, call_later) if remedy)
    hint += ": hours come back a day after their run was submitted." if call_later else "."
    return _capitalized(hint)


def _capitalized(text: str) -> str:
    """Return `text` (not empty) with a capital first letter. `str.capitalize` would also lower all
    other letters."""
    return text[0].upper() + text[1:]


def _rounded_down(hours: float) -> float:
    """Return `hours` rounded down to thousandths, and at least 0. Rounded up, the number would be
    more than is left, and a call with it would be refused."""
    # ROUNDING / 2 is added because 0.3 may be stored as 0.29999999999999999, which must not become
    # 0.299.
    return max(0.0, math.floor((hours + ROUNDING / 2) * 1000) / 1000)


def _hours_text(hours: float) -> str:
    """Return `hours` with up to three decimals and no zeros at the end, such as "0.5" or "2"."""
    return f"{hours:.3f}".rstrip("0").rstrip(".")


def _was_submitted(store: Store, request_id: str) -> bool:
    """Whether an earlier call with this `request_id` submitted a run; False for "" (no id)."""
    # `requested_run` also compares the stored request with that of the call, which is not known
    # here. An empty one stands for it: it differs from every stored request, so for an id in use an
    # error (REQUEST_CONFLICT) is raised, and None is returned for an unused id or "".
    unknown_request: dict[str, object] = {}
    try:
        return store.requested_run(request_id, unknown_request) is not None
    except UserError:
        return True


def _find_row(store: Store, run_id: str) -> RunRow | None:
    """Return the row of the run `run_id`; if that is the id of a plan, the row of its first run.
    Returns None if no run or plan has this id (any more)."""
    rows = _rows_of(store, run_id)
    return rows[0] if rows else None


def _rows_of(store: Store, run_id: str) -> list[RunRow]:
    """Return the rows of all runs of the plan `run_id`, or the one row of the run `run_id`; [] if
    no plan or run has this id (any more)."""
    try:
        return store.plan_runs(run_id) or [store.get_run(run_id)]
    except UserError:
        return []


def _counted_hours(rows: Sequence[RunRow]) -> float:
    """Return how many hours of the quota one run takes, or all runs of a plan, which share one cap.

    A run that has ended takes the hours that it spent. An open run takes at least what it may
    still spend: its cap; if it has none, its estimate; if it has neither, the time that the longest
    evaluation may take.
    """
    spent = sum(row.spent_hours for row in rows)
    if all(row.state not in OPEN for row in rows):
        return spent
    # spent_before: the hours of earlier attempts; a cap is for one attempt.
    spent_before = sum(row.spent_before for row in rows)
    first = rows[0]
    # Only a training is stopped at its estimate, so the estimate of an evaluation does not count.
    estimated_hours = first.estimated_hours if first.kind == "train" else 0.0
    cap = first.max_gpu_hours or estimated_hours or EVALUATION_WALL_HOURS
    return max(spent, spent_before + cap)
