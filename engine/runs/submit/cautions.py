"""What earlier runs say against a new one: nearly the same was tried and failed, or several
settings change at once, so that none of them will be known to be the cause."""

import math
from collections.abc import Sequence
from typing import Any

from engine.evidence.compare.settings_diff import Making, changed_choices, making_of_run
from engine.home.rows import RunRow
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.records.run_config import TrainConfig

NEAR = 0.1  # a number this close to an earlier one is the same idea
LOOK_BACK = 200  # runs
# Kinds of failure that no setting of the run is the cause of.
_OUTSIDE = frozenset({"infra", "budget", "killed", "interrupted", "cancelled", "timeout"})
_SHOWN = 4  # settings that a caution names


def cautions(home: Home, store: Store, config: TrainConfig) -> list[str]:
    """What earlier runs say against one with this config, before it is queued."""
    new = Making("", config)
    past = [
        (row, making_of_run(home, row.run_id))
        for row in store.list_runs(LOOK_BACK, kind="train")
        if row.env_id == config.env_id and row.algorithm == config.algorithm
    ]
    alike = [(row, made) for row, made in past if made.start == new.start]
    return [*_again(new, alike)[:1], *_several(home, new, alike)]


def _again(new: Making, past: Sequence[tuple[RunRow, Making]]) -> list[str]:
    """Earlier runs of nearly these settings that failed or came to nothing, newest first."""
    sentences = []
    for row, made in past:
        if _far(new, made):
            continue
        outcome = _came_to_nothing(row)
        same_seed = new.settings.get("seed") == made.settings.get("seed")
        apart = _near(new, made)
        if outcome:
            close = f" but for {apart}" if apart else ""
            sentences.append(
                f"nearly the same as {row.run_id}{close}, which {outcome}: read it before "
                "spending this again"
            )
        elif row.state == "done" and same_seed and not apart:
            verdict = verdict_in_words(row)
            sentences.append(
                f"the same as {row.run_id} ({verdict}), seed included: it will repeat it"
            )
    return sentences


def _came_to_nothing(row: RunRow) -> str:
    """How an earlier run failed by its own settings, "" when it did not."""
    if row.state == "failed" and row.reason_kind not in _OUTSIDE:
        return f"failed ({row.reason_kind})"
    if row.state == "done" and row.verdict in ("worse", "no_difference"):
        return f"came out {verdict_in_words(row)}"
    return ""


def verdict_in_words(row: RunRow) -> str:
    """The verdict of a run as people say it."""
    return (row.verdict or "unknown").replace("_", " ")


def _several(home: Home, new: Making, past: Sequence[tuple[RunRow, Making]]) -> list[str]:
    """Several levers moved at once, against the parent or the newest run of the kind."""
    parent = new.config.parent if new.config else ""
    if parent:
        before = making_of_run(home, parent)
    elif past:
        before = past[0][1]
    else:
        return []
    levers = changed_choices(before, new)
    if not before.config or len(levers) < 2:
        return []
    named = ", ".join(levers[:_SHOWN]) + (", ..." if len(levers) > _SHOWN else "")
    return [
        f"{len(levers)} levers move at once against {before.run_id} ({named}): whatever comes of "
        "it, no one of them will be known to be the cause"
    ]


def _values(one: Making, other: Making) -> dict[str, tuple[Any, Any]]:
    """The settings that were chosen, or follow from a choice, and differ."""
    return {
        name: (other.settings.get(name), one.settings.get(name))
        for name in changed_choices(other, one)
        if name in one.settings or name in other.settings
    }


def _far(one: Making, other: Making) -> bool:
    if any(name not in {**one.settings, **other.settings} for name in changed_choices(other, one)):
        return True
    return any(not _close(*pair) for pair in _values(one, other).values())


def _near(one: Making, other: Making) -> str:
    pairs = _values(one, other).items()
    return ", ".join(f"{name} ({before:g} then, {now:g} now)" for name, (before, now) in pairs)


def _close(before: Any, now: Any) -> bool:
    numbers = all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in (before, now)
    )
    if not numbers or before <= 0 or now <= 0:
        return before == now
    return abs(math.log(now / before)) <= math.log1p(NEAR)
