"""The ledger: what was tried, why, and what came of it.

A run's entry is its note (the hypothesis), its parent, the settings that were changed, the
prediction against the verdict, and what it cost.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from engine.core.files import read_json
from engine.core.reply import Reply
from engine.evidence.compare.settings_diff import changed_choices, making_of_run
from engine.home.rows import RunRow
from engine.home.run_dir import Home
from engine.records.run_config import RunConfig, TrainConfig
from engine.runs.submit.cautions import verdict_in_words

_SHOWN = 4  # changed settings on a line of the tree


def entry(home: Home, row: RunRow) -> Reply:
    """One run's line in the ledger: parent, levers moved, prediction and outcome, spend."""
    config = home.run(row.run_id).find_config()
    columns: Reply = {}
    parent = parent_of(row, config)
    if parent:
        columns["parent"] = parent
        changed = _changes(home, row, parent)
        columns |= {"changed": changed} if changed else {}
    if row.expect:
        columns["expected"] = row.expect
        if row.state == "done" and row.verdict in ("better", "worse", "no_difference"):
            columns["as_expected"] = row.verdict == row.expect
    if row.spent_hours:
        columns["gpu_hours"] = round(row.spent_hours, 4)
        if row.estimated_hours:
            columns["estimated_gpu_hours"] = round(row.estimated_hours, 4)
    return columns


def parent_of(row: RunRow, config: RunConfig | None) -> str:
    """The run a run was derived from: the one it names, else the one whose model it continues."""
    trained = config if isinstance(config, TrainConfig) else None
    model = (trained.model if trained else row.model).partition("@")[0]
    if row.parent or "/" in model:
        return row.parent
    return model if ((trained and trained.start_adapter) or "@" in row.model) else ""


def _changes(home: Home, row: RunRow, parent: str) -> dict[str, list[Any]]:
    """Lever -> [the parent's value, ours]."""
    before, ours = making_of_run(home, parent), making_of_run(home, row.run_id)
    if not before.config:
        return {}
    choices = (before.choices(), ours.choices())
    return {
        name: [
            choices[0].get(name, before.settings.get(name)),
            choices[1].get(name, ours.settings.get(name)),
        ]
        for name in changed_choices(before, ours)
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


def _line(row: RunRow, entry: Mapping[str, Any]) -> str:
    came = verdict_in_words(row) if row.state == "done" else row.state
    changed = ", ".join(
        f"{name} {_short(before)}→{_short(now)}"
        for name, (before, now) in list(entry.get("changed", {}).items())[:_SHOWN]
    )
    text = f"{row.run_id}: {came}"
    if "as_expected" in entry:
        text += " as expected" if entry["as_expected"] else f", {entry['expected']} was expected"
    return text + (f" ({changed})" if changed else "")


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    text = str(value)
    return text if len(text) <= 24 else f"{text[:23]}…"


def best_runs(home: Home, rows: Sequence[RunRow]) -> dict[str, Reply]:
    """The best run of each environment version, by the half of the held-out tasks that chooses.

    A run that came out worse, or in which no checkpoint beat its start, is none: its start is the
    better model.
    """
    best: dict[str, Reply] = {}
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
            entry = {"run_id": row.run_id, "score": round(score, 4), "verdict": row.verdict}
            best[row.env_id] = entry | {"step": result.get("best_step")}
    return best
