"""What a run began with, for detectors: its first exam, and each later one held against it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.core.files import read_lines
from engine.evidence.detect.views import StartComparison, View, mean, view_of
from engine.evidence.stats.results import VALIDATION, in_half, rounded
from engine.evidence.verdict.comparison import compare_rows
from engine.evidence.verdict.contamination import taught_tasks, without_tasks
from engine.home.run_dir import RunDir
from engine.records.lines.evaluation_row import EvaluationRow, read_evaluation
from envs.json_types import ChatMessage

_TASK_BYTES = 2_000_000  # of task rows, enough to know how long answers are


def against_start(
    run: RunDir, upto: int | None = None, *, planned: int = 0
) -> StartComparison | None:
    """The last evaluation (of a step up to `upto`) against step 0, read from their files; None
    before there is one. `planned` as in `evaluation_against_start`."""
    steps = _evaluated(run, upto)
    if not steps:
        return None
    rows = read_evaluation(run.evals(steps[-1]))
    return evaluation_against_start(run, steps[-1], rows, planned=planned)


def evaluation_against_start(
    run: RunDir, step: int, rows: Sequence[EvaluationRow], *, planned: int = 0
) -> StartComparison | None:
    """The evaluation of `step` against step 0, task by task on the half that every evaluation
    asks; None where either has no such rows.

    Args:
        rows: of the evaluation of `step`.
        planned: how many evaluations the run will have, for who looks at each and stops at the
            first that speaks: each is a chance to be wrong, the first one as much as the last.
    """
    taught = taught_tasks(run)
    before, after = (
        _asked_every_time(without_tasks(each, taught))
        for each in (read_evaluation(run.evals(0)), rows)
    )
    if not before or not after:
        return None
    return compared_with_start(before, after, step, max(len(_evaluated(run, step)), planned))


def _evaluated(run: RunDir, upto: int | None) -> list[int]:
    """The steps after step 0 with an evaluation, `upto` the last of interest."""
    return [step for step in run.eval_steps() if step > 0 and (upto is None or step <= upto)]


def compared_with_start(
    before: Sequence[EvaluationRow], after: Sequence[EvaluationRow], step: int, evaluations: int
) -> StartComparison:
    """The rows of step 0 against those of `step`, one of so many `evaluations` to look at."""
    return StartComparison(
        comparison=compare_rows(before, after),
        step=step,
        evaluations=evaluations,
        reward_before=_mean_reward(before),
        reward_after=_mean_reward(after),
    )


def first_exam(run: RunDir, settings: Mapping[str, Any]) -> View | None:
    """The answers of step 0, None where none were asked."""
    rows = [row for row in read_evaluation(run.evals(0)) if row.completion is not None]
    return view_of(0, rows, settings)


def references(run: RunDir) -> dict[str, str]:
    """What the reference answer of a task says at its longest turn, by task; {} without any."""
    config = run.find_config()
    if config is None:
        return {}
    tasks, _ = read_lines(Path(config.env_dir) / "tasks.jsonl", 0, max_bytes=_TASK_BYTES)
    answers = {str(task.get("id")): _longest_turn(task.get("answer")) for task in tasks}
    return {task: text for task, text in answers.items() if text}


def gold_tokens(run: RunDir) -> float | None:
    """How many tokens nineteen in twenty reference answers take at most, by the characters a token
    holds in this run's own answers; None where there are no references or no answers."""
    answers = [row for row in read_evaluation(run.evals(0)) if row.completion and row.tokens]
    lengths = sorted(map(len, references(run).values())) if answers else []
    if not lengths:
        return None
    chars = sum(len(row.completion or "") for row in answers) / sum(row.tokens for row in answers)
    return lengths[int(0.95 * (len(lengths) - 1))] / max(chars, 0.1)


def _longest_turn(answer: Sequence[ChatMessage] | None) -> str:
    """The longest of the assistant's turns in a stored reference answer, "" without one."""
    turns = [turn for turn in answer or () if turn.get("role") == "assistant"]
    return max(map(_turn_text, turns), key=len, default="")


def _turn_text(turn: ChatMessage) -> str:
    """The text of a turn, its tool calls about as templates write them."""
    calls = turn.get("tool_calls") or []
    written = [f"<tool_call>{json.dumps(call.get('function'))}</tool_call>" for call in calls]
    return "\n".join([str(turn.get("content") or ""), *written])


def _asked_every_time(rows: Sequence[EvaluationRow]) -> Sequence[EvaluationRow]:
    """The validation half; all rows of runs whose held-out tasks have no halves."""
    return in_half(rows, VALIDATION) if any(row.half for row in rows) else rows


def _mean_reward(rows: Sequence[EvaluationRow]) -> float | None:
    rewards = [row.reward for row in rows if not row.error and row.reward is not None]
    return rounded(mean(rewards)) if rewards else None
