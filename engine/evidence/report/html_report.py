"""The report of a run: one HTML file that opens anywhere, and the same as Markdown.

No script, no font and nothing fetched: the page forbids itself all of it. What a model or an
environment said is escaped by the template engine and cleaned before.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from engine.core.files import write_text
from engine.core.metrics import METRICS
from engine.evidence.report import charts
from engine.evidence.report.charts import Curve
from engine.evidence.report.dossier import Dossier, gather
from engine.evidence.report.markdown import (
    card_of,
    duration,
    headline,
    markdown_of,
    sentence_case,
    size_text,
    value_text,
)
from engine.evidence.report.trust import (
    audit_section,
    holdout_use_line,
    kept_panels,
    provenance_lines,
    shared_section,
)
from engine.evidence.stats.results import TEST, show, show_change
from engine.evidence.verdict.flips import FlipExample
from engine.home.halves import choosing
from engine.home.rows import TERMINAL
from engine.home.run_dir import Home
from engine.home.sanitize import clip, one_line
from engine.records.lines.curves import main_columns

__all__ = ["model_card", "report_markdown", "write_report"]

_TEMPLATE = "report.html.j2"
_WIDE, _NARROW = 1020, 360
_SMALL_CHARTS = 9
_SHARES = ("share", "success")


def write_report(home: Home, run_id: str) -> Path:
    """Write `report.html` into the run's folder and return its path.

    Works in any state of the run; what is not there yet is left out. Raises RUN_NOT_FOUND.
    """
    dossier = gather(home, run_id)
    write_text(dossier.run.report, html_of(dossier), fsync=False)
    return dossier.run.report


def report_markdown(home: Home, run_id: str) -> str:
    """The report as Markdown under 10,000 characters. Raises RUN_NOT_FOUND."""
    return markdown_of(gather(home, run_id))


def model_card(home: Home, run_id: str) -> str:
    """The model card of a run as Markdown under 10,000 characters. Raises RUN_NOT_FOUND."""
    return card_of(gather(home, run_id))


def html_of(dossier: Dossier) -> str:
    """The report as one HTML document."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    row = dossier.row
    return environment.get_template(_TEMPLATE).render(
        row=row,
        note=clip(str(dossier.config.get("note") or ""), 600),
        head=headline(dossier),
        summary=_summary(dossier).replace(" %", "\u00a0%"),
        warnings=_warnings(dossier),
        expected=_expectation(dossier),
        failure=_failure(dossier),
        alerts=[one_line(message, 300) for message in dossier.alerts[:6]],
        figures=_figures(dossier),
        effect=_effect(dossier),
        flips=_flips(dossier),
        models=_models(dossier),
        main=_main_chart(dossier),
        charts=_small_charts(dossier),
        pairs=_answer_pairs(dossier),
        kept=kept_panels(dossier),
        exam=choosing(dossier.run),
        exam_use=holdout_use_line(dossier),
        provenance=provenance_lines(dossier),
        audit=audit_section(dossier),
        shared=shared_section(dossier),
        cost=_cost(dossier),
        settings=[(name, value_text(value), source) for name, value, source in dossier.settings],
        lineage=dossier.lineage,
        hashes=dossier.hashes,
        versions=_versions(dossier),
        facts=_facts(dossier),
        written=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(dossier.written)),
    )


def _summary(dossier: Dossier) -> str:
    """The verdict's sentence without its first word, which stands above it."""
    verdict, word = dossier.verdict, headline(dossier).word
    if dossier.row.state not in TERMINAL:
        return f"No verdict yet: {verdict.comparison.reason or 'the run goes on'}."
    if verdict.summary.startswith(f"{word}: "):
        return sentence_case(verdict.summary.removeprefix(f"{word}: "))
    return verdict.summary.replace(f": {word}: ", ": ", 1)


def _warnings(dossier: Dossier) -> list[str]:
    """The warnings that the sentence above them does not say already."""
    return [text for text in dossier.verdict.warnings if text not in dossier.verdict.summary]


def _expectation(dossier: Dossier) -> str:
    training = dossier.verdict.training
    if training is None or not training.expected:
        return ""
    expected = training.expected.replace("_", " ")
    outcome = {True: "and so it came", False: "and it came otherwise", None: "still open"}
    return f"Expected beforehand: {expected}; {outcome[training.as_expected]}."


