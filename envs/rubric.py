"""Rubrics: what an answer is judged by, as Python or as a file beside the environment.

A file, `rubric.toml`, may name its judge too (envs/judge.py): `judge = "openai:big"` in its first
line is the model of [endpoints.big] in the home's config.toml, `judge = "model:pebble"` a model of
the home itself; a table says where any other is.

    [judge]
    url = "http://127.0.0.1:8000/v1"
    model = "some-model"
    key = "JUDGE_API_KEY"              # the secret that holds its key
    prompt_price = 0.15                # money per million tokens, for cost and max_judge_cost
    completion_price = 0.60

    [[criteria]]
    id = "short"
    description = "At most twenty words."
    required = true
    check = "short"                    # decided by code: checks={"short": is_short}

    [[criteria]]
    id = "faithful"
    description = "States nothing that the text does not say."
    weight = 2.0
    levels = ["invents facts", "one slip", "all of it is in the text"]   # worst to best
"""

import hashlib
import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from envs.base import Score, Task
from envs.json_types import JsonObject

FILE = "rubric.toml"
Check = Callable[[Task, str], float]
_CRITERION_TYPES: dict[str, type | tuple[type, ...]] = {
    "id": str,
    "description": str,
    "weight": (int, float),
    "required": bool,
    "check": str,
    "levels": list,
}


class JudgeError(Exception):
    """The judge (a language model that grades answers) gave no verdict."""


@dataclass(frozen=True)
class Criterion:
    """One aspect by which a completion is judged.

    Args:
        id: the name of the criterion and of its metric.
        description: what the judge is told; if there is a `check`, it is only for people.
        weight: its share of the reward, above 0.
        required: whether a completion that fails the criterion (value below the rubric's `pass_at`)
            earns nothing.
        check: a function that decides the criterion instead of the judge: (task, completion) -> a
            number from 0 to 1, or a bool.
        levels: the answers from which the judge chooses, worst to best, at least two; their values
            are spread evenly from 0 to 1. With () the judge gives any number from 0 to 1.
    """

    id: str
    description: str
    weight: float = 1.0
    required: bool = False
    check: Check | None = None
    levels: tuple[str, ...] = ()


class Grader(Protocol):
    """The method of a judge that a rubric calls."""

    def grade(self, criteria: Sequence[Criterion], task: Task, completion: str) -> dict[str, float]:
        """Return criterion id -> a value from 0 to 1. Raises JudgeError if there is no verdict."""
        ...


class Rubric:
    """Weighted criteria that a completion is scored by.

    Args:
        criteria: at least one, with different ids.
        pass_at: the value (0 to 1) from which a required criterion is met. If no criterion is
            required, the reward from which the task counts as solved. The default is just below 1
            to allow for rounding.

    Raises ValueError for equal ids, a weight that is not above 0, a single level, or no criteria.
    """

    def __init__(self, *criteria: Criterion, pass_at: float = 0.999) -> None:
        """Check and store the criteria; `pass_at` is the value from which a required one is met.

        Raises ValueError for equal ids, a weight that is not above 0, a single level, or no
        criteria.
        """
        ids = [criterion.id for criterion in criteria]
        if not criteria or len(set(ids)) < len(ids):
            raise ValueError(f"a rubric needs criteria with ids of their own, got {ids}")
        if not all(criterion.weight > 0 for criterion in criteria):  # nan is refused too
            raise ValueError("every criterion needs a weight above 0")
        if any(len(criterion.levels) == 1 for criterion in criteria):
            raise ValueError("levels are at least two, worst to best")
        self.criteria = criteria
        self.pass_at = pass_at

    @staticmethod
    def from_file(path: str | Path, checks: Mapping[str, Check] | None = None) -> "Rubric":
        """Read the rubric in a TOML file; the module's docstring shows the format.

        Args:
            checks: name -> function, for the criteria that name a function in `check`. With None
                those criteria are left out, for callers that only want what the judge decides.

        Raises ValueError, naming the file, if the file is not a valid rubric or names a check that
        is not in `checks`.
        """
        tables = read_rubric_file(path).get("criteria")
        if not isinstance(tables, list) or not tables:
            raise ValueError(f"{path} has no [[criteria]]")
        try:
            criteria = [_criterion_from_table(table, checks) for table in tables]
            used_criteria = [criterion for criterion in criteria if criterion is not None]
            return Rubric(*used_criteria)
        except ValueError as problem:
            raise ValueError(f"{path}: {problem}") from None

    @property
    def for_judge(self) -> list[Criterion]:
        """The criteria that the judge decides, because they have no check."""
        return [criterion for criterion in self.criteria if criterion.check is None]

    @property
    def judged_hash(self) -> str:
        """A hash of the judge's criteria: ids, descriptions, weights and levels, and `pass_at`.

        A calibration of a judge is valid only for the rubric with the same hash.
        """
        judged_fields = [
            [
                criterion.id,
                criterion.description,
                criterion.weight,
                criterion.required,
                list(criterion.levels),
            ]
            for criterion in self.for_judge
        ]
        text = json.dumps([judged_fields, self.pass_at])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def score(self, task: Task, completion: str, judge: Grader | None = None) -> Score:
        """Score an answer by the weighted mean of all criteria, or 0 if a required one fails.

        The judge decides the criteria without a check, and is asked only after every required check
        has passed. If `judge` is None, these criteria are left out. The score has an `error` if the
        judge gives no verdict, or if no criterion is left. Raises ValueError if a check returns a
        value that is not from 0 to 1.
        """
        values = {  # id of the criterion -> its value from 0 to 1; first those with a check
            criterion.id: _checked_value(criterion.check(task, completion))
            for criterion in self.criteria
            if criterion.check
        }
        failed = self._failed_required(self.criteria, values)
        if failed:
            reason = f"required and not met: {', '.join(failed)}"
            parts = self._parts(values)
            return Score(0.0, success=False, metrics=values, reason=reason, parts=parts)
        if self.for_judge and judge is not None:
            try:
                values |= judge.grade(self.for_judge, task, completion)
            except JudgeError as error:
                return Score(reward=0.0, success=False, metrics=values, error=f"judge: {error}")
        return self._final_score(values)

    def _final_score(self, values: dict[str, float]) -> Score:
        """Return the score of an answer; `values` maps ids of the decided criteria to their values.

        If criteria are required, the answer is a success if all of them are met, and otherwise
        earns 0. If none is, it is a success from the reward `pass_at` on. The score has an `error`
        if `values` is empty.
        """
        decided = [criterion for criterion in self.criteria if criterion.id in values]
        if not decided:
            return Score(reward=0.0, success=False, error="the rubric needs a judge and has none")
        total_weight = math.fsum(criterion.weight for criterion in decided)
        weighted_sum = math.fsum(criterion.weight * values[criterion.id] for criterion in decided)
        reward = weighted_sum / total_weight
        has_required = any(criterion.required for criterion in self.criteria)
        parts = self._parts(values)
        if not has_required:
            return Score(reward, success=reward >= self.pass_at, metrics=values, parts=parts)
        failed = self._failed_required(decided, values)
        if failed:
            reason = f"required and not met: {', '.join(failed)}"
            return Score(0.0, success=False, metrics=values, reason=reason, parts=parts)
        return Score(reward, success=True, metrics=values, parts=parts)

    def _parts(self, values: Mapping[str, float]) -> dict[str, tuple[float, float]]:
        """Return what the reward is made of: id -> (weight, value) of each decided criterion.

        `values` maps the ids of the decided criteria to their values.
        """
        return {
            criterion.id: (criterion.weight, values[criterion.id])
            for criterion in self.criteria
            if criterion.id in values
        }

    def _is_met(self, criterion: Criterion, values: Mapping[str, float]) -> bool:
        """Whether a criterion's value (in `values`, by id) reaches `pass_at`. One that is not in
        `values` is undecided and counts as met."""
        return values.get(criterion.id, 1.0) >= self.pass_at

    def _failed_required(
        self, criteria: Sequence[Criterion], values: Mapping[str, float]
    ) -> list[str]:
        """Return the ids of those `criteria` that are required and whose value in `values` (id ->
        value) is below `pass_at`.

        Criteria that are not in `values` are left out: the judge has not decided them yet.
        """
        return [
            criterion.id
            for criterion in criteria
            if criterion.required and not self._is_met(criterion, values)
        ]


