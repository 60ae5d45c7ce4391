"""The same held-out tasks before and after training, or by two models: `pick="changed"`."""

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


@dataclass(frozen=True)
class ChangedItem:
    """One task whose score changed, by `change`, with both answers."""

    task: str
    change: float
    prompt: list[Turn]
    before: RolloutItem
    after: RolloutItem


@dataclass(frozen=True)
class ChangedPage(ReplyBase):
    """Tasks whose score changed, the largest change first; `matching` counts those on all pages.

    Attributes:
        step: the evaluated step, or the index of the model, that is held against the other.
        before, after: what is compared, in words.
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
class _Sides:
    """Two evaluations of the same tasks, their names, and the step or model of the second.

    Attributes:
        skipped: damaged lines in the files of both.
    """

    before: list[EvaluationRow]
    after: list[EvaluationRow]
    names: tuple[str, str]
    step: int
    skipped: int


def changed_page(reading: Reading) -> ChangedPage:
    """The tasks that are scored otherwise by the second evaluation than by the first.

    Raises UserError NO_EVALUATION or BAD_ARGUMENT where there are no two evaluations.
    """
    sides = _sides_of(reading)
    chosen = {_attempt_key(row) for row in matching(sides.after, reading.query.where)}
    earlier = {_attempt_key(row): row for row in sides.before}
    in_both = [row for row in sides.after if _attempt_key(row) in earlier]
    pairs = [(earlier[_attempt_key(row)], row) for row in in_both if _attempt_key(row) in chosen]
    pairs = [pair for pair in pairs if _score_change(*pair)]
    pairs.sort(key=lambda pair: (-abs(_score_change(*pair)), _attempt_key(pair[1])))
    gained = sum(_score_change(*pair) > 0 for pair in pairs)
    before, after = sides.names
    tasks = len({_attempt_key(row) for row in in_both})
    page = ChangedPage(
        summary=f"{len(pairs)} of {tasks} tasks changed between {before} and {after}: {gained} for "
        f"the better, {len(pairs) - gained} for the worse.",
        run_id=reading.row.run_id,
        step=sides.step,
        before=before,
        after=after,
        matching=len(pairs),
        changed=[],
    )
    fitted = fit(
        reading,
        [_changed_item(reading, *pair) for pair in reading.shown_part(pairs)],
        len(pairs),
        mark_of(sides.step),
        lambda items: replace(page, changed=items),
        with_shorter_texts,
    )
    return replace(
        page,
        changed=fitted.items,
        warnings=fitted.warnings + skipped_lines(sides.skipped),
        next_cursor=fitted.next_cursor,
    )


def _sides_of(reading: Reading) -> _Sides:
    """What is compared: two steps of training, or the first model with the one asked for."""
    if reading.row.kind == "train":
        return _steps_of_training(reading)
    run, models = reading.run, reading.models
    asked = model_answers(reading)
    if len(models) < 2:
        raise UserError(
            "BAD_ARGUMENT",
            f"{reading.row.run_id} evaluated one model, so nothing can have changed",
            hint="Evaluate two models in one call, or pick worst.",
            field="pick",
        )
    other = 0 if asked.step else 1
    before, after = (EvaluationRow.read_file(run.model_evals(i)) for i in (other, asked.step))
    names = (models[other], models[asked.step])
    skipped = before.skipped + after.skipped
    return _Sides(before.records, after.records, names, asked.step, skipped)


def _steps_of_training(reading: Reading) -> _Sides:
    """Step 0 and the step asked for; -1 is the one that the run's verdict is about."""
    run, row, step = reading.run, reading.row, reading.start.step
    steps = [evaluated for evaluated in run.eval_steps() if evaluated > 0]
    if not steps or 0 not in run.eval_steps():
        raise UserError(
            "NO_EVALUATION",
            f"{row.run_id} has no held-out evaluation after step 0 yet (it is {row.state})",
            hint=wait_hint(row.run_id, until="next_eval"),
        )
    chosen = chosen_step(steps, step, "held-out answers") if step != -1 else result_step(run)
    chosen = steps[-1] if chosen is None else chosen
    before, after = (EvaluationRow.read_file(run.evals(each)) for each in (0, chosen))
    names = ("step 0", f"step {chosen}")
    return _Sides(before.records, after.records, names, chosen, before.skipped + after.skipped)


def _attempt_key(row: EvaluationRow) -> str:
    """The same text for one attempt at one task in both evaluations."""
    return f"{row.task} #{row.attempt or 0}"


def _score_change(old: EvaluationRow, new: EvaluationRow) -> float:
    """Change of success, or where it is the same of reward; 0 when neither changed."""
    if old.error or new.error:
        return 0.0
    if old.success is not None and new.success is not None:
        change = float(new.success) - float(old.success)
        if change:
            return change
    return score(new) - score(old)


def _changed_item(reading: Reading, old: EvaluationRow, new: EvaluationRow) -> ChangedItem:
    """One task with its answers on both sides, in the characters of one rollout."""
    query, redact = reading.query, reading.redact
    texts = Texts(max(query.max_chars // 2, 40), prompt=False, tokens=query.tokens)
    before, after = (
        # What both sides share stands once, at the task.
        replace(rollout_item(redact, row, texts), task=None, half=None, group=None, model=None)
        for row in (old, new)
    )
    return ChangedItem(
        task=clip(redact.text(new.task), 120),
        change=short(_score_change(old, new)),
        prompt=within(turns_of(redact, new.prompt), max(query.max_chars // 3, 40)),
        before=before,
        after=after,
    )
