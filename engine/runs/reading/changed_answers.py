"""Finds held-out tasks whose score differs between two evaluations (`pick="changed"` of
read_rollouts). They are evaluations of one run before and after training, or of two models."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engine.core.errors import UserError
from engine.core.hints import Call
from engine.core.reply import ReplyBase
from engine.evidence.verdict.sides import result_step
from engine.home.sanitize import clip
from engine.records.lines.curves import short
from engine.records.lines.evaluation_row import EvaluationRow
from engine.records.lines.line_record import skipped_lines
from engine.runs.reading.rollout_pages import Reading, fit, mark_of
from engine.runs.reading.rollout_rows import (
    asks_for_kept_skills,
    chosen_step,
    kept_skill_rows,
    matching,
    model_answers,
    score,
    wait_hint,
)
from engine.runs.reading.transcripts import (
    RolloutItem,
    Texts,
    Turn,
    rollout_item,
    shorten_turns,
    turns_of,
    with_shorter_texts,
)

_TASK_CHARS = 120  # characters that are shown of a task's id
_LEAST_CHARS = 40  # characters that a text keeps at least, however little room there is


@dataclass(frozen=True)
class ChangedItem:
    """One task whose score changed, with both answers. `change` is the score after minus the score
    before.

    `before` and `after` lack task, half, group and model, because these are equal in both.
    """

    task: str
    change: float
    prompt: list[Turn]
    before: RolloutItem
    after: RolloutItem


@dataclass(frozen=True)
class ChangedPage(ReplyBase):
    """Tasks whose score changed, the largest change first. `matching` counts those on all pages.

    Attributes:
        step: the training step of the second evaluation, or the index of its model.
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
        names: their names in the same order: ("step 0", "step 40"), or two models.
        step: training step of the second evaluation, or the index of its model.
        skipped: number of damaged lines in both files.
    """

    before: list[EvaluationRow]
    after: list[EvaluationRow]
    names: tuple[str, str]
    step: int
    skipped: int


@dataclass(frozen=True)
class _Change:
    """Both answers to one task; `score` is the score after minus the score before."""

    before: EvaluationRow
    after: EvaluationRow
    score: float


def changed_page(reading: Reading) -> ChangedPage:
    """Make a page of the tasks whose score differs between two evaluations, the largest change
    first. The query's `where` filters the answers of the second evaluation.

    Raises UserError:
        NO_EVALUATION if one of the evaluations has not been made yet; BAD_ARGUMENT if only one
            model was evaluated, the step has no evaluation, or `where` is invalid.
    """
    evaluations = _choose_evaluations(reading)
    changes = _changes(evaluations, reading.query.where)
    before, after = evaluations.names
    page = ChangedPage(
        summary=_summary(evaluations, changes),
        run_id=reading.row.run_id,
        step=evaluations.step,
        before=before,
        after=after,
        matching=len(changes),
        changed=[],
    )
    fitted_changes = fit(
        reading,
        [_changed_item(reading, change) for change in reading.shown_part(changes)],
        total=len(changes),
        # The cursor names the step, even if the latest was asked for, because the run may have a
        # later step by the time the next page is read.
        step_mark=mark_of(evaluations.step),
        page_of=lambda items: replace(page, changed=items),
        shorten=with_shorter_texts,
    )
    return replace(
        page,
        changed=fitted_changes.items,
        warnings=fitted_changes.warnings + skipped_lines(evaluations.skipped),
        next_cursor=fitted_changes.next_cursor,
    )


def _summary(evaluations: _Comparison, changes: Sequence[_Change]) -> str:
    """Say how many answers changed between the two evaluations (`changes`), and how many of them
    for the better. The sentence calls them tasks; with several attempts at a task, each attempt is
    counted."""
    before, after = evaluations.names
    shared_count = _count_of_shared_attempts(evaluations)
    better_count = sum(change.score > 0 for change in changes)
    return (
        f"{len(changes)} of {shared_count} tasks changed between {before} and {after}: "
        f"{better_count} for the better, {len(changes) - better_count} for the worse."
    )


def _count_of_shared_attempts(evaluations: _Comparison) -> int:
    """Count the attempts at a task that both evaluations have. With one attempt each, that is the
    number of tasks."""
    before = {_attempt_key(row) for row in evaluations.before}
    after = {_attempt_key(row) for row in evaluations.after}
    return len(before & after)


def _changes(evaluations: _Comparison, where: str) -> list[_Change]:
    """List the answers whose score differs between the two evaluations, the largest change first.
    Equal changes come in the order of their tasks. `where` filters the answers of the second
    evaluation."""
    before_by_key = {_attempt_key(row): row for row in evaluations.before}
    changes = []
    for after in matching(evaluations.after, where):
        before = before_by_key.get(_attempt_key(after))
        if before is not None:
            score_change = _score_change(before, after)
            if score_change:
                changes.append(_Change(before, after, score_change))

    def largest_first(change: _Change) -> tuple[float, object]:
        """Sort key: the size of the change, descending, then the task."""
        return -abs(change.score), _attempt_key(change.after)

    return sorted(changes, key=largest_first)


def _choose_evaluations(reading: Reading) -> _Comparison:
    """Choose the two evaluations to compare: two steps of a training run, or two models of an
    evaluation.

    Raises UserError NO_EVALUATION if an evaluation that is needed has not been made yet,
    BAD_ARGUMENT if only one model was evaluated or the step has no evaluation.
    """
    if reading.row.kind == "train":
        return _training_evaluations(reading)
    return _evaluations_of_models(reading)


def _evaluations_of_models(reading: Reading) -> _Comparison:
    """Read the answers of two models of an evaluation: the requested one, or else the last, as
    `after`, and the first one as `before`. If the first is requested, `before` is the second.

    Raises UserError NO_EVALUATION if no model has answers yet, BAD_ARGUMENT if only one model was
    evaluated or the requested one has no answers.
    """
    run, models = reading.run, reading.models
    answers = model_answers(reading)
    if len(models) < 2:
        raise UserError(
            "BAD_ARGUMENT",
            f"{reading.row.run_id} evaluated one model, so nothing can have changed",
            hint="Evaluate two models in one call, or pick worst.",
            field="pick",
        )
    requested_index = answers.step  # for an evaluation, `step` is the index of a model
    other_index = 1 if requested_index == 0 else 0
    before = EvaluationRow.read_file(run.model_evals(other_index))
    after = EvaluationRow.read_file(run.model_evals(requested_index))
    return _Comparison(
        before=before.records,
        after=after.records,
        names=(models[other_index], models[requested_index]),
        step=requested_index,
        skipped=before.skipped + after.skipped,
    )


def _training_evaluations(reading: Reading) -> _Comparison:
    """Read the evaluation at step 0 of a training run and the one at the requested step. If the
    filter is about earlier skills, read the answers on them before and after the training instead.

    Raises UserError NO_EVALUATION if step 0 or every later step is not evaluated yet, BAD_ARGUMENT
    if the requested step has no evaluation.
    """
    run, row = reading.run, reading.row
    if asks_for_kept_skills(reading.query.where):
        return _kept_skills_before_and_after(reading)
    steps = [step for step in run.eval_steps() if step > 0]
    if not steps or 0 not in run.eval_steps():
        raise UserError(
            "NO_EVALUATION",
            f"{row.run_id} has no held-out evaluation after step 0 yet (it is {row.state})",
            hint=wait_hint(row.run_id, until="next_eval"),
        )
    later_step = _later_step(reading, steps)
    before = EvaluationRow.read_file(run.evals(0))
    after = EvaluationRow.read_file(run.evals(later_step))
    return _Comparison(
        before=before.records,
        after=after.records,
        names=("step 0", f"step {later_step}"),
        step=later_step,
        skipped=before.skipped + after.skipped,
    )


def _kept_skills_before_and_after(reading: Reading) -> _Comparison:
    """Read the answers to tasks of earlier skills, before and after the training. Raises UserError
    NO_EVALUATION until both have been asked."""
    run, row = reading.run, reading.row
    if not run.kept("before").exists() or not run.kept("after").exists():
        raise UserError(
            "NO_EVALUATION",
            f"{row.run_id} was not asked yet what it can still do (it is {row.state})",
            hint=wait_hint(row.run_id),
        )
    before, after = kept_skill_rows(run.kept("before")), kept_skill_rows(run.kept("after"))
    return _Comparison(
        before=before.records,
        after=after.records,
        names=("step 0", "the chosen checkpoint"),
        step=max(run.eval_steps(), default=0),
        skipped=before.skipped + after.skipped,
    )


def _later_step(reading: Reading, steps: Sequence[int]) -> int:
    """Choose the step to compare with step 0; `steps` are the evaluated steps after 0. It is the
    requested step. If none is requested (-1), it is the step that the run's verdict is about, or
    without a verdict the last of `steps`.

    Raises UserError BAD_ARGUMENT if the requested step is not in `steps`.
    """
    requested_step = reading.start.step
    if requested_step != -1:
        return chosen_step(steps, requested_step, missing_rows="held-out answers")
    verdict_step = result_step(reading.run)
    return steps[-1] if verdict_step is None else verdict_step


def _attempt_key(row: EvaluationRow) -> str:
    """Make a text that identifies one attempt at one task in both evaluations, such as "add-7
    #0"."""
    return f"{row.task} #{row.attempt or 0}"


