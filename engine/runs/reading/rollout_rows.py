"""Reads, filters and orders the rows of a run for a page of rollouts."""

import ast
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from engine.core.errors import UserError
from engine.core.filters import Where
from engine.core.hints import Call, Hint
from engine.home.halves import choosing
from engine.home.run_dir import RunDir
from engine.records.lines.answer import FORMER_STOP_REASONS
from engine.records.lines.evaluation_row import EvaluationRow
from engine.records.lines.line_record import RecordsRead, skipped_lines
from engine.records.lines.trajectory_record import TrajectoryRecord
from engine.runs.reading.rollout_pages import Reading, mark_of
from engine.runs.reading.transcripts import length_in_tokens

Row = TrajectoryRecord | EvaluationRow
AnyRow = TypeVar("AnyRow", bound=Row)

_ALL_BYTES = 48_000_000  # the most bytes of rollout files that are read if a filter needs all steps
_KEPT = "kept"  # the value of `half` in answers that test what a model could do before
_REPORT = "report"  # the value of `half` in held-out answers that are reported and choose nothing
_NEAREST = 5  # steps that an error message names
FILTER_NAMES = (
    "step",
    "task",
    "group",
    "member",
    "reward",
    "success",
    "advantage",
    "length",
    "stop_reason",
    "invalid_calls",
    "error",
    "turns",
    "attempt",
    "half",
    "battery",
    "family",
    "model",
    "metrics",
)


@dataclass(frozen=True)
class Source:
    """The rows that a page chooses from.

    Attributes:
        description: names the rows, such as "rollouts of step 3".
        step: their training step, or in an evaluation the index of the (last) model.
        skipped: number of damaged lines that could not be read.
        all_steps: whether the rows are those of all steps, or models, up to `step`.
        unread_steps: number of older steps that were not read.
        trained: whether the rows were trained on. In training a failed score is left out of the
            mean, in an evaluation it counts as 0.
    """

    rows: Sequence[Row]
    description: str
    step: int
    skipped: int = 0
    all_steps: bool = False
    unread_steps: int = 0
    trained: bool = False

    @property
    def mark(self) -> str:
        """The step or steps that were read, as a cursor stores them: "40" or "all40"."""
        return mark_of(self.step, all_steps=self.all_steps)

    @property
    def warnings(self) -> list[str]:
        """Warnings about lines that could not be read and steps that were not read."""
        warnings = skipped_lines(self.skipped)
        if self.unread_steps:
            warnings.append(
                f"The oldest {self.unread_steps} steps were not read; name one with step=... to "
                "see it."
            )
        return warnings


def source_of(reading: Reading) -> Source:
    """Read the rows that the query chooses from: the rollouts of all steps if the query names no
    step but its filter uses `step`, else the rows of one step.

    Raises UserError NO_EVALUATION if there are no rows yet, BAD_ARGUMENT if the step has no rows.
    """
    start = reading.start  # where the page begins: from the cursor, else from the query
    names_no_step = start.step == -1
    wants_all_steps = start.all_steps or (names_no_step and _filters_by_step(reading.query.where))
    if wants_all_steps and reading.run.rollout_steps():
        return _rollouts_of_all_steps(reading)
    return _rows_of_one_step(reading)


