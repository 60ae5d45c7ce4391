"""The report's section on the course of a run: held-out results and metrics over its steps."""

from collections.abc import Sequence

from engine.core.metrics import METRICS
from engine.evidence.report import blocks, charts, stacked
from engine.evidence.report.dossier import Dossier
from engine.evidence.stats.results import TEST
from engine.evidence.verdict.holdout_reuse import HoldoutUse
from engine.evidence.verdict.sides import checkpoint_step
from engine.home.halves import ChoosingHalf, choosing
from engine.records.lines.curves import main_columns, short, spark

_SMALL_CHARTS = 9  # most small charts that are drawn
_ROWS = 14  # most metrics in the table of the Markdown report


def curves(dossier: Dossier) -> blocks.Section | None:
    """The section with held-out results and metrics over the run. Returns None if there is nothing
    to show.

    The HTML page draws curves. The Markdown report has a table with the first, last, lowest and
    highest value of each metric, and a tiny curve of text characters.
    """
    section_blocks: list[blocks.Block] = []
    lead: list[str] = []
    main_chart = _main_chart(dossier)
    if main_chart:
        section_blocks.append(main_chart)
        lead.append(_held_out_line(dossier))
    if dossier.row.kind == "train":  # an evaluation has one line per model, which is no curve
        section_blocks += _group_panel(dossier)
        small_charts = _small_charts(dossier)
        if small_charts:
            section_blocks.append(blocks.Panel(small_charts, grid=True))
        rows = _curve_rows(dossier)
        if rows:
            heads = ("metric", "first", "last", "min", "max", "over the run")
            section_blocks.append(blocks.Table(heads, rows, shown_in="markdown"))
    if not section_blocks:
        return None
    return blocks.Section(title="Over the run", short="Curves", blocks=section_blocks, lead=lead)


def _held_out_line(dossier: Dossier) -> str:
    """The sentences on what the held-out tasks decide in this run, and how often they were used to
    choose.

    The second part is left out if they were never used, and for an evaluation.
    """
    text = _choice_text(choosing(dossier.run))
    training = dossier.verdict.training
    if training is None or not training.holdout_use.total:
        return text
    holdout_use = training.holdout_use
    return (
        f"{text} These held-out tasks have been used to choose {holdout_use.total} times up to "
        f"this run: {_uses_text(holdout_use)}."
    )


def _choice_text(choosing_half: ChoosingHalf | None) -> str:
    """The sentences on which tasks choose the best checkpoint, and on which it is reported.

    `choosing_half` are the tasks that choose: dev tasks, or one half of the held-out tasks. None if
    their number is not known.
    """
    if choosing_half and choosing_half.side == "dev":
        return (
            f"The best checkpoint is chosen on {choosing_half.tasks} dev tasks, which the curves "
            "below are of, and reported on the held-out tasks, which chose nothing."
        )
    half_text = ""
    if choosing_half:
        half_text = f" ({choosing_half.tasks} of {choosing_half.of}, which the curves below are of)"
    return (
        "What the held-out tasks said while it trained. The best checkpoint is chosen on one half "
        f"of them{half_text} and reported on the other."
    )


def _uses_text(holdout_use: HoldoutUse) -> str:
    """What held-out tasks were used for, such as "2 runs judged, 8 checkpoints compared"."""
    runs = "1 run" if holdout_use.judged == 1 else f"{holdout_use.judged} runs"
    text = f"{runs} judged, {holdout_use.checkpoints} checkpoints compared"
    if holdout_use.evaluations:
        text += f", {holdout_use.evaluations} models evaluated"
    return text


def _main_chart(dossier: Dossier) -> blocks.Panel | None:
    """The large chart of the held-out results.

    Returns None if there are fewer than two evaluations, or no held-out metric.
    """
    name = _held_out_name(dossier)
    if len(dossier.held_out_results) < 2 or not name:
        return None
    curve = _held_out_curve(dossier, is_share=name == "heldout_success")
    title = f"Held-out {name.removeprefix('heldout_')}"
    wide = charts.line_chart(curve, charts.WIDE, height=300, label=title)
    narrow = charts.line_chart(curve, charts.NARROW, height=250, label=title)
    return blocks.Panel([blocks.Figure(wide, narrow, legend=_legend(curve))], title=title)


def _held_out_curve(dossier: Dossier, is_share: bool) -> charts.Curve:
    """The held-out results over the steps, with their intervals and a line at the best step.

    Marks show the results at step 0 and at the best step on the half of the tasks that did not
    choose the best step.
    """
    results = dossier.held_out_results
    metrics_lines = dossier.metrics.lines
    best_step = _best_step(dossier)
    return charts.Curve(
        points=[(result.step, result.value) for result in results],
        band=[
            (result.step, result.interval.low, result.interval.high)
            for result in results
            if result.interval
        ],
        marks=_reported_marks(dossier),
        is_share=is_share,
        line_at=best_step,
        line_label=f"best: step {best_step}",
        last_step=metrics_lines[-1]["step"] if metrics_lines else None,
    )