def _score_change(before: EvaluationRow, after: EvaluationRow) -> float:
    """Compute the score after minus the score before. It is the change of success, and if that is 0
    or unknown, the change of the reward (without rewards, of the loss with its sign changed). It is
    0 if either answer could not be scored."""
    if before.error or after.error:
        return 0.0
    if before.success is not None and after.success is not None:
        change = float(after.success) - float(before.success)
        if change:
            return change
    return score(after) - score(before)


def _changed_item(reading: Reading, change: _Change) -> ChangedItem:
    """Make the item that a page shows for a changed task, with both answers. The prompt gets a
    third of the query's characters."""
    redact = reading.redact
    prompt = turns_of(redact, change.after.prompt)
    prompt_chars = max(reading.query.max_chars // 3, _LEAST_CHARS)
    return ChangedItem(
        task=clip(redact.text(change.after.task), _TASK_CHARS),
        change=short(change.score),
        prompt=shorten_turns(prompt, prompt_chars),
        before=_answer_item(reading, change.before),
        after=_answer_item(reading, change.after),
    )


def _answer_item(reading: Reading, row: EvaluationRow) -> RolloutItem:
    """Make the item for one of the two answers to a changed task. It gets half of the query's
    characters, and lacks the fields that the ChangedItem or the page has already."""
    query = reading.query
    chars = max(query.max_chars // 2, _LEAST_CHARS)
    texts = Texts(chars, with_prompt=False, with_tokens=query.tokens)
    item = rollout_item(reading.redact, row, texts)
    return replace(item, task=None, half=None, group=None, model=None)
