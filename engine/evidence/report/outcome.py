"""The report's sections on the result of a run: its verdict, and the tasks and skills behind it."""

from collections.abc import Sequence

from engine.evidence.report import blocks, charts
from engine.evidence.report.blocks import Block, Note, Section, Tag
from engine.evidence.report.dossier import Dossier
from engine.evidence.report.values import signed
from engine.evidence.stats.results import TEST, Level, Measure, show, show_change
from engine.evidence.verdict.comparison import Comparison
from engine.evidence.verdict.flips import FlipExample
from engine.evidence.verdict.verdict import EvaluationFacts
from engine.home.rows import TERMINAL
from engine.home.sanitize import Redactor, clip, one_line
from engine.records.lines.evaluation_row import EvaluationRow

_ModelRow = tuple[str | blocks.Cell | Tag, ...]  # a row of the table of models

_ALERTS = 6  # most alerts that are shown
_ALERT_CHARS = 300  # most characters of each alert
_NOTE_CHARS = 600  # most characters of the user's note
_REASON_CHARS = 2000  # most characters of the reason why a run ended, and of the hint
_MARKDOWN_EXAMPLES = 2  # most gained tasks that Markdown shows too, and most lost ones


def headline(dossier: Dossier) -> tuple[str, str]:
    """(the word above the report, the name of the page's colour).

    The word is the verdict, such as "No difference"; for a run that failed, was cancelled or is
    under way its state; for an evaluation of one model "Evaluated". The colour is "failed",
    "running" (also for "Evaluated") or named after the verdict.
    """
    row = dossier.row
    if row.state in ("failed", "cancelled"):
        return row.state.capitalize(), "failed"
    if row.state not in TERMINAL:
        return row.state.capitalize(), "running"
    if row.kind != "train" and len(dossier.verdict.models) < 2:
        return "Evaluated", "running"
    verdict_word = dossier.verdict.word
    return verdict_word.replace("_", " ").capitalize(), verdict_word


def verdict(dossier: Dossier) -> Section:
    """The section with the verdict's sentence, the change with its interval, and notes."""
    word, _ = headline(dossier)
    comparison = dossier.comparison
    section_blocks: list[Block] = [
        blocks.Paragraph([_summary(dossier, word)], style="verdict-text", shown_in="page"),
        blocks.Paragraph([dossier.verdict.summary], shown_in="markdown"),
    ]
    if dossier.reported:
        section_blocks.append(blocks.Paragraph([dossier.reported.sentence]))
    if dossier.note:
        note = clip(dossier.note, _NOTE_CHARS)
        section_blocks.append(blocks.Paragraph([note], style="note", shown_in="page"))
    if comparison and comparison.measure and comparison.outcome.diff is not None:
        section_blocks += _change_blocks(dossier, comparison, comparison.measure)
    notes = _notes(dossier)
    if notes:
        section_blocks.append(blocks.Notes(notes))
    return Section(title=word, short="Verdict", blocks=section_blocks)


def _change_blocks(dossier: Dossier, comparison: Comparison, measure: Measure) -> list[Block]:
    """The blocks on the measured change: a drawing, and a table of its numbers. `measure` is what
    was compared, such as "success"."""
    heads = ("", "value", "95 % interval, or why")
    rows = _figures(dossier, comparison, measure)
    return [_effect_figure(comparison, measure), blocks.Table(heads, rows, style="figures")]


def _summary(dossier: Dossier, word: str) -> str:
    """The verdict's sentence for the page, without `word`, because the headline shows that.

    A run under way has no verdict yet; the sentence then says why.
    """
    summary = dossier.verdict.summary
    if dossier.row.state not in TERMINAL:
        reason = dossier.verdict.comparison.reason or "the run goes on"
        text = f"No verdict yet: {reason}."
    elif summary.startswith(f"{word}: "):
        text = sentence_case(summary.removeprefix(f"{word}: "))
    else:  # the word may follow the run's id, as in "r-1: Better: ..."
        text = summary.replace(f": {word}: ", ": ", 1)
    return text.replace(" %", "\u00a0%")  # a blank at which lines do not break


def sentence_case(text: str) -> str:
    """The text with a capital first letter."""
    return text[:1].upper() + text[1:]


