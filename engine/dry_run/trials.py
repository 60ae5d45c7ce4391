"""Tries the model in a dry run, if the request asks for it: by a probe (the model answers some
tasks), and by a smoke run (two optimizer steps)."""

from collections.abc import Callable

from engine.dry_run.checks import DryRun, seconds_left
from engine.dry_run.judgements import Outcome
from engine.dry_run.probe_check import check_probe
from engine.dry_run.smoke_check import check_smoke
from engine.runs.submit.requests import DryRunRequest

_SMOKE_HOURS = 0.02  # device hours that a quota must have left for a smoke run


def try_model(
    run: DryRun,
    request: DryRunRequest,
    began: float,
    cap_function: Callable[[float], float] | None,
) -> None:
    """Try the model of a run in the ways that the request asks for, and add the results as checks.

    The check "smoke" does two optimizer steps; in the check "probe" the model answers some tasks.
    Both are skipped if an earlier check failed.

    Args:
        run: the dry run, whose other checks are made already.
        request: says what is to be tried.
        began: value of `time.monotonic()` at the start of the call.
        cap_function: the quota of the caller's key: takes the device hours that a trial may need
            and returns its cap, or raises UserError QUOTA. None if no quota applies.
    """
    check_list = run.check_list
    needs = [check.name for check in check_list.checks if check.status != "skip"]
    if request.smoke:

        def smoke() -> Outcome:
            """Do the two steps. Raises UserError QUOTA if the caller has no hours left."""
            if cap_function is not None:
                cap_function(_SMOKE_HOURS)  # called for its error; the returned cap is not needed
            return check_smoke(run, request.smoke_s or seconds_left(began))

        check_list.run_check("smoke", needs, smoke)
    if request.samples:
        check_list.run_check(
            "probe", needs, lambda: check_probe(run, request.samples, began, cap_function)
        )
