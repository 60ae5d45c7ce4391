"""The report of a run: one HTML file that opens anywhere, and the same as Markdown.

No script, no font and nothing fetched: the page forbids itself all of it. What a model or an
environment said is escaped by the template engine and cleaned before.
"""

import time
from collections.abc import Mapping, Sequence
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
    chain_section,
    contamination_section,
    exam_use_line,
    kept_section,
)
from engine.evidence.stats.results import Measure, show, show_change
from engine.home.curves import main_columns
from engine.home.halves import choosing
from engine.home.rows import TERMINAL
from engine.home.run_dir import Home
from engine.home.sanitize import clip, one_line

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
        summary=_said(dossier).replace(" %", "\u00a0%"),
        warnings=_warnings(dossier),
        expected=_expectation(dossier),
        failure=_failure(dossier),
        alerts=[one_line(str(alert.get("message", "")), 300) for alert in dossier.alerts[:6]],
        figures=_figures(dossier),
        effect=_effect(dossier),
        flips=_flips(dossier),
        models=_models(dossier),
        main=_main_chart(dossier),
        charts=_small_charts(dossier),
        sides=_side_by_side(dossier),
        kept=kept_section(dossier),
        exam=choosing(dossier.run),
        exam_use=exam_use_line(dossier),
        chain=chain_section(dossier),
        audit=audit_section(dossier),
        shared=contamination_section(dossier),
        cost=_cost(dossier),
        settings=[(name, value_text(value), source) for name, value, source in dossier.settings],
        lineage=dossier.lineage,
        hashes=dossier.hashes,
        versions=_versions(dossier),
        facts=_facts(dossier),
        written=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(dossier.written)),
    )


def _said(dossier: Dossier) -> str:
    """The verdict's sentence without its first word, which stands above it."""
    summary, word = str(dossier.verdict.get("summary", "")), headline(dossier)["word"]
    if dossier.row.state not in TERMINAL:
        return f"No verdict yet: {dossier.verdict.get('reason') or 'the run goes on'}."
    if summary.startswith(f"{word}: "):
        return sentence_case(summary.removeprefix(f"{word}: "))
    return summary.replace(f": {word}: ", ": ", 1)


def _warnings(dossier: Dossier) -> list[str]:
    """The warnings that the sentence above them does not say already."""
    summary = str(dossier.verdict.get("summary", ""))
    return [str(text) for text in dossier.verdict.get("warnings", []) if str(text) not in summary]


def _expectation(dossier: Dossier) -> str:
    expected = dossier.verdict.get("expected")
    if not expected:
        return ""
    came = dossier.verdict.get("as_expected")
    said = str(expected).replace("_", " ")
    outcome = {True: "and so it came", False: "and it came otherwise", None: "still open"}[came]
    return f"Expected beforehand: {said}; {outcome}."


def _failure(dossier: Dossier) -> dict[str, str]:
    row = dossier.row
    if row.state not in ("failed", "cancelled"):
        return {}
    latest = dossier.run.latest_checkpoint()
    return {
        "kind": row.reason_kind or row.state,
        "reason": dossier.redact.text(row.reason),
        "evidence": str(dossier.failure.get("evidence") or ""),
        "hint": dossier.redact.text(str(row.hint)),
        "checkpoint": latest.name if latest else "none",
    }


def _figures(dossier: Dossier) -> list[dict[str, str]]:
    """The numbers beside the verdict: label, value, note."""
    found = dossier.comparison
    if found is None or found.outcome.diff is None or found.measure is None:
        return []
    outcome, measure = found.outcome, found.measure
    sides = dossier.sides
    before, after = (sides.before_name, sides.after_name) if sides else ("before", "after")
    levels = (found.before, found.after)
    figures = [
        {"label": name, "value": show(level.value, measure), "note": _between(level, measure)}
        for name, level in zip((before, after), levels, strict=True)
        if level is not None
    ]
    half = "reported on the half that chose nothing" if sides and sides.half == "report" else ""
    figures.append({"label": "tasks", "value": str(outcome.n), "note": half or "paired by task"})
    p = outcome.p if outcome.p is not None else 1.0
    figures.append(
        {
            "label": "chance of this if equal",
            "value": "< 0.001" if p < 0.001 else f"{p:.3f}",
            "note": outcome.method.partition(",")[0],
        }
    )
    gap = show_change(outcome.detectable, measure).removeprefix("+")
    unit = " points" if measure == "success" else ""
    figures.append(
        {"label": "smallest visible change", "value": f"{gap}{unit}", "note": "found 4 times in 5"}
    )
    return figures