def _rows_of_one_step(reading: Reading) -> Source:
    """Read the rows of one step.

    - A training run that samples (GRPO) has its rollouts of the step.
    - A training run without rollouts (SFT), or with a filter that uses the name `half`, has its
      held-out answers at the step.
    - An evaluation or probe has the answers of all models, or of the one whose index is the step.
    - A training run with the filter `half == 'kept'` has its answers that test what the model
      could do before: at step 0 if that is the step, else after training.

    Raises UserError NO_EVALUATION if there are no rows yet, BAD_ARGUMENT if the step has no rows.
    """
    run, row = reading.run, reading.row
    if run.deleted.exists():
        raise UserError(
            "NO_EVALUATION",
            f"{row.run_id} has no rollouts: its files were deleted",
            hint=Hint("Read another run:", Call("get_status", {"scope": "runs"})),
        )
    if row.kind != "train":
        names_no_model = reading.start.step == -1 or reading.start.all_steps
        return _answers_of_all_models(reading) if names_no_model else model_answers(reading)
    if asks_for_kept_skills(reading.query.where):
        return _kept_skill_answers(reading)
    steps = run.rollout_steps()
    if not steps or _uses_name(reading.query.where, "half"):  # rollouts of training have no half
        return _held_out_answers(reading)
    step = chosen_step(steps, reading.start.step, missing_rows="rollouts")
    rollouts = TrajectoryRecord.read_file(run.rollouts(step))
    return Source(
        rows=rollouts.records,
        description=f"rollouts of step {step}",
        step=step,
        skipped=rollouts.skipped,
        trained=True,
    )


def _kept_skill_answers(reading: Reading) -> Source:
    """Read the answers of a training run that test what the model could do before; they get the
    half "kept". They are those of step 0 if the query names it, else those of the chosen
    checkpoint, or of step 0 before there is one.

    Raises UserError NO_EVALUATION if nothing was asked yet.
    """
    run, row = reading.run, reading.row
    is_after = reading.start.step != 0 and run.kept("after").exists()
    path = run.kept("after" if is_after else "before")
    if not path.exists():
        raise UserError(
            "NO_EVALUATION",
            f"{row.run_id} was not asked yet what it could do before (it is {row.state})",
            hint=wait_hint(row.run_id, until="next_eval"),
        )
    answers = kept_skill_rows(path)
    last_step = max(run.eval_steps(), default=0)
    return Source(
        rows=answers.records,
        description=f"answers on kept skills {'after' if is_after else 'before'} training",
        # 1 at least, so that the cursor of these answers does not mean those at step 0.
        step=max(1, last_step) if is_after else 0,
        skipped=answers.skipped,
    )


def kept_skill_rows(path: Path) -> RecordsRead[EvaluationRow]:
    """Read the answers to tasks of earlier skills from a file (`RunDir.kept`); each gets the half
    "kept". Raises FileNotFoundError if the file does not exist."""
    answers = EvaluationRow.read_file(path)
    records = [answer.model_copy(update={"half": _KEPT}) for answer in answers.records]
    return replace(answers, records=records)


def _held_out_answers(reading: Reading) -> Source:
    """Read the held-out answers of a training run without rollouts (SFT, DPO) at the requested
    step. -1 means the latest step, or, if the filter asks for the half "report", the latest at
    which that half was asked.

    Raises UserError NO_EVALUATION if nothing is evaluated yet, BAD_ARGUMENT if the step has no
    evaluation.
    """
    run, row = reading.run, reading.row
    steps = run.eval_steps()
    if not steps:  # the message names rollouts: a run that has any does not come here
        raise UserError(
            "NO_EVALUATION",
            f"{row.run_id} has no rollouts yet (it is {row.state})",
            hint=wait_hint(row.run_id, until="next_eval"),
        )
    requested_step = reading.start.step
    if requested_step == -1 and _has_text(reading.query.where, _REPORT):
        requested_step = _last_reported(run, steps)
    step = chosen_step(steps, requested_step, missing_rows="held-out answers")
    answers = EvaluationRow.read_file(run.evals(step))
    return Source(
        rows=answers.records,
        description=f"{_side_of(run, answers.records)} answers at step {step}",
        step=step,
        skipped=answers.skipped,
    )


def _side_of(run: RunDir, answers: Sequence[EvaluationRow]) -> str:
    """Name the tasks that an evaluation of a training run asked: "dev", "held-out", or "dev and
    held-out". Dev tasks, where a run has them, are those that choose its checkpoint."""
    choosing_half = choosing(run)  # the tasks that choose the checkpoint; None if not recorded
    if choosing_half is None or choosing_half.side != "dev":
        return "held-out"
    # Held-out tasks are those of the half that is reported; all others are dev tasks.
    has_held_out = any(answer.half == _REPORT for answer in answers)
    has_dev = any(answer.half != _REPORT for answer in answers)
    if has_dev and has_held_out:
        return "dev and held-out"
    return "dev" if has_dev else "held-out"


