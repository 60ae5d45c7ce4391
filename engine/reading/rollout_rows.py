"""Reads, filters and orders the rows of a run for a page of rollouts."""

import ast
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from engine.core.errors import UserError
from engine.core.filters import Where
from engine.core.hints import Call, Hint
from engine.reading.rollout_pages import Reading, mark_of
from engine.reading.transcripts import length_in_tokens
from engine.records.lines.evaluation_row import EvaluationRow
from engine.records.lines.line_record import RecordsRead, skipped_lines
from engine.records.lines.trajectory_record import TrajectoryRecord

Row = TrajectoryRecord | EvaluationRow
AnyRow = TypeVar("AnyRow", bound=Row)

_ALL_BYTES = 48_000_000  # of rollout files that are read at most when a filter needs all steps
_NEAREST = 5  # steps that an error message names
_FILTER_NAMES = (
    "step",
    "task",
    "group",
    "member",
    "reward",
    "success",
    "advantage",
    "length",
    "stop_reason",
    "error",
    "turns",
    "attempt",
    "half",
    "model",
    "metrics",
)


@dataclass(frozen=True)
class Source:
    """The rows that a page chooses from.

    Attributes:
        what: a description of them, as "rollouts of step 3".
        step: their training step, or in an evaluation the index of the model.
        skipped: number of damaged lines that could not be read.
        all_steps: whether the rows are those of all steps up to `step`.
        missing: number of older steps that were not read.
        trained: whether they were trained on. In training a failed score is left out of the mean,
            in an evaluation it counts as 0.
    """

    rows: Sequence[Row]
    what: str
    step: int
    skipped: int = 0
    all_steps: bool = False
    missing: int = 0
    trained: bool = False

    @property
    def mark(self) -> str:
        """What was read, as a cursor stores it."""
        return mark_of(self.step, all_steps=self.all_steps)

    @property
    def warnings(self) -> list[str]:
        """Warnings about lines and steps that were not read."""
        warnings = skipped_lines(self.skipped)
        if self.missing:
            older = f"The oldest {self.missing} steps were not read"
            warnings.append(f"{older}; name one with step=... to see it.")
        return warnings


def source_of(reading: Reading) -> Source:
    """The rows that the query chooses from: of one step, or of all steps if its filter needs them.

    Raises UserError NO_EVALUATION if there are none yet, BAD_ARGUMENT for a step without rows.
    """
    query, start = reading.query, reading.start
    all_steps = start.all_steps or (start.step == -1 and _names_step(query.where))
    if all_steps and reading.run.rollout_steps():
        return _rollouts_of_all_steps(reading)
    return _rows_of_one_step(reading)


def _rows_of_one_step(reading: Reading) -> Source:
    """The rows of one step: rollouts, or held-out answers if the run samples nothing (SFT).

    For an evaluation the answers of one model. Raises UserError as `source_of` does.
    """
    run, row = reading.run, reading.row
    if run.deleted.exists():
        raise UserError(
            "NO_EVALUATION",
            f"{row.run_id} has no rollouts: its files were deleted",
            hint=Hint("Read another run:", Call("get_status", {"scope": "runs"})),
        )
    if row.kind != "train":
        return model_answers(reading)
    steps = run.rollout_steps()
    if steps:
        step = chosen_step(steps, reading.start.step, "rollouts")
        rollouts = TrajectoryRecord.read_file(run.rollouts(step))
        what = f"rollouts of step {step}"
        return Source(rollouts.records, what, step, rollouts.skipped, trained=True)
    steps = run.eval_steps()
    if not steps:
        raise UserError(
            "NO_EVALUATION",
            f"{row.run_id} has no rollouts yet (it is {row.state})",
            hint=wait_hint(row.run_id, until="next_eval"),
        )
    step = chosen_step(steps, reading.start.step, "held-out answers")
    answers = EvaluationRow.read_file(run.evals(step))
    return Source(answers.records, f"held-out answers at step {step}", step, answers.skipped)


def _rollouts_of_all_steps(reading: Reading) -> Source:
    """The rollouts of all steps up to the requested one (-1: the latest).

    If the files are larger than `_ALL_BYTES` together, only the newest are read, at least one.
    """
    run, last = reading.run, reading.start.step
    steps = [step for step in run.rollout_steps() if last == -1 or step <= last]
    files: list[RecordsRead[TrajectoryRecord]] = []
    bytes_left = _ALL_BYTES
    for step in reversed(steps):
        path = run.rollouts(step)
        bytes_left -= path.stat().st_size
        if bytes_left < 0 and files:
            break
        files.append(TrajectoryRecord.read_file(path))
    return Source(
        [row for file in reversed(files) for row in file.records],
        f"rollouts of {len(files)} steps",
        steps[-1],
        skipped=sum(file.skipped for file in files),
        all_steps=True,
        missing=len(steps) - len(files),
        trained=True,
    )


