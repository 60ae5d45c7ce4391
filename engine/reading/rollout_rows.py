"""Which rows of a run are read, filtered and ordered for a page of rollouts."""

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

_ALL_BYTES = 48_000_000  # of rollouts, when a filter looks at every step
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
    """Rows to pick from.

    Attributes:
        what: what they are, in words.
        step: a training step, or the index of a model in an evaluation.
        skipped: damaged lines that could not be read.
        all_steps: whether the rows are of all steps up to `step`; `missing` older steps were not
            read.
        trained: whether they were trained on. There a score that failed is left out of the mean;
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
        """What was read, as a cursor keeps it."""
        return mark_of(self.step, all_steps=self.all_steps)

    @property
    def warnings(self) -> list[str]:
        """What a page has to say of rows that are not among these."""
        warnings = skipped_lines(self.skipped)
        if self.missing:
            older = f"The oldest {self.missing} steps were not read"
            warnings.append(f"{older}; name one with step=... to see it.")
        return warnings


def source_of(reading: Reading) -> Source:
    """The rows that the query is about.

    Raises UserError NO_EVALUATION where there are none yet, BAD_ARGUMENT for a step without rows.
    """
    query, start = reading.query, reading.start
    all_steps = start.all_steps or (start.step == -1 and _names_step(query.where))
    if all_steps and reading.run.rollout_steps():
        return _rollouts_of_all_steps(reading)
    return _rows_of_one_step(reading)


def _rows_of_one_step(reading: Reading) -> Source:
    """Rollouts of a training step, or held-out answers where the run samples nothing."""
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
    """The rollouts of all steps up to the one asked for (-1: the latest), the newest where there
    are more than may be read."""
    run, last = reading.run, reading.start.step
    steps = [step for step in run.rollout_steps() if last == -1 or step <= last]
    files: list[RecordsRead[TrajectoryRecord]] = []
    room = _ALL_BYTES
    for step in reversed(steps):
        path = run.rollouts(step)
        room -= path.stat().st_size
        if room < 0 and files:
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
    """What one model of an evaluation or probe answered.

    Raises UserError NO_EVALUATION where none has answered, BAD_ARGUMENT for an index without
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
    """How to wait for the first rows of a run."""
    return Hint("Wait until it has some:", Call("wait_run", {"run_id": run_id, **until}))


def chosen_step(steps: Sequence[int], step: int, what: str) -> int:
    """`step` where it is one of `steps`, the last one for -1.

    Raises UserError BAD_ARGUMENT naming the nearest for any other; `what` has no such step.
    """
    if step == -1:
        return steps[-1]
    if step in steps:
        return step
    near = sorted(steps, key=lambda other: abs(other - step))[:5]
    raise UserError(
        "BAD_ARGUMENT",
        f"there are no {what} of step {step}",
        hint=f"Nearest steps: {', '.join(map(str, sorted(near)))}; the last is {steps[-1]}.",
        field="step",
    )


def _names_step(where: str) -> bool:
    """Whether an expression looks at the step; one that cannot be read is refused later."""
    try:
        tree = ast.parse(where.strip() or "0", mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(isinstance(node, ast.Name) and node.id == "step" for node in ast.walk(tree))


def matching(rows: Sequence[AnyRow], where: str) -> list[AnyRow]:
    """The rows that the expression matches. Raises UserError BAD_ARGUMENT where it cannot work."""
    if not where.strip():
        return list(rows)
    metrics = {name for row in rows for name in row.metrics or {}}
    rule = Where(where, [*_FILTER_NAMES, *(name for name in metrics if name.isidentifier())])
    return [row for row in rows if rule.matches(_filter_values(row), row.task)]


def _filter_values(row: Row) -> dict[str, object]:
    """What an expression may ask of a row, by name."""
    metrics: dict[str, object] = dict(row.metrics or {})
    fixed = {name: getattr(row, name, None) for name in _FILTER_NAMES}
    return metrics | fixed | {"length": length_in_tokens(row), "metrics": metrics}


def ordered(rows: Sequence[Row], pick: str, seed: str) -> list[Row]:
    """The rows that `pick` shows, in its order; `seed` decides the order of `random`."""
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
        middle = sorted(score(row) for row in scored)[len(scored) // 2] if scored else 0.0
        return sorted(scored, key=lambda row: abs(score(row) - middle))
    return sorted(scored, key=score, reverse=pick == "best")


def score(row: Row) -> float:
    """The reward, or where nothing scores minus the loss: higher is better."""
    return row.reward if row.reward is not None else -(_loss(row) or 0.0)


def _loss(row: Row) -> float | None:
    return row.loss if isinstance(row, EvaluationRow) else None


def rewards_of(rows: Sequence[Row]) -> list[float]:
    """What was earned; a score that failed says nothing of what its answer is worth."""
    return [row.reward for row in rows if not row.error and row.reward is not None]


def reward_std(rows: Sequence[Row]) -> float:
    """Standard deviation (of the population) of the rewards, 0 for fewer than two."""
    rewards = rewards_of(rows)
    if len(rewards) < 2:
        return 0.0
    mean = math.fsum(rewards) / len(rewards)
    return math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))
