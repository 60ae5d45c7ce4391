"""The checks of a run before anything is spent: environment, model, settings, machine, money.

The same call gives the same report (`report_hash`), and with `samples` the finished probe of the
first call.
"""

import time
from collections.abc import Callable

from engine.core.errors import UserError
from engine.core.reply import Reply
from engine.dry_run.checks import DryRun
from engine.dry_run.plan import dry_run_plan
from engine.dry_run.probe_check import check_probe
from engine.dry_run.report import report_of, results_of
from engine.home.database import reports_unwritable_disk
from engine.home.run_dir import Home
from engine.records.settings import GivenSettings
from engine.runs.submit.requests import DryRunRequest

MOST_SAMPLES = 256


def dry_run_request(
    home: Home, request: DryRunRequest, cap_function: Callable[[float], float] | None = None
) -> Reply:
    """Check the run or the plan that could be submitted with this request; see `dry_run` and
    `plan.dry_run_plan`."""
    if not request.is_plan:
        return dry_run(
            home,
            request.env_id,
            request.model,
            request.algorithm,
            request.settings,
            request.samples,
            cap_function,
        )
    _check_samples(request.samples)
    return dry_run_plan(home, request, cap_function)


@reports_unwritable_disk
def dry_run(
    home: Home,
    env_id: str,
    model: str = "pebble",
    algorithm: str = "grpo",
    settings: GivenSettings | None = None,
    samples: int = 0,
    cap_function: Callable[[float], float] | None = None,
) -> Reply:
    """Check a run that could be submitted with the same arguments, without training anything.

    Args:
        samples: how many tasks the model answers, `group_size` times each, in a probe: a short run
            of its own, which starts only when no check fails. 0 for no probe.
        cap_function: the quota of the caller's key: returns the probe's cap on device hours for an
            estimate of them, or raises a UserError. None where no quota applies.

    What the reply does not know, because a check failed, is empty; `probe` is the probe's result,
    None until it is done. Raises UserError BAD_ARGUMENT for `samples` outside 0..256.
    """
    began = time.monotonic()
    _check_samples(samples)
    run = DryRun(home, env_id, model, algorithm, dict(settings or {}))
    check_list = run.run_checks(began)
    report = report_of(run)  # without the probe, so that a second call gives the same hash
    if samples:
        # Whatever was checked must have passed.
        needs = [check.name for check in check_list.checks if check.status != "skip"]
        check_list.run_check("probe", needs, lambda: check_probe(run, samples, began, cap_function))
    return report | results_of(run)


def _check_samples(samples: int) -> None:
    """Raises UserError BAD_ARGUMENT unless `samples` is a whole number of tasks in its range."""
    is_count = isinstance(samples, int) and not isinstance(samples, bool)
    if not is_count or not 0 <= samples <= MOST_SAMPLES:
        raise UserError(
            "BAD_ARGUMENT",
            f"samples = {samples!r} cannot be used",
            hint=f"Give a whole number of tasks from 0 to {MOST_SAMPLES}; 16 says enough.",
            field="samples",
        )