def model_answers(reading: Reading) -> Source:
    """The answers of one model of an evaluation or probe; the query's step is the model's index.

    Raises UserError NO_EVALUATION if no model has answered yet, BAD_ARGUMENT for an index without
    answers.
    """
    run, row, models = reading.run, reading.row, reading.models
    answered = [index for index in range(len(models)) if run.model_evals(index).exists()]
    if not answered:
        raise UserError(
            "NO_EVALUATION",
            f"{row.run_id} has no answers yet (it is {row.state})",
            hint=wait_hint(row.run_id),
        )
    index = chosen_step(answered, reading.start.step, "answers, by index of the model,")
    answers = EvaluationRow.read_file(run.model_evals(index))
    return Source(answers.records, f"answers of {models[index]}", index, answers.skipped)


def wait_hint(run_id: str, **until: str) -> Hint:
    """A hint with the call that waits for a run's first rows; `until` are more arguments of it."""
    return Hint("Wait until it has some:", Call("wait_run", {"run_id": run_id, **until}))


def chosen_step(steps: Sequence[int], step: int, what: str) -> int:
    """`step` if it is one of `steps`; the last one for -1.

    Raises UserError BAD_ARGUMENT with the nearest steps for any other; `what` names the missing
    rows.
    """
    if step == -1:
        return steps[-1]
    if step in steps:
        return step
    nearest = sorted(steps, key=lambda other: abs(other - step))[:_NEAREST]
    raise UserError(
        "BAD_ARGUMENT",
        f"there are no {what} of step {step}",
        hint=f"Nearest steps: {', '.join(map(str, sorted(nearest)))}; the last is {steps[-1]}.",
        field="step",
    )


def _names_step(where: str) -> bool:
    """Whether the filter expression uses the name `step`.

    False for one that cannot be parsed; `matching` refuses it later.
    """
    try:
        tree = ast.parse(where.strip() or "0", mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(isinstance(node, ast.Name) and node.id == "step" for node in ast.walk(tree))


def matching(rows: Sequence[AnyRow], where: str) -> list[AnyRow]:
    """The rows for which the expression `where` is true; all rows if it is empty.

    Raises UserError BAD_ARGUMENT for an invalid expression.
    """
    if not where.strip():
        return list(rows)
    metrics = {name for row in rows for name in row.metrics or {}}
    rule = Where(where, [*_FILTER_NAMES, *(name for name in metrics if name.isidentifier())])
    return [row for row in rows if rule.matches(_filter_values(row), row.task)]


def _filter_values(row: Row) -> dict[str, object]:
    """The values of a row that a filter expression can use, by name."""
    metrics: dict[str, object] = dict(row.metrics or {})
    fields = {name: getattr(row, name, None) for name in _FILTER_NAMES}
    return metrics | fields | {"length": length_in_tokens(row), "metrics": metrics}


def ordered(rows: Sequence[Row], pick: str, seed: str) -> list[Row]:
    """The rows that `pick` shows, in its order.

    "truncated" and "error" select rows and keep their order, "random" shuffles them with `seed`,
    "median" puts the rows nearest to the median score first, "best" and "worst" sort by score. Of
    the last three, rows without a score are left out.
    """
    if pick == "truncated":
        return [row for row in rows if row.cut]
    if pick == "error":
        return [row for row in rows if row.error]
    if pick == "random":
        shuffled = list(rows)
        random.Random(seed).shuffle(shuffled)
        return shuffled
    scored = [row for row in rows if row.reward is not None]
    scored = scored or [row for row in rows if _loss(row) is not None]
    if pick == "median":
        median = sorted(score(row) for row in scored)[len(scored) // 2] if scored else 0.0
        return sorted(scored, key=lambda row: abs(score(row) - median))
    return sorted(scored, key=score, reverse=pick == "best")


def score(row: Row) -> float:
    """The number by which rows are compared, higher is better: the reward, or minus the loss.

    0 for a row with neither.
    """
    return row.reward if row.reward is not None else -(_loss(row) or 0.0)


def _loss(row: Row) -> float | None:
    return row.loss if isinstance(row, EvaluationRow) else None


def rewards_of(rows: Sequence[Row]) -> list[float]:
    """The rewards of the rows that have one; those whose scoring failed are left out."""
    return [row.reward for row in rows if not row.error and row.reward is not None]


def reward_std(rows: Sequence[Row]) -> float:
    """Population standard deviation of the rewards; 0 for fewer than two."""
    rewards = rewards_of(rows)
    if len(rewards) < 2:
        return 0.0
    mean = math.fsum(rewards) / len(rewards)
    return math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))