def _last_reported(run: RunDir, steps: Sequence[int]) -> int:
    """Find the latest of the steps whose answers include the half "report", which is asked only at
    the start and with the best checkpoint. Returns -1 if there is none."""
    for step in reversed(steps):
        answers = EvaluationRow.read_file(run.evals(step)).records
        if any(answer.half == _REPORT for answer in answers):
            return step
    return -1


def _rollouts_of_all_steps(reading: Reading) -> Source:
    """Read the rollouts of all steps up to the requested one (-1: the latest). If the files are
    larger than `_ALL_BYTES` together, only the newest are read, at least one; `unread_steps` of the
    result counts the others."""
    run = reading.run
    last_step = reading.start.step
    steps = [step for step in run.rollout_steps() if last_step == -1 or step <= last_step]
    files = _newest_rollouts([run.rollouts(step) for step in steps])
    return Source(
        rows=[row for file in files for row in file.records],
        description=f"rollouts of {len(files)} steps",
        step=steps[-1],
        skipped=sum(file.skipped for file in files),
        all_steps=True,
        unread_steps=len(steps) - len(files),
        trained=True,
    )


def _newest_rollouts(paths: Sequence[Path]) -> list[RecordsRead[TrajectoryRecord]]:
    """Read the last of the files, as many as have at most `_ALL_BYTES` together, but at least one.
    The result is in the order of `paths`."""
    files: list[RecordsRead[TrajectoryRecord]] = []
    bytes_left = _ALL_BYTES
    for path in reversed(paths):
        bytes_left -= path.stat().st_size
        if bytes_left < 0 and files:
            break
        files.append(TrajectoryRecord.read_file(path))
    return files[::-1]


def _answers_of_all_models(reading: Reading) -> Source:
    """Read the answers of every model of an evaluation or probe. The answers to one task stand side
    by side, so that a page with few rows shows several models.

    Raises UserError NO_EVALUATION if no model has answers yet.
    """
    answered_indices = _answered_models(reading)
    answers_by_model = [
        EvaluationRow.read_file(reading.run.model_evals(index)) for index in answered_indices
    ]
    # The files list the tasks in the same order, so each tuple holds the models' answers to one.
    rows_by_task = itertools.zip_longest(*(answers.records for answers in answers_by_model))
    all_rows = itertools.chain.from_iterable(rows_by_task)
    names = ", ".join(reading.models[index] for index in answered_indices)
    return Source(
        # None: a model has not answered the task yet.
        rows=[row for row in all_rows if row is not None],
        description=f"answers of {names}",
        step=answered_indices[-1],
        skipped=sum(answers.skipped for answers in answers_by_model),
        all_steps=True,
    )


def _answered_models(reading: Reading) -> list[int]:
    """List the indices of the models of an evaluation or probe that have answers. Raises UserError
    NO_EVALUATION if there are none."""
    row, count = reading.row, len(reading.models)
    answered_indices = [index for index in range(count) if reading.run.model_evals(index).exists()]
    if not answered_indices:
        raise UserError(
            "NO_EVALUATION",
            f"{row.run_id} has no answers yet (it is {row.state})",
            hint=wait_hint(row.run_id),
        )
    return answered_indices


