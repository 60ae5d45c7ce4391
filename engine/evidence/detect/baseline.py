"""What a run began with, for detectors: its first held-out evaluation (exam), and later ones
compared with it."""

import json
from collections.abc import Sequence
from pathlib import Path

from engine.core.files import read_lines, read_object
from engine.evidence.detect.views import StartComparison, View, view_of
from engine.evidence.stats.results import VALIDATION, in_half, rounded
from engine.evidence.stats.trends import mean
from engine.evidence.verdict.comparison import compare_rows
from engine.evidence.verdict.contamination import taught_tasks, without_tasks
from engine.evidence.verdict.lineage import sees, started_from, trained_by
from engine.home.run_dir import CHECKPOINT_MANIFEST, Home, RunDir
from engine.records.known_settings import KnownSettings
from engine.records.lines.evaluation_row import EvaluationRow, read_evaluation
from envs.json_types import ChatMessage

_TASK_BYTES = 2_000_000  # read of the task rows; enough to know how long reference answers are


def against_start(
    run: RunDir, last_step: int | None = None, *, planned: int = 0
) -> StartComparison | None:
    """The last evaluation of a run compared with step 0, both read from their files.

    Returns None if nothing was evaluated after step 0, or if nothing can be compared.

    Args:
        last_step: evaluations after this step are ignored; None ignores none.
        planned: how many evaluations the run will have in all, for a caller that tests each as it
            comes; 0 to count only those that exist.
    """
    steps = _evaluated_steps(run, last_step)
    if not steps:
        return None
    rows = read_evaluation(run.evals(steps[-1]))
    return evaluation_against_start(run, steps[-1], rows, planned=planned)


def fall_of_the_start(home: Home, run: RunDir) -> StartComparison | None:
    """The checkpoint that a run began with, compared with step 0 of the run that made the
    checkpoint.

    Returns None if the run began with a base model, if that checkpoint was not evaluated, or if the
    viewer of the home does not see the run that made it.
    """
    start_ref = started_from(run)  # such as "r-1@best"
    parent_id = trained_by(home, start_ref)  # the run that made the checkpoint
    if not parent_id or not sees(home, parent_id):
        return None
    parent = run.home.run(parent_id)
    _, _, checkpoint = start_ref.partition("@")
    step = _step_of_start(run, parent, checkpoint)
    if step is None:
        return None
    return evaluation_against_start(parent, step, read_evaluation(parent.evals(step)))


def _step_of_start(run: RunDir, parent: RunDir, checkpoint: str) -> int | None:
    """The step of the checkpoint of `parent` that a run began with. Returns None if it is not
    known.

    The run's own copy of the checkpoint records the step. If the copy is gone, `checkpoint` (the
    name in the run's reference: "best", "stepN", or "" for the newest) is looked up in `parent`.
    """
    step = read_object(run.start_adapter / CHECKPOINT_MANIFEST).get("step")
    if isinstance(step, int):
        return step
    folder = parent.resolve_checkpoint(checkpoint)
    if folder is None:
        return None
    _, _, digits = folder.name.rpartition("_")  # "000020" of step_000020
    return int(digits) if digits.isdigit() else None


def evaluation_against_start(
    run: RunDir, step: int, rows: Sequence[EvaluationRow], *, planned: int = 0
) -> StartComparison | None:
    """The evaluation of `step` compared with step 0, task by task; `rows` are its answers.

    Only the tasks that every evaluation asks are compared (if the held-out tasks are split, the
    half that chooses the checkpoint). Returns None if one of the two has no rows of them.

    `planned` is how many evaluations the run will have in all, for a caller that tests each as it
    comes; 0 to count only those that exist.
    """
    taught_ids = taught_tasks(run)  # held-out tasks whose answers stand in the training rows
    before = _rows_always_asked(without_tasks(read_evaluation(run.evals(0)), taught_ids))
    after = _rows_always_asked(without_tasks(rows, taught_ids))
    if not before or not after:
        return None
    # Each test is a chance to be wrong, so all that are planned are counted from the first on.
    evaluations = max(len(_evaluated_steps(run, step)), planned)
    return compared_with_start(before, after, step, evaluations)


