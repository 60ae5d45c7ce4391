"""Metrics of a run as curves: read once, thinned to what an agent or a chart can use.

A curve is thinned to about 30 points that always keep its first, lowest, highest and last value,
so that no spike and no collapse is lost.
"""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.core.files import read_chunk
from engine.core.metrics import LINE_KEYS, METRICS
from engine.core.paging import complete_size, page_after
from engine.records.lines.line_record import Line

POINTS = 30
_EXACT_BYTES = 8_000_000  # a longer file is sampled, so that the millionth step costs no more
_SAMPLES = 400
# What is shown first when no columns are asked for.
_MAIN = (
    "heldout_success",
    "heldout_reward",
    "heldout_loss",
    "reward_mean",
    "loss",
    "truncated_share",
    "groups_effective",
    "length_mean",
    "entropy",
    "kl",
    "grad_norm",
    "lr",
)


@dataclass(frozen=True)
class Metrics:
    """The metrics of a run.

    Attributes:
        lines: of `metrics.jsonl`, one per step in order of steps.
        end: byte after the last whole line of the file.
        sampled: whether lines before the end of a long file were left out.
        skipped: lines that hold no JSON object.
    """

    lines: list[Line]
    end: int
    sampled: bool
    skipped: int = 0

    @property
    def columns(self) -> list[str]:
        """Every measured name, ours in their documented order, then the environment's own."""
        seen = {name for line in self.lines for name in line} - {*LINE_KEYS, "model"}
        ours = [name for name in METRICS if name in seen]
        return ours + sorted(seen - set(ours))

    def curve(self, name: str) -> list[tuple[float, float]]:
        """(step, value) wherever the value is a finite number."""
        return [
            (line["step"], value)
            for line in self.lines
            if (value := number(line.get(name))) is not None
        ]


def load_metrics(path: Path) -> Metrics:
    """All lines; of a file above 8 MB its end and a sample of what came before."""
    end = complete_size(path)
    if end <= _EXACT_BYTES:
        whole = read_chunk(path, 0, max_bytes=_EXACT_BYTES + 1)
        return Metrics(by_step(whole.rows), end, sampled=False, skipped=whole.damaged)
    half = _EXACT_BYTES // 2
    rows = parse_lines([line.text for line in page_after(path, 0, 20).lines])
    for index in range(1, _SAMPLES):
        offset = (end - half) * index // _SAMPLES
        rows += parse_lines([line.text for line in page_after(path, offset, 1).lines])
    tail = read_chunk(path, end - half, max_bytes=half)
    return Metrics(by_step(rows + tail.rows), end, sampled=True, skipped=tail.damaged)


def by_step(rows: Sequence[Line]) -> list[Line]:
    """One line per step; of a step written twice (a resumed run) the later values hold."""
    merged: dict[float, Line] = {}
    for row in rows:
        step = number(row.get("step"))
        if step is not None:
            merged[step] = merged.get(step, {}) | row
    return [merged[step] for step in sorted(merged)]


def main_columns(columns: Sequence[str], most: int) -> list[str]:
    """The columns to show when none were asked for."""
    first = [name for name in _MAIN if name in columns]
    of_the_environment = [
        name for name in columns if name not in METRICS and not name.startswith("heldout_")
    ]
    return list(dict.fromkeys([*first, *of_the_environment, *columns]))[:most]


def thin(lines: Sequence[Line], keys: Sequence[str], points: int = POINTS) -> list[Line]:
    """About `points` of the lines, in order.

    Kept are the first and last line and, for every key, its first, lowest, highest and last
    value; a key measured now and then (an evaluation) keeps as many as fit; the rest is spread
    evenly.
    """
    if len(lines) <= points:
        return list(lines)
    chosen = {0, len(lines) - 1}
    sparse: list[int] = []
    for key in keys:
        measured = [i for i, line in enumerate(lines) if number(line.get(key)) is not None]
        if not measured:
            continue
        values = [lines[i][key] for i in measured]
        lowest, highest = values.index(min(values)), values.index(max(values))
        chosen |= {measured[0], measured[-1], measured[lowest], measured[highest]}
        if len(measured) * 3 <= len(lines):
            sparse += measured
    for index in sorted(set(sparse)):
        if len(chosen) < points:
            chosen.add(index)
    missing = points - len(chosen)
    if missing > 0:
        rest = [i for i in range(len(lines)) if i not in chosen]
        chosen |= {rest[int((k + 0.5) * len(rest) / missing)] for k in range(missing)}
    return [lines[i] for i in sorted(chosen)]


@dataclass(frozen=True)
class CurveSummary:
    """First, last, lowest and highest value of a curve, with the steps of the extremes."""

    first: float
    last: float
    min: float
    min_step: float
    max: float
    max_step: float


def summary_of(points: Sequence[tuple[float, float]]) -> CurveSummary:
    """The summary of a curve of at least one (step, value)."""
    low = min(points, key=lambda point: point[1])
    high = max(points, key=lambda point: point[1])
    return CurveSummary(
        first=short(points[0][1]),
        last=short(points[-1][1]),
        min=short(low[1]),
        min_step=low[0],
        max=short(high[1]),
        max_step=high[0],
    )


def spark(values: Sequence[float], width: int = 24) -> str:
    """A curve as one line of block characters."""
    if not values:
        return ""
    if len(values) > width:
        edges = [len(values) * k // width for k in range(width + 1)]
        values = [math.fsum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(values), max(values)
    blocks = "▁▂▃▄▅▆▇█"
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(blocks[round((value - low) * scale)] for value in values)


def short(value: float) -> float:
    """Five significant digits: enough for any curve, few characters."""
    return float(f"{value:.5g}")


def number(value: Any) -> float | None:
    """`value` when it is a finite number, else None; booleans are none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def parse_lines(texts: Sequence[str]) -> list[Line]:
    """The JSON objects among lines of text, in order; what is none is left out."""
    rows: list[Line] = []
    for text in texts:
        try:
            row = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, Mapping):
            rows.append(dict(row))
    return rows