def _effect_figure(comparison: Comparison, measure: Measure) -> blocks.Figure:
    """The drawing of a change with its interval; the caption says which changes count as no
    difference.

    `measure` is what `comparison` compares; it decides how numbers are written.
    """
    effect = _effect(comparison, measure)
    label = f"Change {signed(effect.value, effect.is_share)}, 95 % interval"
    interval = f"{show_change(effect.low, measure)} to {show_change(effect.high, measure)}"
    # The box of the verdict has more padding than other boxes: 30 pixels, on a phone 20.
    return blocks.Figure(
        wide=charts.effect_strip(effect, charts.WIDE - 30, label),
        narrow=charts.effect_strip(effect, charts.NARROW - 20, label),
        text=f"{label} {interval}.",
        caption="The bar is the 95\u00a0% interval of the change. Shaded: changes of less than "
        f"{_without_sign(effect.margin, measure)}, which count as no difference.",
    )


def _effect(comparison: Comparison, measure: Measure) -> charts.Effect:
    """The change with its interval, to be drawn. Numbers that were not measured are 0."""
    outcome = comparison.outcome
    return charts.Effect(
        low=outcome.low or 0.0,
        value=outcome.diff or 0.0,
        high=outcome.high or 0.0,
        margin=outcome.margin,
        is_share=measure == "success",
        lower_is_better=measure == "loss",
    )


def _without_sign(change: float | None, measure: Measure) -> str:
    """The size of a change that is not negative, as text: "5.0 points" for success, "0.02" for a
    reward or a loss, "?" (with the unit) for None."""
    text = show_change(change, measure).removeprefix("+")
    return f"{text} points" if measure == "success" else text


def _figures(
    dossier: Dossier, comparison: Comparison, measure: Measure
) -> list[tuple[str, str, str]]:
    """The numbers of the comparison, as rows of (name, value, remark).

    First the mean results (levels) before and after, if they were measured. Then the number of
    tasks, the p value, and the smallest change that the comparison would detect. Training runs
    report on half of the held-out tasks (TEST), because the other half chose the checkpoint, or on
    all of them if dev tasks chose it.
    """
    outcome, sides = comparison.outcome, dossier.sides
    if sides is not None and sides.dev:
        tasks_remark = "all held-out tasks: dev tasks chose the checkpoint"
    elif sides is not None and sides.half == TEST:
        tasks_remark = "reported on the half that chose nothing"
    else:
        tasks_remark = "paired by task"
    test_name, _, _ = outcome.method.partition(",")  # the rest names the kind of interval
    smallest_change = _without_sign(outcome.detectable, measure)
    return [
        *_level_figures(dossier, comparison, measure),
        ("tasks", str(outcome.n), tasks_remark),
        ("chance of this if equal", _p_text(outcome.p), test_name),
        # At the power of 80 % that the statistics assume.
        ("smallest visible change", smallest_change, "found 4 times in 5"),
    ]


def _p_text(p: float | None) -> str:
    """A p value as text. Without a test (None) it is shown as 1: nothing speaks for a change."""
    p = 1.0 if p is None else p
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _level_figures(
    dossier: Dossier, comparison: Comparison, measure: Measure
) -> list[tuple[str, str, str]]:
    """The mean results (levels) of both sides, as rows of (name, value, interval).

    A result that was not measured has no row.
    """
    sides = dossier.sides
    names = (sides.before_name, sides.after_name) if sides else ("before", "after")
    levels = (comparison.before, comparison.after)
    figures = []
    for name, level in zip(names, levels, strict=True):
        if level is not None:
            remark = _interval_text(level.low, level.high, measure)
            if level.errors:
                remark += f", {level.errors} without a score"
            figures.append((name, show(level.value, measure), remark))
    return figures


def _interval_text(low: float | None, high: float | None, measure: Measure) -> str:
    """An interval as text, "low to high", in the unit of the measure."""
    return f"{show(low, measure)} to {show(high, measure)}"


def _notes(dossier: Dossier) -> list[Note]:
    """Notes on a run, in this order: why it ended, what to do next, what was expected beforehand,
    warnings about the verdict, alerts."""
    warnings = dossier.verdict.warnings
    return [
        *_end_notes(dossier),
        *_hint_notes(dossier),
        *_expectation_notes(dossier),
        # The summary already contains some of the warnings, such as forgotten skills.
        *(Note(text) for text in warnings if text not in dossier.verdict.summary),
        *(Note(f"Alert: {one_line(alert, _ALERT_CHARS)}") for alert in dossier.alerts[:_ALERTS]),
    ]


