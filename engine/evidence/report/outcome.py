"""Sections on the result of a run: its verdict, and the tasks and skills behind it."""

from engine.evidence.report import blocks, charts
from engine.evidence.report.blocks import Block, Note, Section, Tag
from engine.evidence.report.dossier import Dossier
from engine.evidence.stats.results import TEST, Measure, show, show_change
from engine.evidence.verdict.comparison import Comparison
from engine.home.rows import TERMINAL
from engine.home.sanitize import clip, one_line

_ALERTS = 6  # shown at most
_EXAMPLES = 2  # tasks gained, and as many lost, that Markdown shows too


def headline(dossier: Dossier) -> tuple[str, str]:
    """(the word over the report, the name of the page's colour).

    Depending on the run:
        failed, cancelled or still going on: its state; the colour is "failed" or "running".
        an evaluation of one model: "Evaluated"; the colour is "running".
        any other: its verdict, such as "No difference"; the colour is "no_difference".
    """
    row = dossier.row
    word = dossier.verdict.word
    if row.state in ("failed", "cancelled"):
        return row.state.capitalize(), "failed"
    if row.state not in TERMINAL:
        return row.state.capitalize(), "running"
    if row.kind != "train" and len(dossier.verdict.models) < 2:
        return "Evaluated", "running"
    return word.replace("_", " ").capitalize(), word


def verdict(dossier: Dossier) -> Section:
    """The section with the verdict's sentence, the change with its interval, and remarks."""
    word, _ = headline(dossier)
    comparison = dossier.comparison
    section_blocks: list[Block] = [
        blocks.Paragraph([_summary(dossier, word)], "said", only="page"),
        blocks.Paragraph([dossier.verdict.summary], only="markdown"),
    ]
    if dossier.note:
        section_blocks.append(blocks.Paragraph([clip(dossier.note, 600)], "note", only="page"))
    if comparison and comparison.measure and comparison.outcome.diff is not None:
        section_blocks.append(_effect_figure(comparison, comparison.measure))
        figures = _figures(dossier, comparison, comparison.measure)
        heads = ("", "value", "95 % interval, or why")
        section_blocks.append(blocks.Table(heads, figures, style="figures"))
    notes = _notes(dossier)
    return Section(
        word, "Verdict", [*section_blocks, blocks.Notes(notes)] if notes else section_blocks
    )


def _summary(dossier: Dossier, word: str) -> str:
    """The verdict's sentence for the page, without `word`, which is the headline there.

    A run that goes on has no verdict yet; the sentence then says why.
    """
    verdict = dossier.verdict
    if dossier.row.state not in TERMINAL:
        text = f"No verdict yet: {verdict.comparison.reason or 'the run goes on'}."
    elif verdict.summary.startswith(f"{word}: "):
        text = sentence_case(verdict.summary.removeprefix(f"{word}: "))
    else:
        text = verdict.summary.replace(f": {word}: ", ": ", 1)
    return text.replace(" %", "\u00a0%")  # so that no line breaks before the sign


def sentence_case(text: str) -> str:
    """The text with a capital first letter."""
    return text[:1].upper() + text[1:]


def _effect_figure(comparison: Comparison, measure: Measure) -> blocks.Figure:
    """The change with its interval as a drawing; the caption says what counts as no difference."""
    outcome = comparison.outcome
    is_share = measure == "success"
    low, value, high = (number or 0.0 for number in (outcome.low, outcome.diff, outcome.high))
    effect = charts.Effect(low, value, high, outcome.margin, is_share, measure == "loss")
    label = f"Change {charts.signed(value, is_share)}, 95 % interval"
    ends = f"{show_change(low, measure)} to {show_change(high, measure)}"
    negligible = show_change(outcome.margin, measure).removeprefix("+")
    return blocks.Figure(
        charts.effect_strip(effect, charts.WIDE - 30, label),
        charts.effect_strip(effect, charts.NARROW - 20, label),
        f"{label} {ends}.",
        "The bar is the 95\u00a0% interval of the change. Shaded: changes of less than "
        f"{negligible}{' points' if is_share else ''}, which count as no difference.",
    )