def model_answers(reading: Reading) -> Source:
    """Read the answers of one model of an evaluation or probe. The `step` of the query is the index
    of the model; -1 is the last model that has answers.

    Raises UserError NO_EVALUATION if no model has answers yet, BAD_ARGUMENT if the requested model
    has none.
    """
    run, models = reading.run, reading.models
    answered_indices = _answered_models(reading)
    # An error then says "there are no answers, by index of the model, of step 7".
    index = chosen_step(
        answered_indices, reading.start.step, missing_rows="answers, by index of the model,"
    )
    answers = EvaluationRow.read_file(run.model_evals(index))
    return Source(
        rows=answers.records,
        description=f"answers of {models[index]}",
        step=index,
        skipped=answers.skipped,
    )


def wait_hint(run_id: str, **until: str) -> Hint:
    """Make a hint with the call `wait_run` for a run that has no rows yet. With until="next_eval"
    the call waits for the next evaluation, without it for the end of the run."""
    return Hint("Wait until it has some:", Call("wait_run", {"run_id": run_id, **until}))


def chosen_step(steps: Sequence[int], step: int, missing_rows: str) -> int:
    """Return `step`, which must be one of `steps`, or the last of them if `step` is -1. `steps`
    have rows and are in ascending order; `missing_rows` names the rows in the error, such as
    "rollouts".

    Raises UserError BAD_ARGUMENT, with the nearest steps, if `step` is not in `steps`.
    """
    if step == -1:
        return steps[-1]
    if step in steps:
        return step
    nearest = sorted(steps, key=lambda candidate: abs(candidate - step))[:_NEAREST]
    nearest_text = ", ".join(str(candidate) for candidate in sorted(nearest))
    raise UserError(
        "BAD_ARGUMENT",
        f"there are no {missing_rows} of step {step}",
        hint=f"Nearest steps: {nearest_text}; the last is {steps[-1]}.",
        field="step",
    )


def _filters_by_step(where: str) -> bool:
    """Whether the filter expression uses the name `step`, as "step > 20" does."""
    return _uses_name(where, "step")


def _uses_name(where: str, name: str) -> bool:
    """Whether the filter expression uses the field `name`."""
    return any(isinstance(node, ast.Name) and node.id == name for node in _syntax_nodes(where))


def asks_for_kept_skills(where: str) -> bool:
    """Whether the filter expression is about earlier skills: it asks for "kept", as in "half ==
    'kept'", or uses `battery`, a field that no other answers have. One that leaves them out, such
    as "half != 'kept'" or "not battery", is not about them."""
    nodes = _syntax_nodes(where)
    return bool(nodes) and _selects_kept(nodes[0], negated=False)


