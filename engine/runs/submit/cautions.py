"""Warnings about a new run that follow from earlier ones: nearly the same was tried and failed, or
several settings change at once, so that the cause of a difference will stay unknown."""

import math
from collections.abc import Sequence
from typing import Any

from engine.evidence.compare.settings_diff import (
    Making,
    changed_names,
    continues,
    making_of_run,
)
from engine.home.rows import RunRow
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.records.run_config import TrainConfig

NEAR = 0.1  # two numbers whose ratio is at most 1.1 count as the same idea
LOOK_BACK = 200  # the newest runs that are compared: older ones say little about a new one
# Kinds of failure that are not caused by a setting of the run.
_OUTSIDE = frozenset(
    {"infra", "budget", "killed", "interrupted", "cancelled", "timeout", "stalled"}
)
_MAX_NAMES = 4  # of settings in a caution


def cautions(home: Home, store: Store, config: TrainConfig) -> list[str]:
    """List warnings about a run that is to be queued with this config.

    One says that it nearly repeats an earlier run, another that it changes several choices at once.
    The run is compared with those of the newest `LOOK_BACK` training runs that have the same
    environment version, algorithm and start model.
    """
    new = Making(run_id="", config=config)  # it has no id before it is queued
    earlier = [
        (row, making_of_run(home, row.run_id))
        for row in store.list_runs(limit=LOOK_BACK, kind="train")
        if row.env_id == config.env_id and row.algorithm == config.algorithm
    ]
    same_start = [(row, making) for row, making in earlier if making.start == new.start]
    newest_repeat = _repeats(new, same_start)[:1]  # one such warning is enough
    return newest_repeat + _many_changes(home, new, same_start)


def _repeats(new: Making, earlier: Sequence[tuple[RunRow, Making]]) -> list[str]:
    """List a sentence about each earlier run that the new one repeats, the newest first.

    Args:
        new: how the new run is made.
        earlier: the row of each earlier run and how it was made, the newest first.
    """
    sentences = [
        _repeat_in_words(new, row, making)
        for row, making in earlier
        if not _is_different_idea(new, making)
    ]
    return [sentence for sentence in sentences if sentence]  # "": nothing speaks against it


def _repeat_in_words(new: Making, row: RunRow, making: Making) -> str:
    """Return a warning that a new run repeats an earlier one; "" if nothing speaks against it.

    It warns if the earlier run failed or was not better, or if it is done and had exactly the same
    settings, seed included.

    Args:
        new: how the new run is made.
        row, making: the earlier run, of nearly the same settings, and how it was made.
    """
    failure = _failure_in_words(row)
    differences = _difference_in_words(new, making)
    if failure:
        but_for = f" but for {differences}" if differences else ""
        return (
            f"nearly the same as {row.run_id}{but_for}, which {failure}: read it before "
            "spending this again"
        )
    if row.state == "done" and new.seed == making.seed and not differences:
        return (
            f"the same as {row.run_id} ({verdict_in_words(row)}), seed included: it will repeat it"
        )
    return ""


def _failure_in_words(row: RunRow) -> str:
    """Return how an earlier run went wrong: "failed (oom)" or "came out no difference".

    "" for any other run, also for one that failed for a reason outside its settings.
    """
    if row.state == "failed" and row.reason_kind not in _OUTSIDE:
        return f"failed ({row.reason_kind})"
    if row.state == "done" and row.verdict in ("worse", "no_difference"):
        return f"came out {verdict_in_words(row)}"
    return ""


def verdict_in_words(row: RunRow) -> str:
    """Return the verdict of a run: "better", "worse", "no difference"; "unknown" if it has none."""
    return (row.verdict or "unknown").replace("_", " ")


def _many_changes(home: Home, new: Making, earlier: Sequence[tuple[RunRow, Making]]) -> list[str]:
    """Return a warning if the new run changes several choices at once; otherwise [].

    A choice is a setting, the model, the environment or the algorithm. With several changes a
    difference in the result could not be attributed to one of them. There is no warning if the new
    run goes on from what the other made, or if there is no run to compare it with.

    `earlier` are earlier runs and how they were made, the newest first; the newest is compared with
    if the new run has no parent.
    """
    base = _making_to_compare_with(home, new, earlier)
    # No such run; or nothing is known of how it was made.
    if base is None or not base.config:
        return []
    if continues(new, base):  # what comes of it is held against its start, not against settings
        return []
    changes = changed_names(base, new)
    if len(changes) < 2:
        return []
    names = ", ".join(changes[:_MAX_NAMES])
    if len(changes) > _MAX_NAMES:
        names += ", ..."
    return [
        f"{len(changes)} levers move at once against {base.run_id} ({names}): whatever comes "
        "of it, no one of them will be known to be the cause"
    ]


def _making_to_compare_with(
    home: Home, new: Making, earlier: Sequence[tuple[RunRow, Making]]
) -> Making | None:
    """Return the making of the run with which a new run is compared; None without such a run.

    That run is the parent, or else the newest of the earlier runs.
    """
    parent = new.config.parent if new.config else ""
    if parent:
        return making_of_run(home, parent)
    return earlier[0][1] if earlier else None  # the newest one's Making


def _changed_settings(new: Making, old: Making) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ between two runs: name -> (old value, new value).

    None stands for a setting that a run does not have.
    """
    return {
        name: (old.setting_values.get(name), new.setting_values.get(name))
        for name in changed_names(old, new)  # also names such as the model's, which are no settings
        if name in new.setting_values or name in old.setting_values
    }


def _is_different_idea(new: Making, old: Making) -> bool:
    """Return whether the runs differ in more than nearly equal numbers.

    That is so if they differ in the model, the algorithm or the environment, or in a setting whose
    two values are not nearly the same number.
    """
    changed_settings = _changed_settings(new, old)
    # More changes than changed settings: another one is of the model, the algorithm or the
    # environment.
    if len(changed_names(old, new)) > len(changed_settings):
        return True
    return any(
        not _is_near(old_value, new_value) for old_value, new_value in changed_settings.values()
    )


def _difference_in_words(new: Making, old: Making) -> str:
    """List the settings that differ, as `kl_coef (0.05 then, 0.052 now)`; "" if none does.

    The runs must be nearly the same: the values that differ are numbers.
    """
    return ", ".join(
        f"{name} ({old_value:g} then, {new_value:g} now)"
        for name, (old_value, new_value) in _changed_settings(new, old).items()
    )


def _is_near(old: Any, new: Any) -> bool:
    """Return whether two values are equal, or positive numbers within a factor of 1 + `NEAR`."""
    are_numbers = all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in (old, new)
    )
    if not are_numbers or old <= 0 or new <= 0:
        return old == new
    # The distance of the logarithms: the same whichever of the two is larger.
    return abs(math.log(new / old)) <= math.log1p(NEAR)
