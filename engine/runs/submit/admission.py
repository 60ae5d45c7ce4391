"""Checks of a run before it is queued: is it too expensive, too large, too risky, or incomplete?

Every check raises a UserError that says what to change. No check changes anything.
"""

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

from engine.core import hardware
from engine.core.errors import UserError
from engine.core.format import size
from engine.core.hints import Call, Change, Hint
from engine.cost import estimate
from engine.cost.estimate import Forecast
from engine.cost.evaluation_cost import Asking, evaluation_hours
from engine.endpoints import judges
from engine.environments import registry
from engine.environments.registry import EnvRecord
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.models.catalog import ModelRef
from engine.models.served.judge import local_judges
from engine.records.estimate import Estimate, Range
from engine.records.settings import GRPOSettings, TrainSettings

LOOK_HOURS = 0.1  # GPU-hours of an evaluation or a probe that need nobody's agreement
# An evaluation without a cap on device hours ends if it writes no answer for this many hours.
EVALUATION_WALL_HOURS = 6.0
SCORE_S = 1.0  # seconds to score an answer, if the audit did not measure that
# The quota of a caller's key. It takes the most device hours that some work may need, and returns
# how many of them the work may take. Raises UserError QUOTA if the quota is used up.
CapFunction = Callable[[float], float]


def sampling_hours(home: Home, models: Sequence[ModelRef], asking: Asking) -> Range:
    """Estimate the device hours in which all `models` sample the tasks and have them scored.

    `asking` says how much each model samples. Returns the low, likely and high sum over the models.
    """
    facts = [(ref.facts, ref.base_path) for ref in models]
    return evaluation_hours(home, asking, facts, hardware.detect(home.root))


def scoring_hours(record: EnvRecord, answers: int) -> float:
    """Return the hours in which the environment `record` scores `answers` stored answers, estimated
    high: each is taken to need the 95th percentile of the scoring times that the audit measured."""
    return answers * (record.audit.score_seconds_p95 or SCORE_S) / 3600


def cap_of(
    home: Home, cap_function: CapFunction | None, needed_hours: Callable[[], float]
) -> float:
    """Return the most device hours that an evaluation or a probe may take; 0 for no limit.

    Args:
        cap_function: the quota of the caller's key: takes the device hours that the run may need,
            and returns the hours that it may take. None if no quota applies.
        needed_hours: returns an upper estimate of the device hours that the run takes. The function
            may be slow, so it is called only if a cap is needed.

    Raises UserError QUOTA if the quota is used up, BUDGET if the home's total is spent, or
    NOT_APPROVED if the run takes more than may be spent without asking a person.
    """
    with Store(home) as store:
        check_hours_left(home, store)
    approved_hours = home.user_config().auto_approve_gpu_hours
    if cap_function is None and approved_hours is None:
        return 0.0
    most_needed = needed_hours()
    cap_hours = EVALUATION_WALL_HOURS  # holds unless one of the two limits below is lower
    if approved_hours is not None:
        # LOOK_HOURS need nobody's agreement, even if the user set a lower limit.
        cap_hours = min(cap_hours, max(approved_hours, LOOK_HOURS))
        _check_hours_without_asking(most_needed, cap_hours)
    if cap_function is not None:
        cap_hours = min(cap_hours, cap_function(most_needed))
    return cap_hours


def _check_hours_without_asking(needed_hours: float, limit_hours: float) -> None:
    """Raise UserError NOT_APPROVED if an evaluation or a probe needs a person's agreement.

    Args:
        needed_hours: the device hours that it may need.
        limit_hours: the device hours that may be spent without asking a person.
    """
    if needed_hours > limit_hours:
        raise UserError(
            "NOT_APPROVED",
            f"this takes up to {needed_hours:.2f} GPU-hours; above {limit_hours:g} a person must "
            "agree",
            hint="Ask for fewer rows, attempts or models; or ask the user, who may raise "
            "auto_approve_gpu_hours in config.toml.",
        )


def cap_warnings(cap: float) -> list[str]:
    """Return a warning that the run is ended after `cap` device hours; [] if `cap` is 0: no
    limit."""
    return [f"it is ended after {cap:.3g} GPU-hours"] if cap else []


def check_gpu_hours_cap(max_gpu_hours: float) -> None:
    """Raise UserError BAD_ARGUMENT unless a cap on device hours is a finite number above 0."""
    is_number = isinstance(max_gpu_hours, int | float) and not isinstance(max_gpu_hours, bool)
    if not is_number or not math.isfinite(max_gpu_hours) or max_gpu_hours <= 0:
        raise bad_argument(
            "max_gpu_hours", max_gpu_hours, "Give a number of hours above 0, such as 2."
        )


