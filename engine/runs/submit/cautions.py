"""Warnings about a new run that follow from earlier runs.

One warning says that nearly the same was tried and failed. Another says that several settings
change at once, so that the cause of a difference will stay unknown.
"""

import math
from collections.abc import Sequence
from typing import Any

from engine.evidence.compare.settings_diff import (
    Making,
    changed_names,
    continues,
    making_of_run,
    making_of_seen,
)
from engine.home.rows import RunRow
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.records.run_config import TrainConfig

NEAR = 0.1  # two numbers whose ratio is at most 1.1 count as the same idea
LOOK_BACK = 200  # the newest runs that are compared: older ones say little about a new one
# Kinds of failure that are not caused by a setting of the run.
_OUTSIDE = frozenset(
    {"infra", "endpoint", "budget", "killed", "interrupted", "cancelled", "timeout", "stalled"}
)
_MAX_NAMES = 4  # the most settings that a warning names


def cautions(home: Home, store: Store, config: TrainConfig) -> list[str]:
    """Return warnings from earlier runs about a run that is to be queued with this config.

    One warning says that the run nearly repeats an earlier one, another that it changes several
    choices at once. The run is compared with those of the newest `LOOK_BACK` training runs that
    have the same environment version, algorithm and start model.
    """
    new = Making(run_id="", config=config)  # a run has no id before it is queued
    earlier = [
        (row, making_of_seen(home, row.run_id))
        for row in store.list_runs(limit=LOOK_BACK, kind="train")
        if row.env_id == config.env_id and row.algorithm == config.algorithm
    ]
    same_start = [(row, making) for row, making in earlier if making.start == new.start]
    newest_repeat = _repeat_warnings(new, same_start)[:1]  # one such warning is enough
    return newest_repeat + _many_changes_warning(home, new, same_start)


def _repeat_warnings(new: Making, earlier: Sequence[tuple[RunRow, Making]]) -> list[str]:
    """Return a warning for each earlier run that the new one repeats, the newest first.

    Args:
        new: how the new run is made: its start model, environment, algorithm and settings.
        earlier: (row, how the run was made) of each earlier run, the newest first.
    """
    sentences = [
        _repeat_in_words(new, row, making)
        for row, making in earlier
        if not _is_different_idea(new, making)
    ]
    return [sentence for sentence in sentences if sentence]  # "" is no warning


def _repeat_in_words(new: Making, row: RunRow, making: Making) -> str:
    """Return a warning that a new run repeats an earlier one; "" if there is nothing to warn about.

    There is a warning if the earlier run failed or did not get better, or if it is done and had
    exactly the same settings, seed included.

    Args:
        new: how the new run is made.
        row, making: the earlier run, which has nearly the same settings, and how it was made.
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
    """Say how an earlier run went wrong, such as "failed (oom)" or "came out no difference".

    Returns "" for any other run, and for a run that failed for a reason outside its settings.
    """
    if row.state == "failed" and row.reason_kind not in _OUTSIDE:
        return f"failed ({row.reason_kind})"
    if row.state == "done" and row.verdict in ("worse", "no_difference"):
        return f"came out {verdict_in_words(row)}"
    return ""


def verdict_in_words(row: RunRow) -> str:
    """Write the verdict of a run, such as "better" or "no difference"; "unknown" if it has none."""
    return (row.verdict or "unknown").replace("_", " ")


def _many_changes_warning(
    home: Home, new: Making, earlier: Sequence[tuple[RunRow, Making]]
) -> list[str]:
    """Return a warning if the new run changes several choices at once; otherwise [].

    A choice is a setting, the model, the environment or the algorithm. With several changes a
    difference in the result could not be attributed to one of them.

    The new run is compared with its parent, or else with the newest of the runs in `earlier`, which
    holds (row, how the run was made), the newest first. There is no warning if there is no such
    run, or if the new run trains on the model that this run made.
    """
    base = _making_to_compare_with(home, new, earlier)
    # `base.config` is None if nothing is known of how that run was made.
    if base is None or not base.config:
        return []
    # A run that trains another one's model on is compared with its start model, not with settings.
    if continues(new, base):
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
    """Return how the run was made with which a new run is compared.

    That run is the parent of the new one, or else the newest of the earlier runs: `earlier` holds
    (row, how the run was made), the newest first. Returns None if there is neither.
    """
    parent = new.config.parent if new.config else ""
    if parent:
        return making_of_run(home, parent)
    if not earlier:
        return None
    _, newest_making = earlier[0]
    return newest_making


def _changed_settings(new: Making, old: Making) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ between two runs: name -> (old value, new value).

    None stands for a setting that a run does not have.
    """
    return {
        name: (old.setting_values.get(name), new.setting_values.get(name))
        for name in changed_names(old, new)  # settings, and choices such as "model"
        if name in new.setting_values or name in old.setting_values
    }


def _is_different_idea(new: Making, old: Making) -> bool:
    """Return whether two runs, made as `new` and `old`, differ in more than small changes of
    numbers.

    They do if the model, the algorithm or the environment differs, or if a setting has two values
    that are not nearly the same number.
    """
    changed_settings = _changed_settings(new, old)
    # If there are more changes than changed settings, then the model, the algorithm or the
    # environment has changed too.
    if len(changed_names(old, new)) > len(changed_settings):
        return True
    return any(
        not _is_near(old_value, new_value) for old_value, new_value in changed_settings.values()
    )


def _difference_in_words(new: Making, old: Making) -> str:
    """List the settings that differ between two runs, made as `new` and `old`, such as `kl_coef
    (0.05 then, 0.052 now)`; "" if none does.

    `_is_different_idea` must be false for the two runs: then all values that differ are numbers.
    """
    return ", ".join(
        f"{name} ({old_value:g} then, {new_value:g} now)"
        for name, (old_value, new_value) in _changed_settings(new, old).items()
    )


def _is_near(old: Any, new: Any) -> bool:
    """Return whether two values of a setting, `old` and `new`, are equal, or positive numbers
    within a factor of 1 + `NEAR`."""
    are_numbers = all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in (old, new)
    )
    if not are_numbers or old <= 0 or new <= 0:
        return old == new
    # The distance between the logarithms is the same whichever of the two numbers is larger.
    return abs(math.log(new / old)) <= math.log1p(NEAR)