def _end_notes(dossier: Dossier) -> list[Note]:
    """A list with one note on why the run ended, followed by the evidence of its failure, if there
    is any, in brackets. The note has the mood "fail" if the run failed or was cancelled.

    Returns [] for a run that ended well and gave no reason.
    """
    row = dossier.row
    ended_badly = row.state in ("failed", "cancelled")
    if not row.reason and not ended_badly:
        return []
    # It may be "": then the label and the evidence alone say how the run ended.
    reason = dossier.redact.text(row.reason)
    if dossier.failure_evidence:
        reason += f" ({dossier.failure_evidence})"
    mood = "fail" if ended_badly else "plain"
    label = row.reason_kind or row.state
    return [Note(clip(reason, _REASON_CHARS), mood=mood, label=label)]


def _hint_notes(dossier: Dossier) -> list[Note]:
    """A note on what to do next, and from which checkpoint. Returns [] if there is no hint."""
    hint_text = dossier.redact.text(str(dossier.row.hint))  # "" if there is no hint
    if not hint_text:
        return []
    latest = dossier.run.latest_checkpoint()
    checkpoint = f"Last complete checkpoint: {latest.name if latest else 'none'}."
    return [Note(f"{clip(hint_text, _REASON_CHARS)} {checkpoint}", mood="plain")]


def _expectation_notes(dossier: Dossier) -> list[Note]:
    """A note on which verdict was expected beforehand, and whether it came true. Returns [] if none
    was."""
    training = dossier.verdict.training
    if training is None or not training.expected:
        return []
    endings = {True: "and so it came", False: "and it came otherwise", None: "still open"}
    expected = training.expected.replace("_", " ")
    ending = endings[training.as_expected]
    return [Note(f"Expected beforehand: {expected}; {ending}.", mood="plain")]


def models(dossier: Dossier) -> Section | None:
    """The section with the models of an evaluation.

    Each is shown with its mean result (its level) and the verdict against the first model. Returns
    None for a training run, for models compared by their loss, and if nothing was scored.
    """
    evaluation, measure = dossier.verdict.evaluation, dossier.verdict.comparison.measure
    if evaluation is None or measure is None or measure == "loss":
        return None
    rows = _model_rows(evaluation, measure, dossier.redact)
    if rows is None:
        return None
    heads = ("model", measure, "95 % interval", "change", "verdict", "tasks", "errors")
    styles = ("name", "num level", "bar", "num", "", "num rest", "num rest")
    lead = (
        "Each level with its 95\u00a0% interval; the verdicts compare with the first model, "
        "corrected for their number."
    )
    table = blocks.Table(heads, rows, styles, style="models")
    return Section(title="Models, on the same tasks", short="Models", blocks=[table], lead=[lead])


def _model_rows(
    evaluation: EvaluationFacts, measure: Measure, redact: Redactor
) -> list[_ModelRow] | None:
    """A table row for each model whose mean result (its level) has an interval.

    Returns None if no level has one. `redact` removes secrets from the names of models.
    """
    levels = [(facts.model, facts.level) for facts in evaluation.models if facts.level is not None]
    axis = _axis_of_levels([level for _, level in levels], measure)
    if axis is None:
        return None
    comparison_by_model = {pair.model: pair.comparison for pair in evaluation.comparisons}
    rows = []
    for model, level in levels:
        comparison = comparison_by_model.get(model)
        row = _model_row(redact.text(model), level, comparison, axis, measure)
        if row is not None:
            rows.append(row)
    return rows


def _axis_of_levels(levels: Sequence[Level], measure: Measure) -> tuple[float, float] | None:
    """(lowest, highest) value of the axis on which all levels are drawn. None if no level has an
    interval."""
    ends = [end for level in levels for end in level.interval if end is not None]
    if not ends:
        return None
    return (0.0, 1.0) if measure == "success" else (min(ends), max(ends))


def _model_row(
    name: str,
    level: Level,
    comparison: Comparison | None,
    axis: tuple[float, float],
    measure: Measure,
) -> _ModelRow | None:
    """The row of one model in the table of models. Returns None if its level has no interval.

    `level` is the model's mean result; `comparison` compares it with the first model and is None
    for the first model itself; `axis` is the lowest and the highest value of the drawing.
    """
    interval = _interval_cell(level, axis, measure)
    if interval is None:
        return None
    change, verdict_tag = "", ""
    if comparison:
        change = show_change(comparison.difference, measure)
        verdict_tag = Tag(comparison.outcome.verdict)
    value = show(level.rounded_value, measure)
    return (name, value, interval, change, verdict_tag, str(level.tasks), str(level.errors))


def _interval_cell(level: Level, axis: tuple[float, float], measure: Measure) -> blocks.Cell | None:
    """A cell with a drawing of a model's mean result (its level) and the interval.

    Returns None if either was not measured. `axis` is the lowest and the highest value of the
    drawing.
    """
    value = level.rounded_value
    low, high = level.interval
    if value is None or low is None or high is None:
        return None
    bar = charts.level_bar(value, low, high, axis, label="level")
    return blocks.Cell(drawing=bar, note=_interval_text(low, high, measure))


