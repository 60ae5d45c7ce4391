"""What may not be queued: too dear, too large, too risky, or missing what it needs.

Every check raises the UserError that says what to change; none of them changes anything.
"""

import math
import os
from typing import Any

from engine import estimate
from engine.errors import UserError
from engine.registry import EnvRecord
from engine.run_dir import Home
from engine.store import Store


def check_cap(max_gpu_hours: float) -> None:
    number = isinstance(max_gpu_hours, int | float) and not isinstance(max_gpu_hours, bool)
    if not number or not math.isfinite(max_gpu_hours) or max_gpu_hours <= 0:
        raise bad_argument(
            "max_gpu_hours", max_gpu_hours, "Give a number of hours above 0, such as 2."
        )


def check_words(**said: str) -> None:
    """Refuse free text that would not fit where it is shown and stored."""
    for name, text in said.items():
        limit = 200 if name == "request_id" else 4_000
        if len(text) > limit or "\0" in text:
            what = "a NUL in it" if "\0" in text else f"{len(text)} characters"
            raise UserError(
                "BAD_ARGUMENT",
                f"{name} has {what}",
                hint=f"Say it in at most {limit:,} characters of plain text.",
                field=name,
            )


def check_secrets(record: EnvRecord) -> None:
    missing = [name for name in record.secrets if not os.environ.get(name)]
    if missing:
        raise no_secrets(missing, record.env_id)


def no_secrets(missing: list[str], env_id: str) -> UserError:
    return UserError(
        "ENV_SECRETS",
        f"{env_id} needs {', '.join(missing)}, which this server's environment does not have",
        hint="Set it where the server is started (never in a tool argument), then call again.",
        field="env_id",
        retryable=True,
    )


def check_audit(record: EnvRecord, settings: dict[str, Any], algorithm: str) -> None:
    """Refuse to reinforce a reward that the stored audit found to pay for degenerate answers."""
    audit = record.audit or {}
    risky = audit.get("verdict") == "risk"
    if algorithm != "grpo" or not risky or settings.get("accept_reward_risk"):
        return
    raise UserError(
        "REWARD_RISK",
        f"the audit of {record.env_id} found: {audit.get('headline') or 'degenerate answers earn'}",
        hint="Mend the reward and push again (dry_run shows the audit), or set "
        "accept_reward_risk=true to train on it knowingly.",
        field="settings.accept_reward_risk",
        playbook="rewards",
    )


def check_size(figures: dict[str, Any], disk_free: int) -> None:
    """Refuse what cannot fit into memory or onto the disk, by the estimate `figures`."""
    if not figures["fits"]:
        need, have = figures["peak_memory"]["total"], figures["memory_available"]
        lower = figures["lower_this"] or "max_length"
        raise UserError(
            "DOES_NOT_FIT",
            f"the run needs about {estimate.size(need)} of memory; {figures['device']} has "
            f"{estimate.size(have)}",
            hint=f"Lower {lower}; estimate_cost itemises the memory.",
        )
    if not figures["disk_fits"]:
        raise UserError(
            "DISK_FULL",
            f"the run would write {estimate.size(figures['disk_bytes'])}; "
            f"{estimate.size(disk_free)} are free, of which {estimate.size(estimate.DISK_RESERVE)} "
            "stay free",
            hint="Free some space or lower keep_checkpoints.",
            retryable=True,
        )


def check_approval(home: Home, figures: dict[str, Any], approved: bool) -> None:
    """Refuse a spend above `auto_approve_gpu_hours` that no person agreed to."""
    likely, limit = figures["gpu_hours"]["likely"], home.user_config().auto_approve_gpu_hours
    if limit is not None and likely > limit and not approved:
        raise UserError(
            "NOT_APPROVED",
            f"the run likely takes {likely:.2f} GPU-hours; above {limit:g} a person must agree",
            hint="Ask the user; they may raise auto_approve_gpu_hours in config.toml.",
        )


def check_hours_left(home: Home, store: Store) -> None:
    """Refuse any work once the home's total is spent or promised away."""
    total = home.user_config().max_gpu_hours_total
    if total is not None and store.committed_hours() >= total:
        raise UserError(
            "BUDGET",
            f"nothing is left of this home's max_gpu_hours_total = {total:g}",
            hint=f"The owner of this machine may raise it in {home.config_file}.",
        )


def bad_argument(field: str, value: Any, hint: str) -> UserError:
    return UserError("BAD_ARGUMENT", f"{field}={value!r} cannot be used", hint=hint, field=field)