def _evaluated_steps(run: RunDir, last_step: int | None) -> list[int]:
    """The steps after step 0 that have an evaluation, up to `last_step` (None: all)."""
    steps = [step for step in run.eval_steps() if step > 0]
    if last_step is None:
        return steps
    return [step for step in steps if step <= last_step]


def compared_with_start(
    before: Sequence[EvaluationRow], after: Sequence[EvaluationRow], step: int, evaluations: int
) -> StartComparison:
    """Compare the rows of step 0 (`before`) with those of `step` (`after`).

    `evaluations` is how many evaluations of the run are tested in all, to correct p.
    """
    return StartComparison(
        comparison=compare_rows(before, after),
        step=step,
        evaluations=evaluations,
        reward_before=_mean_reward(before),
        reward_after=_mean_reward(after),
    )


def first_exam(run: RunDir, settings: KnownSettings) -> View | None:
    """The held-out answers of step 0 (the exam) in numbers (a view). Returns None if no answers
    were sampled."""
    # If only the loss was measured, rows have no completion.
    rows = [row for row in read_evaluation(run.evals(0)) if row.completion is not None]
    return view_of(step=0, rows=rows, settings=settings)


def references(run: RunDir) -> dict[str, str]:
    """The longest turn of each task's reference answer as text, by task id.

    Tasks without a reference are left out. Returns {} if the config is missing. Only the first
    `_TASK_BYTES` of the task file are read.
    """
    config = run.find_config()
    if config is None:
        return {}
    tasks, _ = read_lines(Path(config.env_dir) / "tasks.jsonl", 0, max_bytes=_TASK_BYTES)
    answers = {str(task.get("id")): _longest_turn(task.get("answer")) for task in tasks}
    return {task: text for task, text in answers.items() if text}


def gold_tokens(run: RunDir) -> float | None:
    """An estimate of the tokens that 95 % of the reference answers need at most.

    Returns None if there are no references, or if the run has no answers at step 0.
    """
    answers = [row for row in read_evaluation(run.evals(0)) if row.completion and row.tokens]
    if not answers:
        return None
    reference_chars = sorted(len(text) for text in references(run).values())
    if not reference_chars:
        return None
    percentile_95 = int(0.95 * (len(reference_chars) - 1))  # its place among the sorted lengths
    return reference_chars[percentile_95] / _chars_per_token(answers)


def _chars_per_token(answers: Sequence[EvaluationRow]) -> float:
    """The mean number of characters per token in these answers; all have text and tokens."""
    char_count = sum(len(row.completion or "") for row in answers)
    token_count = sum(row.tokens for row in answers)
    # At least 0.1, because degenerate answers may have tokens but hardly any text.
    return max(char_count / token_count, 0.1)


def _longest_turn(answer: Sequence[ChatMessage] | None) -> str:
    """The longest assistant turn of a stored reference answer, as text; "" if there is none."""
    turns = [_turn_text(turn) for turn in answer or () if turn.get("role") == "assistant"]
    return max(turns, key=len, default="")


def _turn_text(message: ChatMessage) -> str:
    """The text of a turn, with a line for each of its tool calls: "<tool_call>{...}</tool_call>",
    as most chat templates write them."""
    lines = [str(message.get("content") or "")]
    for call in message.get("tool_calls") or []:
        lines.append(f"<tool_call>{json.dumps(call.get('function'))}</tool_call>")
    return "\n".join(lines)


def _rows_always_asked(rows: Sequence[EvaluationRow]) -> Sequence[EvaluationRow]:
    """The rows of the tasks that every held-out evaluation of a run asks: the validation half, by
    which the run chooses its checkpoint; all rows if there are no halves."""
    return in_half(rows, VALIDATION) if any(row.half for row in rows) else rows


def _mean_reward(rows: Sequence[EvaluationRow]) -> float | None:
    """The mean reward of the scored rows; None if there are none."""
    rewards = [row.reward for row in rows if not row.error and row.reward is not None]
    return rounded(mean(rewards)) if rewards else None