def read_rubric_file(path: str | Path) -> JsonObject:
    """Return the tables of a rubric file.

    Raises ValueError, naming the file, if it cannot be read, is not valid TOML, or has a table
    other than `judge` and `criteria`.
    """
    try:
        data = tomllib.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # not there; no UTF-8, no TOML
        raise ValueError(f"{path} cannot be read: {error}") from error
    unknown = [name for name in data if name not in ("judge", "criteria")]
    if unknown:
        raise ValueError(f"{path} has an unknown table {unknown[0]!r}; known: judge, criteria")
    return data


def _criterion_from_table(table: Any, checks: Mapping[str, Check] | None) -> Criterion | None:
    """Return the criterion that one [[criteria]] table describes; None if it has a check and
    `checks` is None.

    Raises ValueError for an unknown key, a missing or wrong value, or a check that is not in
    `checks`.
    """
    _check_criterion_table(table)
    if "check" in table and checks is None:
        return None
    check = None
    if "check" in table:  # the name of a function; the others of the table are plain values
        check = (checks or {}).get(table["check"])
        if check is None:
            raise ValueError(f"the check {table['check']!r} of {table['id']!r} was not given")
    values = {name: value for name, value in table.items() if name not in ("check", "levels")}
    levels = tuple(str(level) for level in table.get("levels", ()))
    return Criterion(**values, check=check, levels=levels)


def _check_criterion_table(table: Any) -> None:
    """Raise ValueError unless `table` is a dict with an id, a description, and only keys of a
    criterion with values of the right types."""
    if not isinstance(table, dict):
        raise ValueError("criteria are tables: [[criteria]]")
    known_names = [field.name for field in fields(Criterion)]
    for name, value in table.items():
        if name not in known_names:
            raise ValueError(f"a criterion has no {name!r}; known: {', '.join(known_names)}")
        is_bool_weight = name == "weight" and isinstance(value, bool)  # a bool is an int in Python
        if not isinstance(value, _CRITERION_TYPES[name]) or is_bool_weight:
            raise ValueError(f"{name} of a criterion cannot be {value!r}")
    missing = [name for name in ("id", "description") if not table.get(name)]
    if missing:
        raise ValueError(f"a criterion needs {missing[0]}, got {table}")


def _checked_value(value: float) -> float:
    """Return the result of a criterion's check as a float. Raises ValueError unless it is from 0 to
    1."""
    number = float(value)
    if not 0.0 <= number <= 1.0:
        raise ValueError(f"a check gives a number from 0 to 1, got {number}")
    return number