def _figures(
    dossier: Dossier, comparison: Comparison, measure: Measure
) -> list[tuple[str, str, str]]:
    """The numbers of the comparison, as rows of (name, value, remark).

    The rows are the level before, the level after, the number of tasks, the p value and the
    smallest change that would show. A level that was not measured has no row.
    """
    outcome, sides = comparison.outcome, dossier.sides
    names = (sides.before_name, sides.after_name) if sides else ("before", "after")
    numbers = []
    for name, level in zip(names, (comparison.before, comparison.after), strict=True):
        if level is not None:
            failed_note = f", {level.errors} without a score" if level.errors else ""
            numbers.append(
                (
                    name,
                    show(level.value, measure),
                    _span(level.low, level.high, measure) + failed_note,
                )
            )
    p = outcome.p if outcome.p is not None else 1.0  # without a test nothing speaks for a change
    smallest_change = show_change(outcome.detectable, measure).removeprefix("+")
    method = outcome.method.partition(",")[0]  # the test, without the kind of interval
    half_note = "reported on the half that chose nothing" if sides and sides.half == TEST else ""
    return [
        *numbers,
        ("tasks", str(outcome.n), half_note or "paired by task"),
        ("chance of this if equal", "< 0.001" if p < 0.001 else f"{p:.3f}", method),
        (
            "smallest visible change",
            smallest_change + (" points" if measure == "success" else ""),
            "found 4 times in 5",
        ),
    ]


def _span(low: float | None, high: float | None, measure: Measure) -> str:
    return f"{show(low, measure)} to {show(high, measure)}"


def _notes(dossier: Dossier) -> list[Note]:
    """Remarks on a run, where they apply.

    In this order: why it ended, what to do next, what was expected beforehand, warnings about the
    verdict, alerts.
    """
    row, verdict = dossier.row, dossier.verdict
    notes = []
    if row.reason or row.state in ("failed", "cancelled"):
        evidence = f" ({dossier.failure_evidence})" if dossier.failure_evidence else ""
        reason = dossier.redact.text(row.reason) + evidence
        mood = "fail" if row.state in ("failed", "cancelled") else "plain"
        notes.append(Note(clip(reason, 2000), mood, row.reason_kind or row.state))
    hint = dossier.redact.text(str(row.hint))
    if hint:
        latest = dossier.run.latest_checkpoint()
        checkpoint = f"Last complete checkpoint: {latest.name if latest else 'none'}."
        notes.append(Note(f"{clip(hint, 2000)} {checkpoint}", "plain"))
    if verdict.training is not None and verdict.training.expected:
        outcomes = {True: "and so it came", False: "and it came otherwise", None: "still open"}
        expected = verdict.training.expected.replace("_", " ")
        outcome = outcomes[verdict.training.as_expected]
        notes.append(Note(f"Expected beforehand: {expected}; {outcome}.", "plain"))
    # The summary already contains some of the warnings, such as forgotten skills.
    notes += [Note(text) for text in verdict.warnings if text not in verdict.summary]
    alerts = dossier.alerts[:_ALERTS]
    return notes + [Note(f"Alert: {one_line(message, 300)}") for message in alerts]


