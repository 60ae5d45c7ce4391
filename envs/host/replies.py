"""Checks what an env process replies: the environment's description, its tasks, its scores.

User code may have forged any of it.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from envs.base import Task
from envs.config.problem import EnvProblem
from envs.host.loader import MAX_TASKS, check_tools, task_problem
from envs.host.pipe import Fault
from envs.json_types import EnvDescription, ScoreReply, TaskRow

KINDS = ("single", "multi", "sft", "command")
MAX_METRICS = 64  # the most metrics of one score
METRIC_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/@-]{0,63}")  # no room for a sentence
SHOWN_CHARS = 80  # how much of a wrong value a message shows
ERROR_CHARS = 2000  # how much is kept of a score's error, and of its reason


def failed_score(error: str, *, timed_out: bool = False, lost: bool = False) -> ScoreReply:
    """Return the score of a sample that could not be scored: reward 0, and the reason as `error`.

    It has the keys `timed_out` and `lost` (the process ended during the call) only if they are
    True.
    """
    failed: ScoreReply = {"reward": 0.0, "success": False, "metrics": {}, "error": error}
    if timed_out:
        failed["timed_out"] = True
    if lost:
        failed["lost"] = True
    return failed


def failure_of(fault: Fault) -> ScoreReply:
    """Return the failed score of a sample for which a call of the env process failed with `fault`.

    It counts as lost if the process ended during the call for no reason that is known.
    """
    lost = not (fault.alive or fault.timed_out or fault.problem)
    return failed_score(str(fault), timed_out=fault.timed_out, lost=lost)


def score_in_row(row: dict[str, Any]) -> ScoreReply:
    """Return the checked score in one row of a reply with many scores; a row without a valid score
    gives a failed score with the reason."""
    if row.get("error") is not None:
        return failed_score(str(row["error"])[:ERROR_CHARS], timed_out=row.get("timed_out") is True)
    try:
        return checked_score(row.get("value"))
    except Fault as fault:
        return failure_of(fault)


def checked_score(value: Any) -> ScoreReply:
    """Check a score that came over the pipe, which user code may have forged, and return it.

    A score with an `error` becomes a failed score: its reward is dropped. Raises Fault if the value
    is not a valid score; its `alive` is True, because the process is still usable.
    """
    if not isinstance(value, dict):
        raise Fault("score() gave no score", alive=True)
    error = value.get("error")
    if error is not None:
        return failed_score(str(error)[:ERROR_CHARS])
    reward, success = value.get("reward"), value.get("success")
    finite_reward = _as_finite(reward)
    if finite_reward is None:
        raise Fault(f"the reward is {str(reward)[:SHOWN_CHARS]}, not a finite number", alive=True)
    if success is not None and not isinstance(success, bool):
        raise Fault(f"success is {str(success)[:SHOWN_CHARS]}, not true or false", alive=True)
    metrics = _checked_metrics(value.get("metrics"))
    checked: ScoreReply = {
        "reward": finite_reward,
        "success": success,
        "metrics": metrics,
        "error": None,
    }
    reason = str(value.get("reason") or "")[:ERROR_CHARS]
    if reason:
        checked["reason"] = reason
    parts = _checked_parts(value.get("parts"))
    if parts:
        checked["parts"] = parts
    return checked


def _checked_parts(parts: Any) -> dict[str, list[float]]:
    """Check the parts of a score that came over the pipe; return name -> [weight, value], {} if
    there are none.

    Raises Fault (with `alive`: the process is still usable) if they are not a dict of pairs of
    finite numbers, are too many, or have an invalid name.
    """
    if not parts:
        return {}
    if not isinstance(parts, dict) or len(parts) > MAX_METRICS:
        raise Fault(f"parts are at most {MAX_METRICS} named pairs of numbers", alive=True)
    _check_metric_names(parts)
    checked: dict[str, list[float]] = {}
    for name, pair in parts.items():
        numbers = [_as_finite(number) for number in pair] if isinstance(pair, list) else []
        if len(numbers) != 2 or None in numbers:
            raise Fault(f"the part {name!r} is no weight and value, both finite", alive=True)
        checked[name] = [number for number in numbers if number is not None]  # for the type checker
    return checked


def _checked_metrics(metrics: Any) -> dict[str, float]:
    """Check the metrics of a score that came over the pipe and return them as floats.

    Raises Fault (with `alive`: the process is still usable) if they are not a dict, are too many,
    or have an invalid name or number.
    """
    if not isinstance(metrics, dict) or len(metrics) > MAX_METRICS:
        raise Fault(f"metrics are at most {MAX_METRICS} named numbers", alive=True)
    _check_metric_names(metrics)
    checked: dict[str, float] = {}
    for name, value in metrics.items():
        number = _as_finite(value)
        if number is None:
            raise Fault(f"the metric {name!r} is {value}, not a finite number", alive=True)
        checked[name] = number
    return checked


def _check_metric_names(names: Iterable[str]) -> None:
    """Raise Fault (with `alive`: the process is still usable) for the first name that is not
    valid."""
    for name in names:
        if not METRIC_NAME.fullmatch(name):
            message = (
                f"{name[:SHOWN_CHARS]!r} is no name of a metric (64 of letters, digits and _.:/@-)"
            )
            raise Fault(message, alive=True)


def _as_finite(value: Any) -> float | None:
    """Return `value` as a float if it is a finite number; None for anything else, including
    bools."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an int beyond what a float can hold
        return None