def _between(level: Any, measure: Measure) -> str:
    return f"{show(level.low, measure)} to {show(level.high, measure)}"


def _effect(dossier: Dossier) -> dict[str, Any]:
    found = dossier.comparison
    if found is None or found.measure is None or found.outcome.diff is None:
        return {}
    outcome = found.outcome
    low, high = outcome.low or 0.0, outcome.high or 0.0
    share = found.measure == "success"
    label = f"Change {charts.signed(outcome.diff or 0.0, share)}, 95 % interval"
    drawings = [
        charts.effect_strip(
            low,
            outcome.diff or 0.0,
            high,
            margin=outcome.margin,
            share=share,
            lower_is_better=found.measure == "loss",
            width=width,
            label=label,
        )
        for width in (_WIDE - 30, _NARROW - 20)
    ]
    moot = show_change(outcome.margin, found.measure).removeprefix("+")
    caption = f"less than {moot} points" if share else f"less than {moot}"
    return {"wide": drawings[0], "narrow": drawings[1], "moot": caption}


def _flips(dossier: Dossier) -> dict[str, Any]:
    found = dossier.comparison
    if found is None or found.outcome.diff is None or found.measure == "loss":
        return {}
    outcome, sides = found.outcome, dossier.sides
    gained, lost = len(outcome.gained), len(outcome.lost)
    parts = [("gained", gained, "gained")]
    rest = outcome.n - gained - lost
    solved = _kept_right(dossier) if found.measure == "success" and sides else None
    if solved is None:
        parts.append(("unchanged", rest, "same"))
    else:
        parts += [
            ("right both times", solved, "right"),
            ("wrong both times", rest - solved, "same"),
        ]
    parts.append(("lost", lost, "lost"))
    total = max(outcome.n, 1)
    return {
        "n": outcome.n,
        "parts": [
            {"label": label, "count": count, "kind": kind, "share": f"{100 * count / total:.2f}"}
            for label, count, kind in parts
            if count
        ],
    }


def _kept_right(dossier: Dossier) -> int | None:
    """Tasks solved before and after, None where attempts make it a matter of degree."""
    sides, found = dossier.sides, dossier.comparison
    if sides is None or found is None:
        return None
    tasks = [str(row.get("task")) for row in sides.before]
    if len(set(tasks)) != len(tasks):
        return None
    scored = [{str(r.get("task")): r.get("success") for r in rows if not r.get("error")}
              for rows in (sides.before, sides.after)]  # fmt: skip
    return sum(scored[0][task] is True and scored[1].get(task) is True for task in scored[0])


def _models(dossier: Dossier) -> list[dict[str, Any]]:
    """The table of an evaluation: one line per model with its level on a common scale."""
    table = dossier.verdict.get("models") or []
    measure = dossier.verdict.get("metric")
    rows = [line for line in table if line.get("value") is not None]
    if measure not in ("success", "reward") or not rows:
        return []
    ends = [end for line in rows for end in line["interval"]]
    floor, top = (0.0, 1.0) if measure == "success" else (min(ends), max(ends))
    against = {item["model"]: item for item in dossier.verdict.get("comparisons", [])}
    drawn = []
    for line in rows:
        low, high = line["interval"]
        other = against.get(line["model"], {})
        drawn.append(
            {
                "name": dossier.redact.text(str(line["model"])),
                "value": show(line["value"], measure),
                "between": f"{show(low, measure)} to {show(high, measure)}",
                "bar": charts.level_bar(line["value"], low, high, floor, top, "level"),
                "tasks": line["tasks"],
                "errors": line["errors"],
                "verdict": other.get("verdict", ""),
                "change": show_change(other["difference"], measure) if other else "",
            }
        )
    return drawn