def tasks(dossier: Dossier) -> Section | None:
    """The section on how many tasks were gained, lost and unchanged.

    Returns None if nothing was compared, and for a comparison by loss, in which no task counts as
    gained or lost.
    """
    comparison = dossier.comparison
    if comparison is None or comparison.outcome.diff is None or comparison.measure == "loss":
        return None
    outcome = comparison.outcome
    gained, lost = len(outcome.gained), len(outcome.lost)
    unchanged = outcome.n - gained - lost
    solved_twice = _solved_twice(dossier) if comparison.measure == "success" else None
    parts = [  # (what happened to the tasks, how many they are, CSS class of their colour)
        ("gained", gained, "gained"),
        *_unchanged_parts(unchanged, solved_twice),
        ("lost", lost, "lost"),
    ]
    panel = blocks.Panel([blocks.Shares(outcome.n, parts)])
    lead = f"The same {outcome.n} tasks before and after. Only those that changed carry evidence."
    return Section(title="Task by task", short="What changed", blocks=[panel], lead=[lead])


def _unchanged_parts(
    unchanged_count: int, solved_twice_count: int | None
) -> list[tuple[str, int, str]]:
    """The tasks whose result did not change, as parts (what happened, how many tasks, CSS class).

    `solved_twice_count` tasks were solved before and after: the rest are wrong both times. If it is
    None (not known), all are one part.
    """
    if solved_twice_count is None:
        return [("unchanged", unchanged_count, "same")]
    return [
        ("right both times", solved_twice_count, "right"),
        ("wrong both times", unchanged_count - solved_twice_count, "same"),
    ]


def _solved_twice(dossier: Dossier) -> int | None:
    """How many tasks were solved both before and after.

    Returns None if a task has several attempts, of which some may be right and others wrong.
    """
    sides = dossier.sides
    if sides is None:
        return None
    task_count = len({row.task for row in sides.before})
    if task_count != len(sides.before):  # more rows than tasks: several attempts
        return None
    return len(_solved_tasks(sides.before) & _solved_tasks(sides.after))


def _solved_tasks(rows: Sequence[EvaluationRow]) -> set[str]:
    """The ids of the tasks that were solved in at least one of these rows."""
    return {row.task for row in rows if not row.error and row.success}


def answers(dossier: Dossier) -> Section | None:
    """The section with some tasks whose result changed, and both answers to each.

    Returns None if there are no such tasks, for an evaluation of one model, and if models were
    compared by their loss, which involves no answers.
    """
    sides, flips = dossier.sides, dossier.flips
    measure = dossier.comparison.measure if dossier.comparison else None
    if sides is None or measure == "loss":
        return None
    names = (sides.before_name, sides.after_name)
    answer_blocks = [
        *_answer_blocks("gained", flips.gained, names),
        *_answer_blocks("lost", flips.lost, names),
    ]
    if not answer_blocks:
        return None
    lead = (
        "Tasks whose result changed, as the model answered them. These are words of a model, not "
        "of this report."
    )
    return Section(title="Side by side", short="", blocks=answer_blocks, lead=[lead])


def _answer_blocks(
    direction: str, examples: Sequence[FlipExample], names: tuple[str, str]
) -> list[Block]:
    """A block for each task that was gained or lost (`direction`), with both answers to it.

    `names` are the names of the models before and after.
    """
    answer_blocks: list[Block] = []
    for index, example in enumerate(examples):
        # Markdown is limited in length, so it shows only the first examples.
        shown_in = "both" if index < _MARKDOWN_EXAMPLES else "page"
        answer_blocks.append(blocks.Answers(direction, example, names, shown_in=shown_in))
    return answer_blocks


def skills(dossier: Dossier) -> Section | None:
    """The section on skills that the model had before training. Returns None if they were not
    measured.

    Each skill is measured with a battery (a set of questions).
    """
    kept_skills = dossier.verdict.kept_skills
    if kept_skills is None or not kept_skills.every_battery:
        return None
    lead = (
        "The same questions before training and with the checkpoint chosen: skills that were not "
        "trained, and may have been lost."
    )
    if kept_skills.replayed is not None:
        lead += f" {kept_skills.replayed.sentence}"
    batteries = blocks.Skills(kept_skills.every_battery)
    return Section(
        title="What it could do before", short="Kept skills", blocks=[batteries], lead=[lead]
    )
