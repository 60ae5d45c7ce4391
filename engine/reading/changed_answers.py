"""Held-out tasks whose score differs between two evaluations: `pick="changed"`.

The two are evaluations of one run before and after training, or of two models."""

from dataclasses import dataclass, field, replace

from engine.core.errors import UserError
from engine.core.hints import Call
from engine.core.reply import ReplyBase
from engine.evidence.verdict.sides import result_step
from engine.home.sanitize import clip
from engine.reading.rollout_pages import Reading, fit, mark_of
from engine.reading.rollout_rows import (
    chosen_step,
    matching,
    model_answers,
    score,
    wait_hint,
)
from engine.reading.transcripts import (
    RolloutItem,
    Texts,
    Turn,
    rollout_item,
    turns_of,
    with_shorter_texts,
    within,
)
from engine.records.lines.curves import short
from engine.records.lines.evaluation_row import EvaluationRow
from engine.records.lines.line_record import skipped_lines

_TASK_CHARS = 120  # of a task's id
_LEAST_CHARS = 40  # that a text keeps, however little room there is


@dataclass(frozen=True)
class ChangedItem:
    """One task whose score changed, with both answers; `change` is the score after minus before.

    `before` and `after` lack task, half, group and model: these are equal in both.
    """

    task: str
    change: float
    prompt: list[Turn]
    before: RolloutItem
    after: RolloutItem


@dataclass(frozen=True)
class ChangedPage(ReplyBase):
    """Tasks whose score changed, the largest change first; `matching` counts those on all pages.

    Attributes:
        step: the second evaluation: its training step, or the index of its model.
        before, after: the names of the two evaluations.
    """

    summary: str
    run_id: str
    step: int
    before: str
    after: str
    matching: int
    changed: list[ChangedItem]
    warnings: list[str] = field(default_factory=list)
    next: list[Call] = field(default_factory=list)
    next_cursor: str = ""


@dataclass(frozen=True)
class _Comparison:
    """Two evaluations of the same tasks.

    Attributes:
        before, after: the answers of the first and of the second evaluation.
        names: their names in the same order, as ("step 0", "step 40") or two models.
        step: training step of the second evaluation, or the index of its model.
        skipped: number of damaged lines in both files.
    """

    before: list[EvaluationRow]
    after: list[EvaluationRow]
    names: tuple[str, str]
    step: int
    skipped: int


def changed_page(reading: Reading) -> ChangedPage:
    """A page of the tasks whose score differs between two evaluations, the largest change first.

    The query's `where` filters the answers of the second evaluation. Tasks that only one of the
    two answered are left out. Raises UserError NO_EVALUATION or BAD_ARGUMENT if there is nothing
    to compare with, BAD_ARGUMENT also for an invalid `where`.
    """
    evaluations = _choose_evaluations(reading)
    selected_keys = {_attempt_key(row) for row in matching(evaluations.after, reading.query.where)}
    before_by_key = {_attempt_key(row): row for row in evaluations.before}
    in_both = [row for row in evaluations.after if _attempt_key(row) in before_by_key]
    pairs = [
        (before_by_key[_attempt_key(row)], row)
        for row in in_both
        if _attempt_key(row) in selected_keys
    ]
    pairs = [pair for pair in pairs if _score_change(*pair)]  # without the unchanged ones
    # The largest change first; equal ones in the order of their tasks.
    pairs.sort(key=lambda pair: (-abs(_score_change(*pair)), _attempt_key(pair[1])))
    better_count = sum(_score_change(*pair) > 0 for pair in pairs)
    before, after = evaluations.names
    task_count = len({_attempt_key(row) for row in in_both})
    page = ChangedPage(
        summary=f"{len(pairs)} of {task_count} tasks changed between {before} and {after}: "
        f"{better_count} for the better, {len(pairs) - better_count} for the worse.",
        run_id=reading.row.run_id,
        step=evaluations.step,
        before=before,
        after=after,
        matching=len(pairs),
        changed=[],
    )
    fitted = fit(
        reading,
        [_changed_item(reading, *pair) for pair in reading.shown_part(pairs)],
        len(pairs),
        mark_of(evaluations.step),  # so that a run that goes on does not change the next page
        lambda items: replace(page, changed=items),
        with_shorter_texts,
    )
    return replace(
        page,
        changed=fitted.items,
        warnings=fitted.warnings + skipped_lines(evaluations.skipped),
        next_cursor=fitted.next_cursor,
    )


