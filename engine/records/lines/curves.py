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

from engine.core.files import read_lines
from engine.core.metrics import LINE_KEYS, METRICS
from engine.core.paging import complete_size, page_after

POINTS = 30
_EXACT_BYTES = 8_000_000  # a longer file is sampled, so that the millionth step costs no more
_SAMPLES = 400
_MAIN = (
    "heldout_success", "heldout_reward", "heldout_loss", "reward_mean", "loss", "truncated_share",
    "groups_effective", "length_mean", "entropy", "kl", "grad_norm", "lr",
)  # fmt: skip

Line = dict[str, Any]


@dataclass(frozen=True)
class Metrics:
    """The lines of `metrics.jsonl`, one per step in order of steps, and where the file ended."""

    lines: list[Line]
    end: int
    sampled: bool

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
        rows, _ = read_lines(path, 0, max_bytes=_EXACT_BYTES + 1)
        return Metrics(by_step(rows), end, False)
    half = _EXACT_BYTES // 2
    rows = _json_lines([line.text for line in page_after(path, 0, 20).lines])
    for index in range(1, _SAMPLES):
        spot = (end - half) * index // _SAMPLES
        rows += _json_lines([line.text for line in page_after(path, spot, 1).lines])
    tail, _ = read_lines(path, end - half, max_bytes=half)
    return Metrics(by_step(rows + tail), end, True)


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
    own = [name for name in columns if name not in METRICS and not name.startswith("heldout_")]
    return list(dict.fromkeys([*first, *own, *columns]))[:most]


def thin(lines: Sequence[Line], keys: Sequence[str], points: int = POINTS) -> list[Line]:
    """About `points` of the lines, in order.

    Kept are the first and last line and, for every key, its first, lowest, highest and last
    value; a key measured now and then (an evaluation) keeps as many as fit; the rest is spread
    evenly.
    """
    if len(lines) <= points:
        return list(lines)
    kept = {0, len(lines) - 1}
    sparse: list[int] = []
    for key in keys:
        at = [i for i, line in enumerate(lines) if number(line.get(key)) is not None]
        if not at:
            continue
        values = [lines[i][key] for i in at]
        kept |= {at[0], at[-1], at[values.index(min(values))], at[values.index(max(values))]}
        if len(at) * 3 <= len(lines):
            sparse += at
    for index in sorted(set(sparse)):
        if len(kept) < points:
            kept.add(index)
    wanted = points - len(kept)
    if wanted > 0:
        rest = [i for i in range(len(lines)) if i not in kept]
        kept |= {rest[int((k + 0.5) * len(rest) / wanted)] for k in range(wanted)}
    return [lines[i] for i in sorted(kept)]


def summary_of(points: Sequence[tuple[float, float]]) -> dict[str, float]:
    """First, last, lowest and highest value of a curve, with the steps of the extremes."""
    if not points:
        return {}
    low = min(points, key=lambda point: point[1])
    high = max(points, key=lambda point: point[1])
    return {
        "first": short(points[0][1]),
        "last": short(points[-1][1]),
        "min": short(low[1]),
        "min_step": low[0],
        "max": short(high[1]),
        "max_step": high[0],
    }


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


def _json_lines(texts: Sequence[str]) -> list[Line]:
    rows: list[Line] = []
    for text in texts:
        try:
            row = json.loads(text)
        except ValueError:
            continue
        if isinstance(row, Mapping):
            rows.append(dict(row))
    return rows
