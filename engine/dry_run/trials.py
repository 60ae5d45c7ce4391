"""What a dry run tries beside its checks, where it is asked to: a probe, and a smoke run."""

from collections.abc import Callable

from engine.dry_run.checks import DryRun, seconds_left
from engine.dry_run.probe_check import check_probe
from engine.dry_run.smoke_check import check_smoke
from engine.judgements import Outcome
from engine.runs.submit.requests import DryRunRequest

_SMOKE_HOURS = 0.02  # that a quota must have left for two steps


def try_model(
    run: DryRun,
    request: DryRunRequest,
    began: float,
    cap_function: Callable[[float], float] | None,
) -> None:
    """Try the model of a run as far as the request asks, and add what came of it to the checks.

    The check "smoke" does two optimizer steps, the check "probe" answers some tasks. Both are
    skipped where an earlier check failed.

    Args:
        run: the dry run, whose checks are made.
        request: it says what is to be tried.
        began: when the call began, on the monotonic clock.
        cap_function: that of `dry_run_request`; raises UserError where the caller has no hours
            left. None where nothing limits the caller.
    """
    check_list = run.check_list
    needs = [check.name for check in check_list.checks if check.status != "skip"]
    if request.smoke:

        def smoke() -> Outcome:
            """Do the two steps. Raises UserError QUOTA where the caller has no hours left."""
            if cap_function is not None:
                cap_function(_SMOKE_HOURS)
            return check_smoke(run, request.smoke_s or seconds_left(began))

        check_list.run_check("smoke", needs, smoke)
    if request.samples:
        check_list.run_check(
            "probe", needs, lambda: check_probe(run, request.samples, began, cap_function)
        )