@dataclass(frozen=True)
class FailureNote:
    kind: str
    reason: str
    evidence: str
    hint: str
    checkpoint: str


def _failure(dossier: Dossier) -> FailureNote | None:
    row = dossier.row
    if row.state not in ("failed", "cancelled"):
        return None
    latest = dossier.run.latest_checkpoint()
    return FailureNote(
        kind=row.reason_kind or row.state,
        reason=dossier.redact.text(row.reason),
        evidence=dossier.failure_evidence,
        hint=dossier.redact.text(str(row.hint)),
        checkpoint=latest.name if latest else "none",
    )


@dataclass(frozen=True)
class Figure:
    """A number beside the verdict."""

    label: str
    value: str
    note: str


def _figures(dossier: Dossier) -> list[Figure]:
    """The numbers beside the verdict."""
    comparison, sides = dossier.comparison, dossier.sides
    if comparison is None or comparison.outcome.diff is None or comparison.measure is None:
        return []
    outcome, measure = comparison.outcome, comparison.measure
    names = (sides.before_name, sides.after_name) if sides else ("before", "after")
    figures = [
        Figure(
            name,
            show(level.value, measure),
            f"{show(level.low, measure)} to {show(level.high, measure)}",
        )
        for name, level in zip(names, (comparison.before, comparison.after), strict=True)
        if level is not None
    ]
    half = "reported on the half that chose nothing" if sides and sides.half == TEST else ""
    p = outcome.p if outcome.p is not None else 1.0
    gap = show_change(outcome.detectable, measure).removeprefix("+")
    unit = " points" if measure == "success" else ""
    method = outcome.method.partition(",")[0]
    return [
        *figures,
        Figure("tasks", str(outcome.n), half or "paired by task"),
        Figure("chance of this if equal", "< 0.001" if p < 0.001 else f"{p:.3f}", method),
        Figure("smallest visible change", f"{gap}{unit}", "found 4 times in 5"),
    ]


@dataclass(frozen=True)
class EffectSection:
    """The change with its interval, drawn twice; `moot` says what counts as no difference."""

    wide: Markup
    narrow: Markup
    moot: str


def _effect(dossier: Dossier) -> EffectSection | None:
    comparison = dossier.comparison
    if comparison is None or comparison.measure is None or comparison.outcome.diff is None:
        return None
    outcome, share = comparison.outcome, comparison.measure == "success"
    effect = charts.Effect(
        low=outcome.low or 0.0,
        value=outcome.diff or 0.0,
        high=outcome.high or 0.0,
        margin=outcome.margin,
        share=share,
        lower_is_better=comparison.measure == "loss",
    )
    label = f"Change {charts.signed(effect.value, share)}, 95 % interval"
    moot = show_change(outcome.margin, comparison.measure).removeprefix("+")
    return EffectSection(
        wide=charts.effect_strip(effect, _WIDE - 30, label),
        narrow=charts.effect_strip(effect, _NARROW - 20, label),
        moot=f"less than {moot} points" if share else f"less than {moot}",
    )


@dataclass(frozen=True)
class FlipPart:
    """Tasks with one kind of outcome; `share` is a width in percent."""

    label: str
    count: int
    kind: str
    share: str


@dataclass(frozen=True)
class FlipSection:
    n: int
    parts: Sequence[FlipPart]


def _flips(dossier: Dossier) -> FlipSection | None:
    comparison = dossier.comparison
    if comparison is None or comparison.outcome.diff is None or comparison.measure == "loss":
        return None
    outcome = comparison.outcome
    gained, lost = len(outcome.gained), len(outcome.lost)
    rest = outcome.n - gained - lost
    solved = _kept_right(dossier) if comparison.measure == "success" else None
    unchanged = [("unchanged", rest, "same")]
    if solved is not None:
        unchanged = [
            ("right both times", solved, "right"),
            ("wrong both times", rest - solved, "same"),
        ]
    parts = [("gained", gained, "gained"), *unchanged, ("lost", lost, "lost")]
    total = max(outcome.n, 1)
    return FlipSection(
        outcome.n,
        [
            FlipPart(label, count, kind, f"{100 * count / total:.2f}")
            for label, count, kind in parts
            if count
        ],
    )