def _choose_evaluations(reading: Reading) -> _Comparison:
    """The two evaluations to compare: two steps of a training run, or two models of an evaluation.

    Of an evaluation, the requested model (by default the last) is compared with the first model;
    if the first is requested, it is compared with the second. Raises UserError NO_EVALUATION if
    there are no answers yet, BAD_ARGUMENT if only one model was evaluated or the step is unknown.
    """
    if reading.row.kind == "train":
        return _training_evaluations(reading)
    run, models = reading.run, reading.models
    answers = model_answers(reading)
    if len(models) < 2:
        raise UserError(
            "BAD_ARGUMENT",
            f"{reading.row.run_id} evaluated one model, so nothing can have changed",
            hint="Evaluate two models in one call, or pick worst.",
            field="pick",
        )
    # `step` is the index of the requested model.
    other_index = 0 if answers.step else 1
    before, after = (
        EvaluationRow.read_file(run.model_evals(i)) for i in (other_index, answers.step)
    )
    names = (models[other_index], models[answers.step])
    skipped = before.skipped + after.skipped
    return _Comparison(before.records, after.records, names, answers.step, skipped)


def _training_evaluations(reading: Reading) -> _Comparison:
    """The evaluation at step 0 and the one at the requested step of a training run.

    Step -1 stands for the step that the run's verdict is about; if there is no verdict, for the
    last evaluated step. Raises UserError NO_EVALUATION if step 0 or every later step is not
    evaluated yet, BAD_ARGUMENT for a step without an evaluation.
    """
    run, row = reading.run, reading.row
    step = reading.start.step
    steps = [number for number in run.eval_steps() if number > 0]
    if not steps or 0 not in run.eval_steps():
        raise UserError(
            "NO_EVALUATION",
            f"{row.run_id} has no held-out evaluation after step 0 yet (it is {row.state})",
            hint=wait_hint(row.run_id, until="next_eval"),
        )
    later_step = chosen_step(steps, step, "held-out answers") if step != -1 else result_step(run)
    # None: the run has no verdict.
    later_step = steps[-1] if later_step is None else later_step
    before, after = (
        EvaluationRow.read_file(run.evals(step_number)) for step_number in (0, later_step)
    )
    names = ("step 0", f"step {later_step}")
    return _Comparison(
        before.records, after.records, names, later_step, before.skipped + after.skipped
    )


def _attempt_key(row: EvaluationRow) -> str:
    """A text such as "add-7 #0" that identifies one attempt at one task in both evaluations."""
    return f"{row.task} #{row.attempt or 0}"


def _score_change(before: EvaluationRow, after: EvaluationRow) -> float:
    """The score after minus the score before: change of success, else of the reward.

    The reward decides if success is the same in both or unknown in one. 0 if either answer could
    not be scored.
    """
    if before.error or after.error:
        return 0.0
    if before.success is not None and after.success is not None:
        change = float(after.success) - float(before.success)
        if change:
            return change
    return score(after) - score(before)


def _changed_item(reading: Reading, old: EvaluationRow, new: EvaluationRow) -> ChangedItem:
    """One changed task with both answers.

    Each answer gets half of `max_chars`, the prompt a third, but never less than 40 characters.
    """
    query, redact = reading.query, reading.redact
    texts = Texts(max(query.max_chars // 2, _LEAST_CHARS), prompt=False, tokens=query.tokens)
    before, after = (
        # These are the same for both answers and are given once, in the ChangedItem.
        replace(rollout_item(redact, row, texts), task=None, half=None, group=None, model=None)
        for row in (old, new)
    )
    return ChangedItem(
        task=clip(redact.text(new.task), _TASK_CHARS),
        change=short(_score_change(old, new)),
        prompt=within(turns_of(redact, new.prompt), max(query.max_chars // 3, _LEAST_CHARS)),
        before=before,
        after=after,
    )