def _main_chart(dossier: Dossier) -> dict[str, Any]:
    """Held-out results over the run, with their noise band and the reported half."""
    checked = dossier.checked
    name = _held_out_name(dossier)
    if len(checked) < 2 or not name:
        return {}
    share = name == "heldout_success"
    marks = []
    found, sides = dossier.comparison, dossier.sides
    if found and sides and sides.half == "report" and sides.step is not None:
        for step, level in ((0, found.before), (sides.step, found.after)):
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
    return {
        "title": title,
        "wide": charts.line_chart(curve, _WIDE, 300, title),
        "narrow": charts.line_chart(curve, _NARROW, 250, title),
        "marks": bool(marks),
        "band": bool(curve.band),
    }


def _held_out_name(dossier: Dossier) -> str:
    measure = dossier.comparison.measure if dossier.comparison else None
    if measure:
        return f"heldout_{measure}"
    for name in ("heldout_success", "heldout_reward", "heldout_loss"):
        if dossier.metrics.curve(name):
            return name
    return ""


def _small_charts(dossier: Dossier) -> list[dict[str, Any]]:
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
        drawn.append(
            {
                "title": name,
                "meaning": metric.meaning.replace("`", "") if metric else _own_metric(name),
                "drawing": charts.line_chart(curve, _NARROW, 200, name),
            }
        )
    return drawn[:_SMALL_CHARTS]


def _own_metric(name: str) -> str:
    if name.startswith("heldout_"):
        return f"{name.removeprefix('heldout_')}, on the held-out tasks that choose."
    return "A metric of the environment."


def _side_by_side(dossier: Dossier) -> list[dict[str, Any]]:
    sides = dossier.sides
    if sides is None or (dossier.comparison and dossier.comparison.measure == "loss"):
        return []
    cards = []
    for way in ("gained", "lost"):
        for example in dossier.flips.get(way, []):
            cards.append(
                example
                | {
                    "way": way,
                    "before_name": sides.before_name,
                    "after_name": sides.after_name,
                    "good_before": way == "lost",
                    "good_after": way == "gained",
                }
            )
    return cards


def _cost(dossier: Dossier) -> dict[str, Any]:
    cost = dossier.cost
    if cost.actual is None and cost.likely is None:
        return {}
    lines = []
    if cost.actual is not None:
        used = "used" if dossier.row.state in TERMINAL else "used so far"
        lines.append((f"device time {used}", duration(cost.actual)))
    if cost.likely is not None and cost.low is not None and cost.high is not None:
        band = f"{duration(cost.low)} to {duration(cost.high)}"
        lines.append(("estimated", f"{duration(cost.likely)} ({band})"))
        if cost.basis:
            lines.append(("basis of the estimate", cost.basis))
    if cost.memory_bytes:
        lines.append(("estimated peak memory", size_text(cost.memory_bytes)))
    if cost.price and cost.actual is not None:
        lines.append(("money", f"{cost.price * cost.actual:.2f} at {cost.price:g} an hour"))
    bar: dict[str, Markup] = {}
    if cost.likely is not None and cost.low is not None and cost.high is not None:
        texts = (
            duration(cost.low),
            f"likely {duration(cost.likely)}",
            duration(cost.high),
            f"used {duration(cost.actual)}" if cost.actual is not None else "",
        )
        for name, width in (("wide", _WIDE), ("narrow", _NARROW - 20)):
            bar[name] = charts.range_bar(
                cost.low, cost.likely, cost.high, cost.actual, texts, width, "Estimated and used"
            )
    return {"lines": lines, "bar": bar}


def _versions(dossier: Dossier) -> list[tuple[str, str]]:
    versions = dossier.manifest.get("versions") or {}
    hardware = dossier.manifest.get("hardware") or {}
    found = [(str(name), str(value)) for name, value in versions.items()]
    if hardware:
        found.append(
            ("machine", ", ".join(f"{name} {value_text(v)}" for name, v in hardware.items()))
        )
    return found


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