def _kept_right(dossier: Dossier) -> int | None:
    """Tasks solved before and after, None where attempts make it a matter of degree."""
    sides = dossier.sides
    if sides is None:
        return None
    tasks = [row.task for row in sides.before]
    if len(set(tasks)) != len(tasks):
        return None
    before, after = (
        {row.task for row in rows if not row.error and row.success}
        for rows in (sides.before, sides.after)
    )
    return len(before & after)


@dataclass(frozen=True)
class ModelLine:
    """One model of an evaluation with its level on a common scale."""

    name: str
    value: str
    between: str
    bar: Markup
    tasks: int
    errors: int
    verdict: str
    change: str


def _models(dossier: Dossier) -> list[ModelLine]:
    """The table of an evaluation."""
    facts, measure = dossier.verdict.evaluation, dossier.verdict.comparison.measure
    if facts is None or measure not in ("success", "reward"):
        return []
    levels = [(each.model, each.level) for each in facts.models if each.level is not None]
    ends = [end for _, level in levels for end in level.interval if end is not None]
    if not ends:
        return []
    floor, top = (0.0, 1.0) if measure == "success" else (min(ends), max(ends))
    against = {item.model: item.comparison for item in facts.comparisons}
    lines = []
    for model, level in levels:
        value, (low, high) = level.rounded_value, level.interval
        if value is None or low is None or high is None:
            continue
        comparison = against.get(model)
        lines.append(
            ModelLine(
                name=dossier.redact.text(model),
                value=show(value, measure),
                between=f"{show(low, measure)} to {show(high, measure)}",
                bar=charts.level_bar(value, low, high, floor, top, "level"),
                tasks=level.tasks,
                errors=level.errors,
                verdict=comparison.outcome.verdict if comparison else "",
                change=show_change(comparison.difference, measure) if comparison else "",
            )
        )
    return lines


@dataclass(frozen=True)
class MainChart:
    """Held-out results over the run; `marks` and `band` say which of them are drawn."""

    title: str
    wide: Markup
    narrow: Markup
    marks: bool
    band: bool


def _main_chart(dossier: Dossier) -> MainChart | None:
    """Held-out results over the run, with their noise band and the reported half."""
    checked = dossier.checked
    name = _held_out_name(dossier)
    if len(checked) < 2 or not name:
        return None
    share = name == "heldout_success"
    marks = []
    comparison, sides = dossier.comparison, dossier.sides
    if comparison and sides and sides.half == TEST and sides.step is not None:
        for step, level in ((0, comparison.before), (sides.step, comparison.after)):
            if level and level.value is not None:
                marks.append((step, level.low or 0.0, level.value, level.high or 0.0))
    best = dossier.run.resolve_checkpoint("best")
    step = int(best.name.rpartition("_")[2]) if best else None
    curve = Curve(
        points=[(item.step, item.value) for item in checked],
        band=[
            (item.step, item.interval.low, item.interval.high) for item in checked if item.interval
        ],
        marks=marks,
        share=share,
        line_at=step,
        line_label=f"best: step {step}",
        end=dossier.metrics.lines[-1]["step"] if dossier.metrics.lines else None,
    )
    title = {"heldout_success": "Held-out success", "heldout_reward": "Held-out reward",
             "heldout_loss": "Held-out loss"}[name]  # fmt: skip
    return MainChart(
        title=title,
        wide=charts.line_chart(curve, _WIDE, 300, title),
        narrow=charts.line_chart(curve, _NARROW, 250, title),
        marks=bool(marks),
        band=bool(curve.band),
    )


def _held_out_name(dossier: Dossier) -> str:
    measure = dossier.comparison.measure if dossier.comparison else None
    if measure:
        return f"heldout_{measure}"
    for name in ("heldout_success", "heldout_reward", "heldout_loss"):
        if dossier.metrics.curve(name):
            return name
    return ""


@dataclass(frozen=True)
class SmallChart:
    title: str
    meaning: str
    drawing: Markup


