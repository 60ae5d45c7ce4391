"""Results by a key of the tasks' metadata: how each model does on each kind of task."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.core.errors import UserError
from engine.core.format import counted
from engine.core.hints import Call
from engine.core.reply import Reply
from engine.evidence.compare.candidates import Candidate
from engine.evidence.stats.results import Level, Measure, level, load_rows, measure_of, show
from engine.evidence.verdict.comparison import Comparison, compare_rows
from engine.home.run_dir import Home
from engine.records.lines.evaluation_row import EvaluationRow
from envs.json_types import TaskRow

NO_VALUE = "(none)"  # the value of tasks that lack the key
FEW_TASKS = 20  # with fewer tasks of a value, an interval is wider than most differences
_MOST_VALUES = 24  # most values that a result shows
_SENTENCE_VALUES = 6  # most values that the summary names
_SHOWN_KEYS = 20  # most keys of the metadata that the hint of an error names
_VALUE_CHARS = 60  # most characters of a value
_GIVE_METADATA = (
    'Give tasks some: Task(..., metadata={"kind": "sum"}), or a key "metadata" in a data row; push '
    "and evaluate again."
)
_GROUP = "group"  # this key also means the task's own group, which stands outside its metadata


@dataclass(frozen=True)
class Slice:
    """The tasks whose metadata have the same value under the key, and how the models did on them.

    Attributes:
        value: that value as text.
        tasks: how many tasks have it.
        levels: label of a model -> its level (mean) on these tasks; None if nothing was scored.
        change: the shown candidate compared with the first; None if that is the first itself.
    """

    value: str
    tasks: int
    levels: Mapping[str, Level | None]
    change: Comparison | None

    @property
    def is_small(self) -> bool:
        """Whether there are too few tasks for an interval that tells much."""
        return self.tasks < FEW_TASKS

    def to_json(self) -> dict[str, object]:
        """The slice as a JSON object: value and interval of each model, by its label.

        The change (difference, interval and p value) is included only if it was tested.
        """
        models = {
            label: {"value": result.rounded_value, "interval": result.interval, "n": result.tasks}
            for label, result in self.levels.items()
            if result is not None
        }
        body: dict[str, object] = {"value": self.value, "tasks": self.tasks, "models": models}
        if self.change is not None:
            body |= {
                "difference": self.change.difference,
                "interval": self.change.interval,
                "p": self.change.p,
            }
        return body


@dataclass(frozen=True)
class ByMetadata:
    """The results of the candidates by the values of one key of the tasks' metadata.

    Attributes:
        slices: one for each value, in the order in which they are shown (`by_metadata`).
        shown: label of the model that the sentence is about.
    """

    key: str
    measure: Measure | None
    slices: Sequence[Slice]
    shown: str

    def sentence(self, measure_name: str) -> str:
        """The level of the shown model for the first values as a sentence, such as "By operation
        (arith-grpo-1, success): plus 93.0 % (88.1 to 96.2 %), minus 41.0 % (31.9 to 50.8 %)."."""
        parts = [
            f"{piece.value} {_level_text(piece.levels.get(self.shown))}"
            for piece in self.slices[:_SENTENCE_VALUES]
        ]
        unshown_count = len(self.slices) - len(parts)
        ending = f", and {counted(unshown_count, 'more value')}" if unshown_count > 0 else ""
        return f"By {self.key} ({self.shown}, {measure_name}): {', '.join(parts)}{ending}."

    @property
    def warnings(self) -> list[str]:
        """The warning that some values have too few tasks, as a list of one. Returns [] if none
        has."""
        small_slices = [piece for piece in self.slices if piece.is_small]
        if not small_slices:
            return []
        names = ", ".join(
            f"{piece.value} ({piece.tasks})" for piece in small_slices[:_SENTENCE_VALUES]
        )
        return [
            f"Fewer than {FEW_TASKS} tasks have {names} under {self.key}: their intervals are "
            "too wide to tell much."
        ]

    def to_json(self) -> dict[str, object]:
        """The key ("group_by") and the first `_MOST_VALUES` slices ("by") as a JSON object."""
        return {
            "group_by": self.key,
            "by": [piece.to_json() for piece in self.slices[:_MOST_VALUES]],
        }


def by_metadata(
    home: Home, candidates: Sequence[Candidate], key: str, measure: Measure | None, shown: str
) -> ByMetadata:
    """The results of the candidates by the values that their tasks' metadata have under `key`.

    Args:
        candidates: with rows of one environment version; the first is the one compared with.
        measure: what is measured; None if the candidates have no measure in common.
        shown: label of the candidate whose change against the first is tested.

    Returns one slice per value: in rising order if all values are numbers and few enough for a
    sentence, else those with the most tasks first. Raises UserError BAD_ARGUMENT if no task has the
    key; its hint names the keys that exist.
    """
    value_of_task = _values_of_tasks(home, candidates[0].env_id, key)
    answered_tasks = {row.task for candidate in candidates for row in candidate.rows}
    tasks_of_value: dict[str, set[str]] = {}
    for task in sorted(answered_tasks):
        value = value_of_task.get(task, NO_VALUE)
        tasks_of_value.setdefault(value, set()).add(task)
    values = _ordered_for_display(tasks_of_value)
    slices = [
        _slice_of_value(value, tasks_of_value[value], candidates, measure, shown)
        for value in values
    ]
    return ByMetadata(key, measure, slices, shown)


