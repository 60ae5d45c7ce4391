"""What it takes for an exam to show a change worth having: more tasks, or more attempts at each."""

import math
from collections.abc import Mapping
from statistics import fmean, variance

from engine.core.files import read_object
from engine.evidence.stats.inference import (
    MARGIN,
    PairedVerdict,
    Side,
    smallest_detectable_mean,
    tasks_needed,
)
from engine.home.run_dir import Home

MOST_ATTEMPTS = 16  # beyond it more tasks are cheaper


def tasks_wanted(verdict: PairedVerdict) -> int | None:
    """Tasks that would show a change of the margin four times in five, as the tasks so far spread;
    None where that cannot be said."""
    if not verdict.n or verdict.detectable is None or not math.isfinite(verdict.detectable):
        return None
    if verdict.method.startswith("McNemar"):
        flips = len(verdict.gained) + len(verdict.lost)
        return tasks_needed(MARGIN, (flips + 1) / (verdict.n + 1))
    if verdict.margin <= 0:
        return None
    return math.ceil(verdict.n * (verdict.detectable / verdict.margin) ** 2)


def attempts_wanted(before: Side, after: Side, margin: float) -> int | None:
    """Attempts at each task that would show a change of `margin` on these tasks; None where no
    number up to `MOST_ATTEMPTS` would, or where one attempt each says nothing of their noise.

    Attempts average out what an answer owes to chance, never what tasks owe to being these.
    """
    shared = [task for task in before.values if len(after.values.get(task, ())) > 1]
    shared = [task for task in shared if len(before.values[task]) > 1]
    if len(shared) < 2:
        return None
    gaps = [fmean(after.values[task]) - fmean(before.values[task]) for task in shared]
    spread = variance(gaps)
    # What one attempt on each side adds to the variance of a task's gap.
    each = fmean([variance(side.values[task]) for task in shared for side in (before, after)]) * 2
    had = min(len(side.values[task]) for task in shared for side in (before, after))
    tasks_own = max(0.0, spread - each / had)
    for attempts in range(had + 1, MOST_ATTEMPTS + 1):
        sd = math.sqrt(tasks_own + each / attempts)
        if smallest_detectable_mean(len(shared), sd) <= margin:
            return attempts
    return None


def split_rows(home: Home, env_id: str, split: str = "heldout") -> int | None:
    """Rows of a split of an environment version, None where the version is gone."""
    name, _, hash12 = env_id.partition("@")
    facts = read_object(home.env(name, hash12) / "env.json") if name and hash12 else {}
    rows = facts.get("rows")
    count = rows.get(split) if isinstance(rows, Mapping) else None
    return count if isinstance(count, int) else None


def more_rows(needed: int | None, have: int, split: str = "held-out") -> str:
    """The edit that makes an exam large enough where every row is used."""
    wanted = f"at least {needed}" if needed else f"more than {have}"
    return f"tasks(): {wanted} {split} rows instead of {have}, then push and evaluate again"