def _small_charts(dossier: Dossier) -> list[SmallChart]:
    if dossier.row.kind != "train":
        return []  # one line per model is no curve
    shown = {_held_out_name(dossier), "heldout_reward"}
    names = [name for name in dossier.metrics.columns if name not in shown]
    drawn = []
    for name in main_columns(names, len(names)):
        points = dossier.metrics.curve(name)
        if len(points) < 2:
            continue
        metric = METRICS.get(name)
        share = metric is not None and metric.unit == "share"
        curve = Curve(points=points, share=share, zero=share)
        meaning = metric.meaning.replace("`", "") if metric else _meaning_of_other(name)
        drawn.append(SmallChart(name, meaning, charts.line_chart(curve, _NARROW, 200, name)))
    return drawn[:_SMALL_CHARTS]


def _meaning_of_other(name: str) -> str:
    if name.startswith("heldout_"):
        return f"{name.removeprefix('heldout_')}, on the held-out tasks that choose."
    return "A metric of the environment."


@dataclass(frozen=True)
class AnswerPair:
    """One task whose result changed, with both answers; `way` is gained or lost."""

    way: str
    example: FlipExample
    before_name: str
    after_name: str

    @property
    def good_before(self) -> bool:
        return self.way == "lost"

    @property
    def good_after(self) -> bool:
        return self.way == "gained"


def _answer_pairs(dossier: Dossier) -> list[AnswerPair]:
    sides = dossier.sides
    if sides is None or (dossier.comparison and dossier.comparison.measure == "loss"):
        return []
    ways = (("gained", dossier.flips.gained), ("lost", dossier.flips.lost))
    return [
        AnswerPair(way, example, sides.before_name, sides.after_name)
        for way, examples in ways
        for example in examples
    ]


@dataclass(frozen=True)
class CostSection:
    """Estimated and used; the range is drawn where there was an estimate."""

    lines: Sequence[tuple[str, str]]
    wide: Markup | None = None
    narrow: Markup | None = None


def _cost(dossier: Dossier) -> CostSection | None:
    cost = dossier.cost
    if cost.actual is None and cost.likely is None:
        return None
    lines = []
    if cost.actual is not None:
        used = "used" if dossier.row.state in TERMINAL else "used so far"
        lines.append((f"device time {used}", duration(cost.actual)))
    if cost.likely is not None and cost.low is not None and cost.high is not None:
        span = f"{duration(cost.low)} to {duration(cost.high)}"
        lines.append(("estimated", f"{duration(cost.likely)} ({span})"))
        if cost.basis:
            lines.append(("basis of the estimate", cost.basis))
    if cost.memory_bytes:
        lines.append(("estimated peak memory", size_text(cost.memory_bytes)))
    if cost.price and cost.actual is not None:
        lines.append(("money", f"{cost.price * cost.actual:.2f} at {cost.price:g} an hour"))
    if cost.likely is None or cost.low is None or cost.high is None:
        return CostSection(lines)
    estimate = charts.Range(
        low=cost.low,
        likely=cost.likely,
        high=cost.high,
        actual=cost.actual,
        texts=(
            duration(cost.low),
            f"likely {duration(cost.likely)}",
            duration(cost.high),
            f"used {duration(cost.actual)}" if cost.actual is not None else "",
        ),
    )
    wide, narrow = (
        charts.range_bar(estimate, width, "Estimated and used") for width in (_WIDE, _NARROW - 20)
    )
    return CostSection(lines, wide, narrow)


def _versions(dossier: Dossier) -> list[tuple[str, str]]:
    versions = dossier.manifest.get("versions") or {}
    hardware = dossier.manifest.get("hardware") or {}
    lines = [(str(name), str(value)) for name, value in versions.items()]
    if hardware:
        machine = ", ".join(f"{name} {value_text(value)}" for name, value in hardware.items())
        lines.append(("machine", machine))
    return lines


def _facts(dossier: Dossier) -> list[tuple[str, str]]:
    row, config = dossier.row, dossier.config
    base: Mapping[str, Any] = config.get("base") or {}
    started, base_ref = str(config.get("model") or row.model), str(base.get("ref") or "")
    facts: Sequence[tuple[str, str]] = (
        ("", row.state),
        ("algorithm", row.algorithm),
        ("environment", row.env_id),
        ("model" if row.kind != "train" else "started from", started),
        ("base", base_ref if base_ref != started else ""),
        ("attempt", str(row.attempt) if row.attempt > 1 else ""),
        ("device", row.device),
    )
    return [(name, value) for name, value in facts if value]
