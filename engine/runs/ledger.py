"""The ledger: a list of what was tried, why, and with which result.

A run's entry has its note (the hypothesis), its parent, the settings that were changed, whether the
prediction was right, and the hours that were spent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.core.files import read_json, read_object
from engine.core.reply import Reply
from engine.evidence.compare.settings_diff import changed_names, making_of_run, making_of_seen
from engine.evidence.reported import number_to_report
from engine.evidence.stats.basics.target import target_in
from engine.evidence.verdict.side_notes import audit_risk
from engine.home.rows import RunRow
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.records.record import DamagedRecord
from engine.records.run_config import RunConfig, TrainConfig
from engine.runs.submit.cautions import verdict_in_words

_MAX_CHANGES = 4  # changed settings on a line of the tree
_VALUE_CHARS = 24  # the most characters of a value on such a line
_NO_PARENT = ""  # no run has this id


def entry(home: Home, row: RunRow) -> Reply:
    """Make the entry of one run in the ledger (the list of what was tried and what came of it).

    Fields that are unknown or empty are left out.

    The fields are `parent` and `changed` (see `_parent_fields`); `expected`, the predicted verdict
    or the target; `as_expected`, whether the prediction was right; `gpu_hours`, the hours spent;
    and `estimated_gpu_hours`.
    """
    fields = _parent_fields(home, row)
    if row.expect:
        fields["expected"] = row.expect
        as_expected = _met_expectation(home, row)
        if as_expected is not None:
            fields["as_expected"] = as_expected
    if row.spent_hours:
        fields["gpu_hours"] = round(row.spent_hours, 4)
        if row.estimated_hours:
            fields["estimated_gpu_hours"] = round(row.estimated_hours, 4)
    return fields


def _met_expectation(home: Home, row: RunRow) -> bool | None:
    """Return whether a run got the verdict that was predicted, or reached its target.

    Returns None if the run is not done, or if its result does not decide the question.
    """
    if row.state != "done":
        return None
    # A target such as "90 %": the run's result says whether the model's score reaches it.
    if target_in(row.expect) is not None:
        evidence = read_object(home.run(row.run_id).result).get("evidence") or {}
        return evidence.get("as_expected")
    if row.verdict not in ("better", "worse", "no_difference"):
        return None
    return row.verdict == row.expect


def _parent_fields(home: Home, row: RunRow) -> Reply:
    """Return the fields `parent` and `changed` of a ledger entry, without empty ones.

    `parent` is the id of the run from which this one was derived. `changed` lists the differences:
    setting or choice -> [the parent's value, this run's value], with the seed last.
    """
    parent = parent_of(row, home.run(row.run_id).find_config())
    if not parent:
        return {}
    changed = _changes(home, row, parent)
    return {"parent": parent, "changed": changed} if changed else {"parent": parent}


def parent_of(row: RunRow, config: RunConfig | None) -> str:
    """Return the id of a run's parent; "" if the run has none and started from a base model.

    The parent is the run that was named at submit, or else the run whose model this run continues.
    `config` is the run's config. It is None if the file is damaged or gone; then only the row is
    used.
    """
    if row.parent:
        return row.parent
    train_config = config if isinstance(config, TrainConfig) else None
    model_ref = train_config.model if train_config else row.model
    # e.g. "sums-grpo-3@best" -> "sums-grpo-3", the name of a run; or the name of a base model
    name = model_ref.partition("@")[0]
    if "/" in name:  # only base models have a slash in their name
        return ""
    # A model that has an adapter, or a checkpoint after an "@", was made by a run.
    starts_from_adapter = train_config is not None and bool(train_config.start_adapter)
    was_made_by_run = starts_from_adapter or "@" in row.model
    return name if was_made_by_run else ""


def _changes(home: Home, row: RunRow, parent: str) -> dict[str, list[Any]]:
    """Compare how a run and its parent were made: their start models, algorithms and settings.

    Returns name of a setting or choice -> [the parent's value, this run's value]. Returns {} if the
    parent's config is gone or damaged.
    """
    # The making of a run: its start model, environment, algorithm and settings.
    parent_making = making_of_run(home, parent)
    run_making = making_of_seen(home, row.run_id)
    if not parent_making.config:
        return {}
    parent_choices, run_choices = parent_making.choices(), run_making.choices()
    names = changed_names(parent_making, run_making)
    if parent_making.seed != run_making.seed:
        names = [*names, "seed"]
    # A name is one of the choices (model, algorithm, env_id), or else a setting.
    return {
        name: [
            parent_choices.get(name, parent_making.setting_values.get(name)),
            run_choices.get(name, run_making.setting_values.get(name)),
        ]
        for name in names
    }


def tree(home: Home, rows: Sequence[RunRow]) -> list[str]:
    """Write the training runs among `rows` as an indented tree, one line of text per run.

    Each run is written below its parent (the run from which it was derived) and is indented by two
    more spaces. The children of one parent are sorted by age, the oldest first. A run whose parent
    is not among `rows` is not indented.
    """
    runs = {row.run_id: row for row in rows if row.kind == "train"}
    entries = {run_id: entry(home, row) for run_id, row in runs.items()}
    oldest_first = sorted(runs, key=lambda run_id: runs[run_id].rowid)
    children = _children_by_parent(oldest_first, entries)
    lines: list[str] = []

    def add_lines(run_id: str, depth: int) -> None:
        """Add the line of a run, then the lines of the runs below it."""
        lines.append("  " * depth + _tree_line(runs[run_id], entries[run_id]))
        for child in children.get(run_id, []):
            add_lines(child, depth + 1)

    for root in children.get(_NO_PARENT, []):
        add_lines(root, depth=0)
    return lines


def _children_by_parent(
    run_ids: Sequence[str], entries: Mapping[str, Mapping[str, Any]]
) -> dict[str, list[str]]:
    """Group runs by their parents: id of the parent -> ids of its children.

    A run whose parent is not among `run_ids` is listed under `_NO_PARENT`. The children keep the
    order of `run_ids`. `entries` maps each run id to the run's ledger entry.
    """
    children: dict[str, list[str]] = {}
    for run_id in run_ids:
        parent = entries[run_id].get("parent", "")
        if parent not in entries:
            parent = _NO_PARENT
        children.setdefault(parent, []).append(run_id)
    return children


def _tree_line(row: RunRow, entry: Mapping[str, Any]) -> str:
    """Write the line of a run in the tree: its id, its result, and what changed from its parent.

    For example `sums-grpo-3: no difference, better was expected (lora_rank 16→32)`. At most
    `_MAX_CHANGES` changes are named. `entry` is the run's entry in the ledger.
    """
    result = verdict_in_words(row) if row.state == "done" else row.state
    text = f"{row.run_id}: {result}"
    if "as_expected" in entry:
        text += " as expected" if entry["as_expected"] else f", {entry['expected']} was expected"
    changes = [
        f"{name} {_short_value(parent_value)}→{_short_value(value)}"
        for name, (parent_value, value) in entry.get("changed", {}).items()
    ]
    if len(changes) > _MAX_CHANGES:  # the last one is kept, because it is the seed if that differs
        changes = [*changes[: _MAX_CHANGES - 1], changes[-1]]
    if changes:
        text += f" ({', '.join(changes)})"
    return text


def _short_value(value: Any) -> str:
    """Write a value of a setting in at most `_VALUE_CHARS` characters; a longer text is cut and
    ends with "…"."""
    if isinstance(value, float):
        return f"{value:g}"
    text = str(value)
    return text if len(text) <= _VALUE_CHARS else f"{text[: _VALUE_CHARS - 1]}…"


@dataclass(frozen=True)
class _BestScore:
    """The best score of a run on the held-out tasks, and the step at which it was reached.

    `step` is None if the result does not name it.
    """

    score: float
    step: int | None


def best_runs(home: Home, store: Store, rows: Sequence[RunRow]) -> dict[str, Reply]:
    """Find the best finished training run of each environment version that has one.

    Returns env_id -> {"run_id", "verdict", "step", "curve", "score", "interval", "tasks",
    "measured_in"}.

    The best run is the one with the highest `curve`: the score on the held-out tasks by which a run
    chooses its best checkpoint. Runs whose verdict is "worse" do not count, nor do runs in which no
    checkpoint beat the start model.

    `score`, `interval`, `tasks` and `measured_in` are the number to report
    (engine/evidence/reported.py); they are left out if the run has no such number. `audit` is added
    if the reward audit of the environment failed.
    """
    return {
        env_id: {
            "run_id": row.run_id,
            "verdict": row.verdict,
            "step": result.step,
            "curve": result.score,
            **_reported_fields(home, store, row),
        }
        for env_id, (row, result) in _best_by_env(home, rows).items()
    }


def _best_by_env(home: Home, rows: Sequence[RunRow]) -> dict[str, tuple[RunRow, _BestScore]]:
    """Find the best run of each environment version: env_id -> (the run's row, its best score)."""
    best: dict[str, tuple[RunRow, _BestScore]] = {}
    for row in sorted(rows, key=lambda row: row.rowid):  # the oldest first
        if row.kind != "train" or row.state != "done" or row.verdict == "worse":
            continue
        result = _best_of_run(home, row)
        if result is None:
            continue
        _, best_so_far = best.get(row.env_id, (None, None))
        # `>` and not `>=`: of two runs with the same rounded score the older one counts.
        if best_so_far is None or result.score > best_so_far.score:
            best[row.env_id] = (row, result)
    return best


def _reported_fields(home: Home, store: Store, row: RunRow) -> Reply:
    """Return the number to report of a run's result as fields of an entry of `best_runs`.

    The fields are `score`, `interval`, `tasks`, `measured_in`, and `audit` if the reward audit of
    the environment failed. If the run has no number to report, only `audit` can be present.
    """
    try:
        number = number_to_report(home, store, row)
    except (DamagedRecord, OSError):  # a file of the run is damaged or gone
        number = None
    if number is None:
        risk = audit_risk(home.run(row.run_id).find_config())
        return {"audit": risk} if risk else {}
    return {
        "score": number.level.rounded_value,
        "interval": number.level.interval,
        "tasks": number.level.tasks,
        "measured_in": number.measured_in,
        **({"audit": number.audit} if number.audit else {}),
    }


def _best_of_run(home: Home, row: RunRow) -> _BestScore | None:
    """Read the best score of a finished run from its result.json.

    Returns None if the score is not known, or if no checkpoint beat the start model.
    """
    try:
        result = read_json(home.run(row.run_id).result)
        score = float(result["best_score"])
        # `go_on_with` names the start model if the run did not beat it; otherwise it is missing.
        advises_start_model = bool((result.get("evidence") or {}).get("go_on_with"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # the result is missing, damaged or has no score
    return None if advises_start_model else _BestScore(round(score, 4), result.get("best_step"))