def check_texts(**texts: str) -> None:
    """Raise UserError BAD_ARGUMENT if a text has a NUL character in it or is too long.

    `texts` maps the name of an argument to its text. A `request_id` may have 200 characters, any
    other text 4,000.
    """
    for name, text in texts.items():
        max_chars = 200 if name == "request_id" else 4_000
        has_nul = "\0" in text
        if len(text) > max_chars or has_nul:
            fault = "a NUL in it" if has_nul else f"{len(text)} characters"
            raise UserError(
                "BAD_ARGUMENT",
                f"{name} has {fault}",
                hint=f"Say it in at most {max_chars:,} characters of plain text.",
                field=name,
            )


def check_secrets(record: EnvRecord) -> None:
    """Raise UserError ENV_SECRETS if a secret of the environment, or the key of an endpoint that it
    asks, is not set in this process; MODEL_NOT_FOUND if config.toml lacks that endpoint, or the
    home a model that is its judge."""
    missing = [name for name in record.secrets if not os.environ.get(name)]
    if missing:
        raise missing_secrets_error(missing, record.env_id)
    home = Home(record.dir.parents[2])  # `record.dir` is HOME/envs/<name>/<hash>
    judges.upstreams(home, registry.endpoints_of(record))  # raises where one cannot be asked


def check_not_deleted(run: RunDir, field: str = "resume") -> None:
    """Raise UserError RUN_STATE if the run's files were deleted.

    Args:
        run: the folder of the run.
        field: the argument of the request that needs these files: "resume" or "regrade".
    """
    if run.deleted.exists():
        raise UserError(
            "RUN_STATE",
            f"the files of {run.id} were deleted, its checkpoints too",
            hint="Name another run." if field == "regrade" else "Submit a new run.",
            field=field,
        )


def scored_env(home: Home, env_id: str, purpose: str, *, sealed: bool = False) -> EnvRecord:
    """Find the environment version that `env_id` names, and check that it can score answers.

    `purpose` is a participle for the error message, such as "evaluated". `sealed` says whether the
    version may be a sealed exam (held-out tasks that nobody may read).

    Raises UserError ENV_NOT_FOUND if there is no such version, ENV_SEALED if it is sealed and may
    not be, ENV_INVALID if it has no score function, ENV_SECRETS or ENV_DEPS if a secret or a
    package of it is missing.
    """
    record = registry.find_env(home, env_id, sealed=sealed)
    if not record.scored:
        raise UserError(
            "ENV_INVALID",
            f"{record.env_id} scores nothing, so no model can be {purpose} on it",
            hint="Give the environment a score function, or judge on another one.",
            field="env_id",
        )
    check_secrets(record)
    registry.env_python(record)  # raises ENV_DEPS if packages are missing
    return record


def require_files(model: ModelRef, field: str = "model") -> None:
    """Raise UserError MODEL_NOT_FOUND if the folder of the model's base model does not exist.

    `field` is the argument of the request that names the model, for the error.
    """
    if not model.base_path.is_dir():
        raise UserError(
            "MODEL_NOT_FOUND",
            f"the files of {model.base_ref} are not at {model.base_path}",
            hint=Hint(
                "Put them back, or use another model. To list usable ones:",
                Call("get_status", {"scope": "models"}),
            ),
            field=field,
        )


def no_env_error() -> UserError:
    """Make the error for a request that names no environment."""
    return UserError(
        "BAD_ARGUMENT",
        "no environment was named",
        hint=Hint("Name a pushed one. To list them:", Call("get_status", {"scope": "envs"})),
        field="env_id",
    )


def missing_secrets_error(missing: list[str], env_id: str) -> UserError:
    """Make the error for the environment `env_id` whose secrets `missing` (names of environment
    variables) are not set in this process."""
    return UserError(
        "ENV_SECRETS",
        f"{env_id} needs {', '.join(missing)}, which this server's environment does not have",
        hint="Set it where the server is started (never in a tool argument), then call again.",
        field="env_id",
        retryable=True,
    )


def check_audit(record: EnvRecord, settings: TrainSettings) -> list[str]:
    """Check by the stored audit that the environment's reward does not pay for degenerate answers.

    Raises UserError REWARD_RISK if the reward does. If the setting `accept_reward_risk` is on, or
    if the algorithm does not learn from the reward, a warning is returned instead. Returns [] if
    the audit found no risk.
    """
    if record.audit.verdict != "risk":
        return []
    problem = record.audit.headline or "degenerate answers earn"
    # Only GRPO learns from the reward.
    if not isinstance(settings, GRPOSettings) or settings.accept_reward_risk:
        return [f"reward_audit: {problem}; held-out success means little until it is mended"]
    raise UserError(
        "REWARD_RISK",
        f"the audit of {record.env_id} found: {problem}",
        hint=Hint(
            "Mend the reward and push again, or set accept_reward_risk = true to train on it "
            "knowingly. A dry run shows the audit:",
            # Not a call that accepts the risk: nobody should make that without a decision.
            Call("dry_run", {"env_id": record.env_id}),
        ),
        field="settings.accept_reward_risk",
        playbook="rewards",
    )