def checked_description(received: Mapping[str, Any]) -> EnvDescription:
    """Check the description that an env process sent, which user code may have forged, and return
    it.

    Raises EnvProblem ENV_INVALID if its kind is unknown, if `scored` does not fit the kind, or if
    its tools are not valid.
    """
    kind, scored, tools = received.get("kind"), received.get("scored"), received.get("tools")
    if kind not in KINDS:
        message = (
            f"the env process calls itself {str(kind)[:SHOWN_CHARS]!r}, not {', '.join(KINDS)}"
        )
        raise EnvProblem("ENV_INVALID", message)
    must_be_scored = kind != "sft"
    if scored is not must_be_scored:  # not `!=`, because 1 equals True but is wrong here
        message = (
            f"the env process says scored: {str(scored)[:SHOWN_CHARS]!r}, and calls itself {kind}"
        )
        raise EnvProblem("ENV_INVALID", message)
    check_tools(tools)
    description: EnvDescription = {
        "kind": kind,
        "scored": bool(scored),
        "tools": list(tools or ()),
    }
    if received.get("perturbs") is True:
        description["perturbs"] = True
    if received.get("groups") is True:
        description["groups"] = True
    if received.get("concurrent") is True:
        description["concurrent"] = True
    return description


def checked_rows(rows: list[Any], needs_answer: bool) -> list[TaskRow]:
    """Check the task rows that tasks() sent over the pipe, which user code may have forged.

    Returns the rows as `Task.to_row` writes them, without unknown keys. `needs_answer`: whether
    every task must have an answer (an SFT dataset). Raises EnvProblem ENV_INVALID for the first row
    that is not a valid task, or for too few or too many rows.
    """
    if not 1 <= len(rows) <= MAX_TASKS:
        message = f"tasks() sent {len(rows)} tasks; send 1 to {MAX_TASKS}"
        raise EnvProblem("ENV_INVALID", message)
    checked: list[TaskRow] = []
    index_of_id: dict[str, int] = {}
    for index, row in enumerate(rows):
        task = task_of_row(row, index)
        problem = task_problem(task, index, index_of_id, needs_answer)
        if problem is not None:
            message, hint = problem
            raise EnvProblem("ENV_INVALID", message, hint)
        index_of_id[task.id] = index
        checked.append(task.to_row())
    return checked


def task_of_row(row: Any, index: int, source: str = "tasks()") -> Task:
    """Make a task from a row.

    Raises EnvProblem ENV_INVALID if the row is not a valid task; the message names the row, e.g.
    "tasks()[3]" for `source` "tasks()" and `index` 3.
    """
    try:
        return Task.from_row(row)
    # Reading a row of another form may raise any of these.
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise EnvProblem("ENV_INVALID", f"{source}[{index}] is no task: {error}") from error
