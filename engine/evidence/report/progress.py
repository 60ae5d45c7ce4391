"""The section on a run while it went on: held-out results and metrics over its steps."""

from collections.abc import Sequence

from engine.core.metrics import METRICS
from engine.evidence.report import blocks, charts
from engine.evidence.report.dossier import Dossier
from engine.evidence.stats.results import TEST
from engine.home.halves import choosing
from engine.records.lines.curves import main_columns, short, spark

_SMALL_CHARTS = 9
_ROWS = 14  # metrics in the table


def curves(dossier: Dossier) -> blocks.Section | None:
    """Held-out results and metrics over the run, drawn; in Markdown with their ends and a spark."""
    main = _main_chart(dossier)
    parts: list[blocks.Block] = [main] if main else []
    if dossier.row.kind == "train":  # one line per model is no curve
        if small := _small_charts(dossier):
            parts.append(blocks.Panel(small, grid=True))
        heads = ("metric", "first", "last", "min", "max", "over the run")
        if rows := _curve_rows(dossier):
            parts.append(blocks.Table(heads, rows, only="markdown"))
    lead = [_held_out_line(dossier)] if main else []
    return blocks.Section("Over the run", "Curves", parts, lead) if parts else None


def _held_out_line(dossier: Dossier) -> str:
    """What the held-out tasks decide here, and how often they have decided something."""
    chosen = choosing(dossier.run)
    half = f" ({chosen.tasks} of {chosen.of}, which the curves below are of)" if chosen else ""
    text = (
        "What the held-out tasks said while it trained. The best checkpoint is chosen on one half "
        f"of them{half} and reported on the other."
    )
    training = dossier.verdict.training
    if training is None or not training.holdout_use.total:
        return text
    use = training.holdout_use
    evaluated = f", {use.evaluations} models evaluated" if use.evaluations else ""
    runs = "1 run" if use.judged == 1 else f"{use.judged} runs"
    return (
        f"{text} These held-out tasks have been used to choose {use.total} times up to this run: "
        f"{runs} judged, {use.checkpoints} checkpoints compared{evaluated}."
    )


def _main_chart(dossier: Dossier) -> blocks.Panel | None:
    """Held-out results over the run, with their noise band and the reported half."""
    checked, name = dossier.checked, _held_out_name(dossier)
    if len(checked) < 2 or not name:
        return None
    marks = _reported_marks(dossier)
    best = dossier.run.resolve_checkpoint("best")
    step = int(best.name.rpartition("_")[2]) if best else None
    curve = charts.Curve(
        points=[(item.step, item.value) for item in checked],
        band=[
            (item.step, item.interval.low, item.interval.high) for item in checked if item.interval
        ],
        marks=marks,
        share=name == "heldout_success",
        line_at=step,
        line_label=f"best: step {step}",
        end=dossier.metrics.lines[-1]["step"] if dossier.metrics.lines else None,
    )
    title = f"Held-out {name.removeprefix('heldout_')}"
    keys = [("choosing", "half that chooses")]
    if curve.band:
        keys.append(("interval", "95 % interval"))
    if marks:
        keys.append(("reported", "half that is reported"))
    wide = charts.line_chart(curve, charts.WIDE, 300, title)
    narrow = charts.line_chart(curve, charts.NARROW, 250, title)
    return blocks.Panel([blocks.Figure(wide, narrow, legend=keys)], title)


def _reported_marks(dossier: Dossier) -> list[tuple[float, float, float, float]]:
    """(step, low, value, high) of the half that is reported: at step 0 and at the best step."""
    comparison, sides = dossier.comparison, dossier.sides
    if comparison is None or sides is None or sides.half != TEST or sides.step is None:
        return []
    return [
        (step, level.low or 0.0, level.value, level.high or 0.0)
        for step, level in ((0, comparison.before), (sides.step, comparison.after))
        if level is not None and level.value is not None
    ]


def _held_out_name(dossier: Dossier) -> str:
    """The held-out metric that the verdict is about, "" where there is none."""
    measure = dossier.comparison.measure if dossier.comparison else None
    if measure:
        return f"heldout_{measure}"
    for name in ("heldout_success", "heldout_reward", "heldout_loss"):
        if dossier.metrics.curve(name):
            return name
    return ""


def _small_charts(dossier: Dossier) -> list[blocks.Panel]:
    shown = {_held_out_name(dossier), "heldout_reward"}
    names = [name for name in dossier.metrics.columns if name not in shown]
    panels = []
    for name in main_columns(names, len(names)):
        points = dossier.metrics.curve(name)
        if len(points) < 2 or len(panels) == _SMALL_CHARTS:
            continue
        metric = METRICS.get(name)
        share = metric is not None and metric.unit == "share"
        curve = charts.Curve(points=points, share=share, zero=share)
        meaning = metric.meaning.replace("`", "") if metric else _meaning_of_other(name)
        drawing = blocks.Figure(charts.line_chart(curve, charts.NARROW, 200, name))
        panels.append(blocks.Panel([blocks.Paragraph([meaning]), drawing], name))
    return panels


def _meaning_of_other(name: str) -> str:
    if name.startswith("heldout_"):
        return f"{name.removeprefix('heldout_')}, on the held-out tasks that choose."
    return "A metric of the environment."


def _curve_rows(dossier: Dossier) -> list[Sequence[str]]:
    rows = []
    for name in main_columns(dossier.metrics.columns, _ROWS):
        values = [value for _, value in dossier.metrics.curve(name)]
        if len(values) > 1:
            ends = (values[0], values[-1], min(values), max(values))
            rows.append([name, *(str(short(value)) for value in ends), spark(values)])
    return rows