def check_size(forecast: Forecast, disk_free: int) -> None:
    """Check that the run is expected to fit into the memory and onto the disk.

    Args:
        forecast: the estimate of the run, and the setting to lower if the run does not fit.
        disk_free: free bytes on the disk, for the message.

    Raises UserError DOES_NOT_FIT if the memory is too small, DISK_FULL if the disk is.
    """
    figures = forecast.estimate
    if not figures.fits:
        needed, available = figures.peak_memory.total, figures.memory_available
        # "" if lowering a single setting is not enough; the hint then names max_length as a start.
        setting = figures.lower_this or "max_length"
        raise UserError(
            "DOES_NOT_FIT",
            f"the run needs about {size(needed)} of memory; {figures.device} has {size(available)}",
            hint=Hint(
                f"Lower {setting}; an estimate itemises the memory.",
                change=estimate.change_of(forecast.lower_to),
            ),
        )
    if not figures.disk_fits:
        raise UserError(
            "DISK_FULL",
            f"the run would write {size(figures.disk_bytes)}; "
            f"{size(disk_free)} are free, of which {size(estimate.DISK_RESERVE)} "
            "stay free",
            hint="Free some space or lower keep_checkpoints.",
            retryable=True,
        )


def check_judges_beside(
    home: Home, record: EnvRecord, figures: Estimate, devices: Sequence[hardware.Device]
) -> list[str]:
    """Check that models of the home that are judges of an environment (they grade its answers) fit
    beside a run, and return a warning that says what each takes.

    Args:
        record: the environment version.
        figures: the estimate of the run.
        devices: those of the machine. A judge may have another device than the run.

    Raises UserError DOES_NOT_FIT if there is no such room, whatever else runs, and those of
    `local_judge`.
    """
    warnings = []
    device_bytes = sorted((device.memory_total for device in devices), reverse=True)
    run_bytes = figures.least_memory  # with the smallest microbatches
    for judge in local_judges(home, registry.endpoints_of(record)):
        judge_bytes = judge.least_bytes(devices[0].kind)
        fits_beside_run = device_bytes[0] >= run_bytes + judge_bytes
        has_second_device = len(device_bytes) > 1 and device_bytes[1] >= judge_bytes
        fits_on_second_device = has_second_device and device_bytes[0] >= run_bytes
        if not fits_beside_run and not fits_on_second_device:
            raise UserError(
                "DOES_NOT_FIT",
                f"the judge {judge.ref} needs {size(judge_bytes)} beside the run's "
                f"{size(run_bytes)}; {devices[0].id} has {size(device_bytes[0])}",
                hint="Take a smaller model as judge, one behind a URL (openai:NAME), or train a "
                "smaller one.",
                field="env_id",
            )
        warnings.append(
            f"the judge {judge.ref} is served beside the run and takes {size(judge_bytes)} of "
            "memory"
        )
    return warnings


def check_approval(home: Home, figures: Estimate, approved: bool) -> None:
    """Raise UserError NOT_APPROVED if the run needs a person's agreement and `approved` is false.

    A run needs it if its likely device hours (in `figures`, its estimate) exceed
    `auto_approve_gpu_hours` of config.toml. If this key is not set, no run needs approval.
    """
    likely = figures.gpu_hours.likely
    limit = home.user_config().auto_approve_gpu_hours
    if limit is not None and likely > limit and not approved:
        raise UserError(
            "NOT_APPROVED",
            f"the run likely takes {likely:.2f} GPU-hours; above {limit:g} a person must agree",
            hint=Hint(
                "Ask the user, who may raise auto_approve_gpu_hours in config.toml; or take fewer "
                "steps.",
                change=_fewer_steps(figures, limit),
            ),
        )


def _fewer_steps(figures: Estimate, limit_hours: float) -> Change | None:
    """Return the change of settings that makes the run fit into `limit_hours` device hours: fewer
    steps.

    `figures` is the estimate of the run with all its steps. Returns None if not even one step fits.
    """
    steps = estimate.steps_within(figures, limit_hours)
    if steps < 1:
        return None
    # The change removes `epochs`, because `epochs` and `steps` cannot both be given.
    return Change(settings={"steps": steps}, without=("epochs",))


def check_hours_left(home: Home, store: Store) -> None:
    """Raise UserError BUDGET if the home's `max_gpu_hours_total` is spent.

    The hours that open runs are still expected to take count as spent.
    """
    total = home.user_config().max_gpu_hours_total
    if total is not None and store.committed_hours() >= total:
        raise UserError(
            "BUDGET",
            f"nothing is left of this home's max_gpu_hours_total = {total:g}",
            hint=f"The owner of this machine may raise it in {home.config_file}.",
        )


def bad_argument(field: str, value: Any, hint: str) -> UserError:
    """Make the error for an unusable `value` of the argument `field`; `hint` says what to use."""
    return UserError("BAD_ARGUMENT", f"{field}={value!r} cannot be used", hint=hint, field=field)