def _best_step(dossier: Dossier) -> int | None:
    """The step of the run's best checkpoint; None if there is none."""
    folder = dossier.run.resolve_checkpoint("best")
    return None if folder is None else checkpoint_step(folder)


def _legend(curve: charts.Curve) -> list[tuple[str, str]]:
    """The legend of the held-out chart: (CSS class, meaning) of each thing that is drawn."""
    legend = [("choosing", "tasks that choose")]
    if curve.band:
        legend.append(("interval", "95 % interval"))
    if curve.marks:
        legend.append(("reported", "tasks that are reported"))
    return legend


def _reported_marks(dossier: Dossier) -> list[tuple[float, float, float, float]]:
    """The results at step 0 and at the best step, as (step, low, value, high).

    They are measured on the test half of the held-out tasks; the other half chose the best step.
    Returns [] if the tasks were not split into halves, and before a checkpoint was evaluated.
    """
    comparison, sides = dossier.comparison, dossier.sides
    if comparison is None or sides is None or sides.half != TEST or sides.step is None:
        return []
    marks: list[tuple[float, float, float, float]] = []
    for step, level in ((0, comparison.before), (sides.step, comparison.after)):
        if level is not None and level.value is not None:
            # A level with a value has an interval; `or 0.0` only satisfies the type checker.
            marks.append((step, level.low or 0.0, level.value, level.high or 0.0))
    return marks


def _group_panel(dossier: Dossier) -> list[blocks.Panel]:
    """The panel with a chart of the kinds of groups at each step (they teach, are too easy or too
    hard), as a list of one. Only the HTML page shows it. Returns [] for a run without groups, such
    as SFT."""
    wide = stacked.group_chart(dossier.metrics.lines, charts.WIDE, height=220)
    if not wide:
        return []
    narrow = stacked.group_chart(dossier.metrics.lines, charts.NARROW, height=200)
    figure = blocks.Figure(wide, narrow, legend=stacked.LEGEND)
    return [blocks.Panel([figure], title="What the groups had to teach", shown_in="page")]


def _held_out_name(dossier: Dossier) -> str:
    """The name of the held-out metric that the verdict is about, such as "heldout_success".

    Without a verdict it is the first of success, reward and loss that was measured; "" if none was.
    """
    measure = dossier.comparison.measure if dossier.comparison else None  # of the verdict
    if measure:
        return f"heldout_{measure}"
    for name in ("heldout_success", "heldout_reward", "heldout_loss"):
        if dossier.metrics.curve(name):
            return name
    return ""


def _small_charts(dossier: Dossier) -> list[blocks.Panel]:
    """A small chart with an explanation for each main metric that is not in the large chart.

    At most `_SMALL_CHARTS` of them. A metric with fewer than two values gets none.
    """
    in_large_chart = {_held_out_name(dossier), "heldout_reward"}
    names = [name for name in dossier.metrics.columns if name not in in_large_chart]
    panels = []
    for name in main_columns(names, limit=len(names)):  # all: some may have no curve to draw
        points = dossier.metrics.curve(name)
        if len(points) > 1:  # a line needs two
            panels.append(_small_chart(name, points))
    return panels[:_SMALL_CHARTS]


def _small_chart(name: str, points: Sequence[charts.Point]) -> blocks.Panel:
    """A small chart of one metric, given as (step, value), below a sentence on what the metric
    means."""
    metric = METRICS.get(name)  # None for a metric that the engine does not define
    is_share = metric is not None and metric.unit == "share"
    curve = charts.Curve(points, is_share=is_share, from_zero=is_share)
    # Without the backticks, which mark names in Markdown.
    meaning = metric.meaning.replace("`", "") if metric else _meaning_of_env_metric(name)
    drawing = blocks.Figure(charts.line_chart(curve, charts.NARROW, height=200, label=name))
    return blocks.Panel([blocks.Paragraph([meaning]), drawing], title=name)


def _meaning_of_env_metric(name: str) -> str:
    """The meaning of a metric that the engine does not define, as it comes from the environment.
    With the prefix "heldout_" it is measured on the held-out tasks that choose the checkpoint."""
    if name.startswith("heldout_"):
        return f"{name.removeprefix('heldout_')}, on the held-out tasks that choose."
    return "A metric of the environment."


def _curve_rows(dossier: Dossier) -> list[Sequence[str]]:
    """A table row per main metric: name, first, last, lowest and highest value, and the curve as
    text.

    A metric with fewer than two values has no row.
    """
    rows = []
    for name in main_columns(dossier.metrics.columns, _ROWS):
        values = [value for _, value in dossier.metrics.curve(name)]
        if len(values) > 1:
            figures = (values[0], values[-1], min(values), max(values))
            figure_texts = [str(short(figure)) for figure in figures]
            rows.append([name, *figure_texts, spark(values)])
    return rows