def _ordered_for_display(tasks_of_value: Mapping[str, set[str]]) -> list[str]:
    """The values of a key in the order in which they are shown: rising if all are numbers and few
    enough for a sentence, else those with the most tasks first."""

    def most_tasks_first(value: str) -> tuple[int, str]:
        """The sort key: the number of tasks, negated, then the value."""
        return -len(tasks_of_value[value]), value

    values = sorted(tasks_of_value, key=most_tasks_first)
    if len(values) <= _SENTENCE_VALUES and all(_is_number(value) for value in values):
        values.sort(key=float)
    return values


def _is_number(text: str) -> bool:
    """Whether a value of metadata is a finite number, such as "3" or "0.5"."""
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def of_one_model(
    home: Home, model: Candidate, key: str, metric: str, warnings: Sequence[str]
) -> Reply:
    """The reply of `compare_runs` about a single model: its level, over all tasks and by the values
    of the tasks' metadata. There is nothing to compare the model with.

    Args:
        key: the key of the metadata.
        metric: the named metric by which its rows are judged; "" for their own measure.
        warnings: earlier warnings; they come first in the reply.

    Raises UserError BAD_ARGUMENT if no task has the key.
    """
    measure = measure_of(model.rows)  # None if nothing was scored
    by_value = by_metadata(home, [model], key, measure, shown=model.label)
    measure_name = metric or str(measure)
    model_entry: Reply = {"id": model.label, "evaluated_in": model.source}
    if measure:
        model_entry |= level(model.rows, measure).to_json()
    return {
        "summary": by_value.sentence(measure_name),
        "verdict": "unknown",
        "metric": measure_name,
        "env_id": model.env_id,
        **by_value.to_json(),
        "arms": [model_entry],
        "warnings": [*warnings, *by_value.warnings],
        "next": [Call("read_rollouts", {"run_id": model.source}).to_json()],
    }


def _slice_of_value(
    value: str,
    tasks: set[str],
    candidates: Sequence[Candidate],
    measure: Measure | None,
    shown: str,
) -> Slice:
    """The results of the candidates on `tasks` (ids), which all have `value` under the key.

    `shown` is the label of the candidate whose change against the first is tested.
    """
    rows_of_model: dict[str, list[EvaluationRow]] = {}
    for candidate in candidates:
        rows_of_model[candidate.label] = [row for row in candidate.rows if row.task in tasks]
    first = candidates[0].label
    is_first = shown == first
    change = None if is_first else compare_rows(rows_of_model[first], rows_of_model[shown])
    return Slice(
        value=value,
        tasks=len(tasks),
        levels={label: _level_or_none(rows, measure) for label, rows in rows_of_model.items()},
        change=change,
    )


def _level_or_none(rows: Sequence[EvaluationRow], measure: Measure | None) -> Level | None:
    """The level (mean with interval) of rows. Returns None without a measure or without a scored
    row."""
    if measure is None:
        return None
    result = level(rows, measure)
    return None if result.value is None else result


def _values_of_tasks(home: Home, env_id: str, key: str) -> dict[str, str]:
    """The value of each task's metadata under `key` as text, by task id. Tasks without it are left
    out.

    Raises UserError BAD_ARGUMENT if no task has the key; its hint names the keys that exist.
    """
    name, _, hash12 = env_id.partition("@")
    tasks = load_rows(home.env(name, hash12) / "tasks.jsonl")
    value_of_task = {row["id"]: _value(row, key) for row in tasks}
    known_values = {task: value for task, value in value_of_task.items() if value is not None}
    if known_values:
        return known_values
    keys: set[str] = set()
    for row in tasks:
        keys |= set(row.get("metadata") or {})
    known_keys = ", ".join(sorted(keys)[:_SHOWN_KEYS])
    raise UserError(
        "BAD_ARGUMENT",
        f"no task of {env_id} has {key[:60]!r} in its metadata",
        hint=f"Known: {known_keys}." if keys else _GIVE_METADATA,
        field="group_by",
    )


def _value(row: TaskRow, key: str) -> str | None:
    """The value under `key` in the metadata of a task, as text of at most `_VALUE_CHARS`
    characters. Returns None if there is none. The key "group" is also looked up outside the
    metadata, where a task may have it instead."""
    metadata = row.get("metadata") or {}
    value_outside_metadata = row.get(_GROUP) if key == _GROUP else None
    value = metadata.get(key, value_outside_metadata)
    if value is None or value == "":
        return None
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text[:_VALUE_CHARS]


def _level_text(result: Level | None) -> str:
    """A level with its interval as text, such as "93.0 % (88.1 to 96.2 %)"; "not scored" for
    None."""
    if result is None:
        return "not scored"
    value = show(result.value, result.measure)
    low, high = show(result.low, result.measure), show(result.high, result.measure)
    return f"{value} ({low.removesuffix(' %')} to {high})"  # the unit stands behind `high`