def models(dossier: Dossier) -> Section | None:
    """The section with the models of an evaluation: each level, and the verdict against the first.

    None for a training run, for a loss, and where nothing was scored.
    """
    evaluation, measure = dossier.verdict.evaluation, dossier.verdict.comparison.measure
    if evaluation is None or measure is None or measure == "loss":
        return None
    levels = [
        (result.model, result.level) for result in evaluation.models if result.level is not None
    ]
    interval_ends = [end for _, level in levels for end in level.interval if end is not None]
    if not interval_ends:
        return None
    floor, top = (0.0, 1.0) if measure == "success" else (min(interval_ends), max(interval_ends))
    comparison_by_model = {contest.model: contest.comparison for contest in evaluation.comparisons}
    rows = []
    for model, level in levels:
        value = level.rounded_value
        low, high = level.interval
        if value is None or low is None or high is None:
            continue
        comparison = comparison_by_model.get(model)
        bar = charts.level_bar(value, low, high, floor, top, "level")
        change = show_change(comparison.difference, measure) if comparison else ""
        verdict_tag = Tag(comparison.outcome.verdict) if comparison else ""
        interval = blocks.Cell(drawing=bar, note=_span(low, high, measure))
        task_and_error_counts = (str(level.tasks), str(level.errors))
        name = dossier.redact.text(model)
        rows.append(
            (name, show(value, measure), interval, change, verdict_tag, *task_and_error_counts)
        )
    heads = ("model", measure, "95 % interval", "change", "verdict", "tasks", "errors")
    styles = ("name", "num level", "bar", "num", "", "num rest", "num rest")
    lead = (
        "Each level with its 95\u00a0% interval; the verdicts compare with the first model, "
        "corrected for their number."
    )
    table = blocks.Table(heads, rows, styles, "models")
    return Section("Models, on the same tasks", "Models", [table], [lead])


def tasks(dossier: Dossier) -> Section | None:
    """The section on how many tasks were gained, lost and unchanged.

    None without a comparison, and for a loss, where no task counts as gained or lost.
    """
    comparison = dossier.comparison
    if comparison is None or comparison.outcome.diff is None or comparison.measure == "loss":
        return None
    outcome = comparison.outcome
    gained, lost = len(outcome.gained), len(outcome.lost)
    unchanged_count = outcome.n - gained - lost
    solved_both_times = _solved_twice(dossier) if comparison.measure == "success" else None
    unchanged = [("unchanged", unchanged_count, "same")]
    if solved_both_times is not None:
        unchanged = [
            ("right both times", solved_both_times, "right"),
            ("wrong both times", unchanged_count - solved_both_times, "same"),
        ]
    shares = [("gained", gained, "gained"), *unchanged, ("lost", lost, "lost")]
    panel = blocks.Panel([blocks.Shares(outcome.n, shares)])
    lead = f"The same {outcome.n} tasks before and after. Only those that changed carry evidence."
    return Section("Task by task", "What changed", [panel], [lead])


def _solved_twice(dossier: Dossier) -> int | None:
    """How many tasks were solved both before and after.

    None where a task has several attempts, some of which may be right and others wrong.
    """
    sides = dossier.sides
    # As many rows as tasks means one attempt at each.
    if sides is None or len({row.task for row in sides.before}) != len(sides.before):
        return None
    before, after = (
        {row.task for row in rows if not row.error and row.success}
        for rows in (sides.before, sides.after)
    )
    return len(before & after)


def answers(dossier: Dossier) -> Section | None:
    """The section with some tasks whose result changed, and both answers to them.

    None without such tasks, and for a loss, where there are no answers.
    """
    sides, flips = dossier.sides, dossier.flips
    if sides is None or (dossier.comparison and dossier.comparison.measure == "loss"):
        return None
    names = (sides.before_name, sides.after_name)
    answer_blocks = [
        blocks.Answers(direction, example, names, only="both" if index < _EXAMPLES else "page")
        for direction, examples in (("gained", flips.gained), ("lost", flips.lost))
        for index, example in enumerate(examples)
    ]
    lead = (
        "Tasks whose result changed, as the model answered them. These are words of a model, not "
        "of this report."
    )
    return Section("Side by side", "", answer_blocks, [lead]) if answer_blocks else None


def skills(dossier: Dossier) -> Section | None:
    """The section on earlier skills by battery of questions. None where they were not measured."""
    kept = dossier.verdict.kept_skills
    if kept is None or not kept.every_battery:
        return None
    lead = (
        "The same questions before training and with the checkpoint chosen: skills that were not "
        "trained, and may have been lost."
    )
    batteries = blocks.Skills(kept.every_battery)
    return Section("What it could do before", "Kept skills", [batteries], [lead])
