"""The ledger: what was tried, why, what came of it, and what should not be tried again.

A run's entry is its note (the hypothesis), its parent, the levers that were moved, the prediction
against the verdict, and what it cost. Before a run is queued the ledger is asked whether nearly the
same was tried and failed, and how many levers move at once.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from engine.core.files import read_json
from engine.evidence.compare.settings_diff import Making, moved_levers
from engine.evidence.verdict.verdict import load_config
from engine.home.rows import RunRow
from engine.home.run_dir import Home
from engine.home.store import Store

NEAR = 0.1  # a number this close to an earlier one is the same idea
LOOK_BACK = 200  # runs
_OUTSIDE = frozenset({"infra", "budget", "killed", "interrupted", "cancelled", "timeout"})
_SHOWN = 4


def cautions(home: Home, store: Store, content: Mapping[str, Any]) -> list[str]:
    """What the ledger has to say before a run with this config.json is queued."""
    new = Making("", content)
    past = [
        (row, Making(row.run_id, load_config(home.run(row.run_id))))
        for row in store.list_runs(LOOK_BACK, kind="train")
        if row.env_id == content.get("env_id") and row.algorithm == content.get("algorithm")
    ]
    alike = [(row, made) for row, made in past if made.start == new.start]
    return [*_again(new, alike)[:1], *_several(home, new, alike)]


def _again(new: Making, past: Sequence[tuple[RunRow, Making]]) -> list[str]:
    """Earlier runs of nearly these settings that failed or came to nothing, newest first."""
    said = []
    for row, made in past:
        if _far(new, made):
            continue
        outcome = _came_to_nothing(row)
        same_seed = new.settings.get("seed") == made.settings.get("seed")
        apart = _near(new, made)
        if outcome:
            close = f" but for {apart}" if apart else ""
            said.append(
                f"nearly the same as {row.run_id}{close}, which {outcome}: read it before "
                "spending this again"
            )
        elif row.state == "done" and same_seed and not apart:
            said.append(
                f"the same as {row.run_id} ({_word(row)}), seed included: it will repeat it"
            )
    return said


def _came_to_nothing(row: RunRow) -> str:
    """How an earlier run failed by its own settings, "" when it did not."""
    if row.state == "failed" and row.reason_kind not in _OUTSIDE:
        return f"failed ({row.reason_kind})"
    if row.state == "done" and row.verdict in ("worse", "no_difference"):
        return f"came out {_word(row)}"
    return ""


def _word(row: RunRow) -> str:
    return (row.verdict or "unknown").replace("_", " ")


def _several(home: Home, new: Making, past: Sequence[tuple[RunRow, Making]]) -> list[str]:
    """Several levers moved at once, against the parent or the newest run of the kind."""
    parent = str(new.config.get("parent") or "")
    if parent:
        before = Making(parent, load_config(home.run(parent)))
    elif past:
        before = past[0][1]
    else:
        return []
    levers = moved_levers(before, new)
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
        for name in moved_levers(other, one)
        if name in one.settings or name in other.settings
    }


def _far(one: Making, other: Making) -> bool:
    if any(name not in {**one.settings, **other.settings} for name in moved_levers(other, one)):
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


def entry(home: Home, row: RunRow) -> dict[str, Any]:
    """One run's line in the ledger: parent, levers moved, prediction and outcome, spend."""
    config = load_config(home.run(row.run_id))
    found: dict[str, Any] = {}
    parent = parent_of(row, config)
    if parent:
        found["parent"] = parent
        changed = _changes(home, row, config, parent)
        found |= {"changed": changed} if changed else {}
    if row.expect:
        found["expected"] = row.expect
        if row.state == "done" and row.verdict in ("better", "worse", "no_difference"):
            found["as_expected"] = row.verdict == row.expect
    if row.spent_hours:
        found["gpu_hours"] = round(row.spent_hours, 4)
        if row.estimated_hours:
            found["estimated_gpu_hours"] = round(row.estimated_hours, 4)
    return found


def parent_of(row: RunRow, config: Mapping[str, Any]) -> str:
    """The run a run was derived from: the one it names, else the one whose model it continues."""
    model = str(config.get("model") or row.model).partition("@")[0]
    if row.parent or "/" in model:
        return row.parent
    return model if (config.get("start_adapter") or "@" in row.model) else ""


def _changes(
    home: Home, row: RunRow, config: Mapping[str, Any], parent: str
) -> dict[str, list[Any]]:
    """Lever -> [the parent's value, ours]."""
    before = Making(parent, load_config(home.run(parent)))
    ours = Making(row.run_id, config)
    if not before.config:
        return {}
    choices = (before.choices(), ours.choices())
    return {
        name: [
            choices[0].get(name, before.settings.get(name)),
            choices[1].get(name, ours.settings.get(name)),
        ]
        for name in moved_levers(before, ours)
    }


def tree(home: Home, rows: Sequence[RunRow]) -> list[str]:
    """Training runs as indented lines, children under the run they were derived from."""
    runs = {row.run_id: row for row in rows if row.kind == "train"}
    entries = {run_id: entry(home, row) for run_id, row in runs.items()}
    children: dict[str, list[str]] = {}
    for run_id in sorted(runs, key=lambda name: runs[name].rowid):
        parent = entries[run_id].get("parent", "")
        children.setdefault(parent if parent in runs else "", []).append(run_id)
    lines: list[str] = []

    def grow(run_id: str, depth: int) -> None:
        lines.append("  " * depth + _line(runs[run_id], entries[run_id]))
        for child in children.get(run_id, []):
            grow(child, depth + 1)

    for root in children.get("", []):
        grow(root, 0)
    return lines


def _line(row: RunRow, found: Mapping[str, Any]) -> str:
    came = _word(row) if row.state == "done" else row.state
    changed = ", ".join(
        f"{name} {_short(before)}→{_short(now)}"
        for name, (before, now) in list(found.get("changed", {}).items())[:_SHOWN]
    )
    text = f"{row.run_id}: {came}"
    if "as_expected" in found:
        text += " as expected" if found["as_expected"] else f", {found['expected']} was expected"
    return text + (f" ({changed})" if changed else "")


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    text = str(value)
    return text if len(text) <= 24 else f"{text[:23]}…"


def best_runs(home: Home, rows: Sequence[RunRow]) -> dict[str, dict[str, Any]]:
    """The best run of each environment version, by the half of the held-out tasks that chooses.

    A run that came out worse, or in which no checkpoint beat its start, is none: its start is the
    better model.
    """
    best: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: row.rowid):
        if row.kind != "train" or row.state != "done" or row.verdict == "worse":
            continue
        try:
            result = read_json(home.run(row.run_id).result)
            score = float(result["best_score"])
            if (result.get("evidence") or {}).get("go_on_with"):
                continue
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        if row.env_id not in best or score > best[row.env_id]["score"]:
            found = {"run_id": row.run_id, "score": round(score, 4), "verdict": row.verdict}
            best[row.env_id] = found | {"step": result.get("best_step")}
    return best
