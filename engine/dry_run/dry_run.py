"""Dry runs: checks of a run before anything is spent: environment, model, settings, machine, money.

The same call gives the same report (`report_hash`). With `samples`, a repeated call gets the probe
of the first call, once it has finished.
"""

import time
from collections.abc import Callable

from engine.core.errors import UserError
from engine.core.reply import Reply
from engine.dry_run.checks import DryRun
from engine.dry_run.plan import dry_run_plan
from engine.dry_run.prompt_check import dry_run_prompt
from engine.dry_run.report import report_of, results_of
from engine.dry_run.trials import try_model
from engine.executors.admission import refuse_trial
from engine.home.database import reports_unwritable_disk
from engine.home.run_dir import Home
from engine.records.settings import PROMPT, GivenSettings
from engine.runs.submit.requests import DryRunRequest

MOST_SAMPLES = 256


@reports_unwritable_disk
def dry_run_request(
    home: Home, request: DryRunRequest, cap_function: Callable[[float], float] | None = None
) -> Reply:
    """Check the run or the plan that could be submitted with this request, without training it.

    Args:
        home: the home.
        request: what could be submitted, and what is to be tried (`samples`, `smoke`).
        cap_function: the quota of the caller's key: takes the estimated device hours of a probe and
            returns its cap, or raises a UserError. None if no quota applies.

    Returns the reply. Fields that are not known because a check failed are empty. `probe` is the
    result of the probe, in which the model answers some tasks (None until it is done); `smoke` is
    that of the smoke run, two optimizer steps. Raises UserError BAD_ARGUMENT if `samples` is not
    from 0 to 256, or if the model cannot be tried on the machine that the settings name.
    """
    began = time.monotonic()
    _check_samples(request.samples)
    trial_argument = ""  # the argument that asks to try the model; "" if none does
    if request.smoke:
        trial_argument = "smoke"
    elif request.samples:
        trial_argument = "samples"
    refuse_trial(request.settings, trial_argument)  # with "" nothing is refused
    if request.is_plan:
        return dry_run_plan(home, request, began, cap_function)
    if request.algorithm == PROMPT:
        return dry_run_prompt(home, request)
    run = DryRun(home, request.env_id, request.model, request.algorithm, dict(request.settings))
    run.run_checks(began)
    # The report holds `report_hash`, a hash of the checks so far. It is made before the model is
    # tried, which adds checks to `run`: so a second call gives the same hash.
    report = report_of(run)
    try_model(run, request, began, cap_function)
    return report | results_of(run)


def dry_run(
    home: Home,
    env_id: str,
    model: str = "pebble",
    algorithm: str = "grpo",
    settings: GivenSettings | None = None,
    samples: int = 0,
    cap_function: Callable[[float], float] | None = None,
) -> Reply:
    """Check a single run without training it, and return the reply; `dry_run_request` explains the
    arguments and errors."""
    request = DryRunRequest(
        env_id=env_id,
        model=model,
        algorithm=algorithm,
        settings=dict(settings or {}),
        samples=samples,
    )
    return dry_run_request(home, request, cap_function)


def _check_samples(samples: int) -> None:
    """Raise UserError BAD_ARGUMENT unless `samples` is a whole number from 0 to `MOST_SAMPLES`."""
    is_count = isinstance(samples, int) and not isinstance(samples, bool)
    if not is_count or not 0 <= samples <= MOST_SAMPLES:
        raise UserError(
            "BAD_ARGUMENT",
            f"samples = {samples!r} cannot be used",
            hint=f"Give a whole number of tasks from 0 to {MOST_SAMPLES}; 16 says enough.",
            field="samples",
        )
