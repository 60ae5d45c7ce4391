"""What a run began with, for detectors: its first exam, and each later one held against it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.core.files import read_lines
from engine.evidence.detect.views import View, mean, view_of
from engine.evidence.stats.results import Row, load_rows, only_half, rounded
from engine.evidence.verdict.verdict import compare_rows, taught_tasks, untaught
from engine.home.run_dir import RunDir

_TASK_BYTES = 2_000_000  # of task rows, enough to know how long answers are


def against_start(run: RunDir, upto: int | None = None, *, planned: int = 0) -> dict[str, Any]:
    """The last exam (of a step up to `upto`) against step 0, task by task on the half that every
    exam asks; {} before there is one. See `fallen`.

    Who looks at every exam and stops at the first that speaks gives how many are `planned`: each is
    a chance to be wrong, the first one as much as the last.
    """
    steps = [step for step in run.eval_steps() if step > 0 and (upto is None or step <= upto)]
    if not steps:
        return {}
    taught = taught_tasks(run)
    before, after = (_asked(untaught(load_rows(run.evals(at)), taught)) for at in (0, steps[-1]))
    looks = max(len(steps), planned)
    return fallen(before, after, steps[-1], looks) if before and after else {}


def fallen(before: Sequence[Row], after: Sequence[Row], step: int, exams: int) -> dict[str, Any]:
    """A comparison's numbers, with the `step` of the later exam, how many `exams` there were to
    look at in all, and `before`, `after` of what is compared and of the reward."""
    found = compare_rows(before, after)
    rewards = [_reward(rows) for rows in (before, after)]
    return found.as_dict() | {
        "step": step,
        "exams": exams,
        "before": rounded(found.outcome.before),
        "after": rounded(found.outcome.after),
        "reward_before": rewards[0],
        "reward_after": rewards[1],
    }


def first_exam(run: RunDir, settings: Mapping[str, Any]) -> View | None:
    """The answers of step 0, None where none were played."""
    rows = [row for row in load_rows(run.evals(0)) if "completion" in row]
    return view_of(0, rows, settings)


def references(run: RunDir) -> dict[str, str]:
    """What the reference answer of a task says at its longest turn, by task; {} without any."""
    config = run.find_config()
    if config is None:
        return {}
    tasks, _ = read_lines(Path(config.env_dir) / "tasks.jsonl", 0, max_bytes=_TASK_BYTES)
    return {str(task.get("id")): said for task in tasks if (said := _reference(task))}


def gold_tokens(run: RunDir) -> float | None:
    """How many tokens nineteen in twenty reference answers take at most, by the characters a token
    holds in this run's own answers; None where there are no references or no answers."""
    said = [row for row in load_rows(run.evals(0)) if row.get("completion") and row.get("tokens")]
    lengths = sorted(map(len, references(run).values())) if said else []
    if not lengths:
        return None
    chars = sum(len(str(row["completion"])) for row in said) / sum(row["tokens"] for row in said)
    return lengths[int(0.95 * (len(lengths) - 1))] / max(chars, 0.1)


def _reference(task: Mapping[str, Any]) -> str:
    turns = task.get("answer")
    if not isinstance(turns, list):
        return ""
    said = [turn for turn in turns if isinstance(turn, Mapping) and turn.get("role") == "assistant"]
    return max(map(_said, said), key=len, default="")


def _said(turn: Mapping[str, Any]) -> str:
    """What a turn says, its tool calls about as templates write them."""
    calls = turn.get("tool_calls") or []
    written = [f"<tool_call>{json.dumps(call.get('function'))}</tool_call>" for call in calls]
    return "\n".join([str(turn.get("content") or ""), *written])


def _asked(rows: Sequence[Row]) -> Sequence[Row]:
    """The half asked every time; all rows of runs whose held-out tasks have no halves."""
    return only_half(rows, "select") if any(row.get("half") for row in rows) else rows


def _reward(rows: Sequence[Row]) -> float | None:
    values = [float(row["reward"]) for row in rows
              if not row.get("error") and isinstance(row.get("reward"), int | float)]  # fmt: skip
    return rounded(mean(values)) if values else None