def _selects_kept(node: ast.AST, *, negated: bool) -> bool:
    """Whether this part of a filter expression selects answers on earlier skills, or does so where
    it is false (`negated`)."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return _selects_kept(node.operand, negated=not negated)
    if isinstance(node, ast.Name):
        return node.id == "battery" and not negated
    if isinstance(node, ast.Compare):
        names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        excludes = any(isinstance(op, ast.NotEq | ast.NotIn | ast.IsNot) for op in node.ops)
        if "battery" in names and _has_constant(node, None):  # "battery is None" has none of them
            return excludes != negated
        if "battery" in names:
            return True
        return "half" in names and _has_constant(node, _KEPT) and excludes == negated
    return any(_selects_kept(child, negated=negated) for child in ast.iter_child_nodes(node))


def _has_text(where: str, text: str) -> bool:
    """Whether the filter expression contains this text as a constant, as "half == 'kept'" does."""
    return any(_has_constant(node, text) for node in _syntax_nodes(where))


def _has_constant(node: ast.AST, value: str | None) -> bool:
    """Whether this node, or one below it, is the constant `value`."""
    return any(isinstance(each, ast.Constant) and each.value == value for each in ast.walk(node))


def _syntax_nodes(where: str) -> list[ast.AST]:
    """Parse the filter expression `where` into its syntax nodes. Returns [] if it cannot be parsed;
    `matching` refuses it later."""
    try:
        # "0" stands for an empty expression, which cannot be parsed and uses no name.
        tree = ast.parse(where.strip() or "0", mode="eval")
    # ValueError: a null byte; RecursionError and MemoryError: nested too deeply.
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return list(ast.walk(tree))


def matching(rows: Sequence[AnyRow], where: str) -> list[AnyRow]:
    """Select the rows for which the expression `where` is true; all rows if `where` is empty. The
    expression may use the `FILTER_NAMES`, and metrics by their name or as metrics["name"].

    Raises UserError BAD_ARGUMENT if the expression is invalid.
    """
    if not where.strip():
        return list(rows)
    metrics = {name for row in rows for name in row.metrics or {}}
    # A metric whose name is not an identifier can only be written as metrics["its name"].
    names = [*FILTER_NAMES, *(name for name in metrics if name.isidentifier())]
    # An expression may use the names that stop reasons had in earlier versions.
    rule = Where(where, names, former_values={"stop_reason": FORMER_STOP_REASONS})
    return [row for row in rows if rule.matches(_filter_values(row), row.task)]


def _filter_values(row: Row) -> dict[str, object]:
    """Collect the values of a row that a filter expression can use, by name. A field that this kind
    of row does not have is None. If a metric has the name of a field, the field is used."""
    metrics: dict[str, object] = dict(row.metrics or {})
    fields = {name: getattr(row, name, None) for name in FILTER_NAMES}
    counts = {"length": length_in_tokens(row), "invalid_calls": len(row.invalid_calls or ())}
    # The order matters: of equal names the later one counts.
    return metrics | fields | counts | {"metrics": metrics}


def select_picked(rows: Sequence[Row], pick: str, seed: str) -> list[Row]:
    """Select the rows that `pick` shows, in its order.

    - truncated, error: only these rows, in their original order.
    - random: all rows, shuffled with `seed`.
    - median: the scored rows nearest to the median score first.
    - best, worst: the scored rows, the highest or the lowest score first.
    """
    if pick == "truncated":
        return [row for row in rows if row.cut]
    if pick == "error":
        return [row for row in rows if row.error]
    if pick == "random":
        shuffled = list(rows)
        random.Random(seed).shuffle(shuffled)
        return shuffled
    scored = _scored_rows(rows)
    if pick == "median" and scored:  # without rows there is no median
        return _nearest_to_median(scored)
    return sorted(scored, key=score, reverse=pick == "best")


def _scored_rows(rows: Sequence[Row]) -> list[Row]:
    """Select the rows with a reward. If no row has one, as in an evaluation of SFT without a
    scorer, select the rows with a loss."""
    rows_with_reward = [row for row in rows if row.reward is not None]
    return rows_with_reward or [row for row in rows if _loss(row) is not None]


def _nearest_to_median(rows: Sequence[Row]) -> list[Row]:
    """Sort the rows (at least one) by the distance of their score from the median score."""
    scores = sorted(score(row) for row in rows)
    median = scores[len(scores) // 2]  # with an even count, the higher of the two middle scores
    return sorted(rows, key=lambda row: abs(score(row) - median))


def score(row: Row) -> float:
    """Return the number by which rows are compared; higher is better. It is the reward, or minus
    the loss if the row has no reward, or 0 if it has neither."""
    if row.reward is not None:
        return row.reward
    loss = _loss(row)
    return 0.0 if loss is None else -loss


def _loss(row: Row) -> float | None:
    """Return the loss of an evaluation's row; None if it has none. Rollouts have no loss."""
    return row.loss if isinstance(row, EvaluationRow) else None


def rewards_of(rows: Sequence[Row]) -> list[float]:
    """List the rewards of the rows. Rows without a reward and rows whose scoring failed are left
    out."""
    return [row.reward for row in rows if not row.error and row.reward is not None]


def reward_std(rows: Sequence[Row]) -> float:
    """Return the population standard deviation of the rows' rewards, without failed scores; 0 if
    fewer than two rows have one."""
    rewards = rewards_of(rows)
    if len(rewards) < 2:
        return 0.0
    mean = math.fsum(rewards) / len(rewards)
    return math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))
