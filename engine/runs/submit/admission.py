"""What may not be queued: too expensive, too large, too risky, or without what it needs.

Every check raises a UserError that says what to change; none of them changes anything.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.core import hardware
from engine.core.errors import UserError
from engine.core.format import size
from engine.core.hints import Call, Change, Hint
from engine.cost import estimate
from engine.cost.estimate import Forecast
from engine.environments import registry
from engine.environments.env_facts import EnvFacts
from engine.environments.registry import EnvRecord
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.models.catalog import ModelRef
from engine.records.estimate import Estimate
from engine.records.settings import SFTSettings, TrainSettings
from engine.settings.defaults import SamplingLimits

LOOK_HOURS = 0.1  # GPU-hours of an evaluation or a probe that need nobody's agreement
EVALUATION_WALL_HOURS = 6.0  # an evaluation has no cap of its own, but it must end
SCORE_S = 1.0  # seconds per stored answer, where the audit did not measure how long a score takes
# From the device hours that some work takes at most, its cap by the quota; raises UserError QUOTA.
Afford = Callable[[float], float]


@dataclass(frozen=True)
class SamplingWork:
    """What an evaluation or a probe samples: `tasks` of an environment, `attempts` times each."""

    limits: SamplingLimits
    env: EnvFacts
    tasks: int
    attempts: int


def sampling_hours(home: Home, models: Sequence[ModelRef], work: SamplingWork) -> float:
    """The device hours that sampling and scoring take at most, for all models together."""
    return estimate.evaluation_hours(
        home,
        work.limits,
        [(ref.facts, ref.base_path) for ref in models],
        work.env,
        hardware.detect(home.root),
        rows=work.tasks,
        attempts=work.attempts,
    )


def scoring_hours(record: EnvRecord, answers: int) -> float:
    """The device hours that scoring this many stored answers takes."""
    return answers * (record.audit.score_seconds_p95 or SCORE_S) / 3600


def cap_of(home: Home, afford: Afford | None, hours: Callable[[], float]) -> float:
    """The cap on device hours of an evaluation or a probe; 0 where neither quota nor limit applies.

    `hours` returns what it takes at most; it is called only where a cap is needed. `afford` is the
    quota, None for none. Raises UserError QUOTA (by `afford`), BUDGET (the home's total is spent)
    or NOT_APPROVED (more than may be spent without a person).
    """
    with Store(home) as store:
        check_hours_left(home, store)
    limit = home.user_config().auto_approve_gpu_hours
    if afford is None and limit is None:
        return 0.0
    need, cap = hours(), EVALUATION_WALL_HOURS
    if limit is not None:
        cap = min(cap, max(limit, LOOK_HOURS))
        if need > cap:
            raise UserError(
                "NOT_APPROVED",
                f"this takes up to {need:.2f} GPU-hours; above {cap:g} a person must agree",
                hint="Ask for fewer rows, attempts or models; or ask the user, who may raise "
                "auto_approve_gpu_hours in config.toml.",
            )
    return cap if afford is None else min(cap, afford(need))


def cap_warnings(cap: float) -> list[str]:
    """The warning that names the cap in device hours of a run; none for 0, which is no cap."""
    return [f"it is ended after {cap:.3g} GPU-hours"] if cap else []


def check_gpu_hours_cap(max_gpu_hours: float) -> None:
    """Raises UserError BAD_ARGUMENT unless it is a finite number of hours above 0."""
    is_number = isinstance(max_gpu_hours, int | float) and not isinstance(max_gpu_hours, bool)
    if not is_number or not math.isfinite(max_gpu_hours) or max_gpu_hours <= 0:
        raise bad_argument(
            "max_gpu_hours", max_gpu_hours, "Give a number of hours above 0, such as 2."
        )


def check_texts(**texts: str) -> None:
    """Raises UserError BAD_ARGUMENT for a text, named by its argument, that is too long to be
    stored and shown, or that has a NUL in it.
    """
    for name, text in texts.items():
        limit = 200 if name == "request_id" else 4_000
        if len(text) > limit or "\0" in text:
            fault = "a NUL in it" if "\0" in text else f"{len(text)} characters"
            raise UserError(
                "BAD_ARGUMENT",
                f"{name} has {fault}",
                hint=f"Say it in at most {limit:,} characters of plain text.",
                field=name,
            )


def check_secrets(record: EnvRecord) -> None:
    """Raises UserError ENV_SECRETS where a secret of the environment is not set in this process."""
    missing = [name for name in record.secrets if not os.environ.get(name)]
    if missing:
        raise no_secrets(missing, record.env_id)


def check_not_deleted(run: RunDir, field: str = "resume") -> None:
    """Raises UserError RUN_STATE where the run's files were deleted.

    `field` is the argument of the request that needs them.
    """
    if run.deleted.exists():
        raise UserError(
            "RUN_STATE",
            f"the files of {run.id} were deleted, its checkpoints too",
            hint="Name another run." if field == "regrade" else "Submit a new run.",
            field=field,
        )


def scored_env(home: Home, env_id: str, what: str) -> EnvRecord:
    """The environment version that `env_id` means, which scores and whose process can be started.

    `what` is the word for the message: evaluated, probed or regraded. Raises UserError
    ENV_NOT_FOUND, ENV_INVALID (it scores nothing), ENV_SECRETS or ENV_DEPS.
    """
    record = registry.find_env(home, env_id)
    if not record.scored:
        raise UserError(
            "ENV_INVALID",
            f"{record.env_id} scores nothing, so no model can be {what} on it",
            hint="Give the environment a score function, or judge on another one.",
            field="env_id",
        )
    check_secrets(record)
    registry.env_python(record)
    return record


def require_files(model: ModelRef) -> None:
    """Raises UserError MODEL_NOT_FOUND where the files of the base model are gone."""
    if not model.base_path.is_dir():
        raise UserError(
            "MODEL_NOT_FOUND",
            f"the files of {model.base_ref} are not at {model.base_path}",
            hint=Hint(
                "Put them back, or use another model. To list usable ones:",
                Call("get_status", {"scope": "models"}),
            ),
            field="model",
        )


def no_env() -> UserError:
    """The error for a request that names no environment."""
    return UserError(
        "BAD_ARGUMENT",
        "no environment was named",
        hint=Hint("Name a pushed one. To list them:", Call("get_status", {"scope": "envs"})),
        field="env_id",
    )


def no_secrets(missing: list[str], env_id: str) -> UserError:
    """The error for an environment whose secrets (`missing`) this process does not have."""
    return UserError(
        "ENV_SECRETS",
        f"{env_id} needs {', '.join(missing)}, which this server's environment does not have",
        hint="Set it where the server is started (never in a tool argument), then call again.",
        field="env_id",
        retryable=True,
    )


def check_audit(record: EnvRecord, settings: TrainSettings) -> list[str]:
    """Check that the environment's reward may be trained on; returns a warning for a known risk.

    A risk is a reward that the stored audit found to pay for degenerate answers. It is allowed for
    SFT, which does not learn from the reward, and by `accept_reward_risk`. Raises UserError
    REWARD_RISK.
    """
    if record.audit.verdict != "risk":
        return []
    problem = record.audit.headline or "degenerate answers earn"
    if isinstance(settings, SFTSettings) or settings.accept_reward_risk:
        return [f"reward_audit: {problem}; held-out success means little until it is mended"]
    raise UserError(
        "REWARD_RISK",
        f"the audit of {record.env_id} found: {problem}",
        hint=Hint(
            "Mend the reward and push again (a dry run shows the audit), or set "
            "accept_reward_risk = true to train on it knowingly.",
            change=Change(settings={"accept_reward_risk": True}),
        ),
        field="settings.accept_reward_risk",
        playbook="rewards",
    )


def check_size(forecast: Forecast, disk_free: int) -> None:
    """Check by the forecast that the run fits into memory and onto the disk.

    `disk_free`: bytes, named in the message. Raises UserError DOES_NOT_FIT or DISK_FULL.
    """
    figures = forecast.estimate
    if not figures.fits:
        needed, available = figures.peak_memory.total, figures.memory_available
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


def check_approval(home: Home, figures: Estimate, approved: bool) -> None:
    """Raises UserError NOT_APPROVED where nobody approved the run and it likely takes too long.

    The limit is `auto_approve_gpu_hours` of the home's config; without it nothing needs approval.
    """
    likely, limit = figures.gpu_hours.likely, home.user_config().auto_approve_gpu_hours
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


def _fewer_steps(figures: Estimate, limit: float) -> Change | None:
    """The change to as many steps as fit into `limit` device hours; None where no step does."""
    startup = figures.seconds["startup"] / 3600
    likely = figures.gpu_hours.likely
    share = (0.9 * limit - startup) / max(likely - startup, 1e-9)  # a tenth is left for rounding
    steps = math.floor(figures.steps * share)
    return Change(settings={"steps": steps}, without=("epochs",)) if steps >= 1 else None


def check_hours_left(home: Home, store: Store) -> None:
    """Raises UserError BUDGET where the home's total is spent, or promised to open runs."""
    total = home.user_config().max_gpu_hours_total
    if total is not None and store.committed_hours() >= total:
        raise UserError(
            "BUDGET",
            f"nothing is left of this home's max_gpu_hours_total = {total:g}",
            hint=f"The owner of this machine may raise it in {home.config_file}.",
        )


def bad_argument(field: str, value: Any, hint: str) -> UserError:
    """The error for an argument (`field`) with a value that cannot be used."""
    return UserError("BAD_ARGUMENT", f"{field}={value!r} cannot be used", hint=hint, field=field)
