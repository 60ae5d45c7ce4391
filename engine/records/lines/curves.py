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
_EXACT_BYTES = 8_000_000  # of a longer file only a sample is read, so that it takes no longer
_SAMPLES = 400  # evenly spread lines that are read from the first part of such a file
_FIRST_LINES = 20  # first lines that are read too, because curves change fastest there
# The columns that are shown first if a caller names none.
_MAIN = (
    "heldout_success",
    "heldout_reward",
    "heldout_loss",
    "reward_mean",
    "loss",
    "reverse_kl",
    "preference_accuracy",
    "chosen_reward",
    "rejected_reward",
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
        lines: the lines of `metrics.jsonl`, one per step in order of steps.
        end: the byte after the last whole line of the file.
        sampled: whether lines of a long file were left out.
        skipped: how many lines hold no JSON object.
    """

    lines: list[Line]
    end: int
    sampled: bool
    skipped: int = 0

    @property
    def columns(self) -> list[str]:
        """The names of all metrics in the lines.

        The trainer's metrics come first, in the order of `METRICS`, then the environment's own, in
        alphabetical order.
        """
        # "model" is not a metric: it names the model of an evaluation that the line is about.
        measured = {name for line in self.lines for name in line} - {*LINE_KEYS, "model"}
        documented = [name for name in METRICS if name in measured]
        return documented + sorted(measured - set(documented))

    def curve(self, name: str) -> list[tuple[float, float]]:
        """Return the curve of the metric `name` as (step, value), in order of steps.

        Lines on which the metric is missing or not a finite number are left out.
        """
        points: list[tuple[float, float]] = []
        for line in self.lines:
            value = number(line.get(name))
            if value is not None:
                points.append((line["step"], value))
        return points


def load_metrics(path: Path) -> Metrics:
    """Read the metrics in the file at `path`, one line per step; a missing file has no lines.

    Of a file above 8 MB only a part is read: its first 20 lines, 400 lines that are spread over its
    first part, and its last 4 MB.
    """
    end = complete_size(path)
    if end <= _EXACT_BYTES:
        chunk = read_chunk(path, cursor=0, max_bytes=_EXACT_BYTES + 1)  # the whole file
        return Metrics(by_step(chunk.rows), end, sampled=False, skipped=chunk.damaged)
    tail_start = end - _EXACT_BYTES // 2
    rows = _sampled_rows(path, tail_start)
    tail = read_chunk(path, tail_start, max_bytes=end - tail_start)
    # `skipped` counts damaged lines of the tail only.
    return Metrics(by_step(rows + tail.rows), end, sampled=True, skipped=tail.damaged)


def _sampled_rows(path: Path, end: int) -> list[Line]:
    """Read the first lines of the file at `path`, and lines that are evenly spread over its first
    `end` bytes."""
    sampled = list(page_after(path, start=0, limit=_FIRST_LINES).lines)
    for index in range(1, _SAMPLES):
        offset = end * index // _SAMPLES  # usually inside a line; then the next line is read
        sampled += page_after(path, offset, limit=1).lines
    return parse_lines([line.text for line in sampled])


def by_step(rows: Sequence[Line]) -> list[Line]:
    """Merge the rows to one line per step, in order of steps.

    A resumed run may have written a step twice; the later values replace the earlier ones. Rows
    without a step are left out.
    """
    line_of_step: dict[float, Line] = {}
    for row in rows:
        step = number(row.get("step"))
        if step is not None:
            line_of_step[step] = line_of_step.get(step, {}) | row
    return [line_of_step[step] for step in sorted(line_of_step)]


def main_columns(columns: Sequence[str], limit: int) -> list[str]:
    """Choose at most `limit` columns to show to a caller who named none.

    The main columns come first, then the environment's own metrics, then the rest.
    """
    main = [name for name in _MAIN if name in columns]
    # The environment's metrics on held-out tasks are left out here and come with the rest.
    of_the_environment = [
        name for name in columns if name not in METRICS and not name.startswith("heldout_")
    ]
    return list(dict.fromkeys([*main, *of_the_environment, *columns]))[:limit]


def thin(lines: Sequence[Line], keys: Sequence[str], points: int = POINTS) -> list[Line]:
    """Choose about `points` of the lines, in order, to show the metrics `keys`.

    The first line, the last line and the lines with extreme values are always chosen, even if they
    are more than `points`. If there is room, lines with rarely measured metrics are added, then
    lines that are spread evenly.
    """
    if len(lines) <= points:
        return list(lines)
    chosen = _extreme_indices(lines, keys)
    for index in sorted(_rarely_measured_indices(lines, keys)):
        if len(chosen) < points:
            chosen.add(index)
    unchosen = [index for index in range(len(lines)) if index not in chosen]
    room = max(0, points - len(chosen))
    chosen |= set(_evenly_spread(unchosen, room))
    return [lines[index] for index in sorted(chosen)]


def _extreme_indices(lines: Sequence[Line], keys: Sequence[str]) -> set[int]:
    """Return the indices of the first and the last line, and of the lines with the first, lowest,
    highest and last value of each metric in `keys`. `lines` must not be empty."""
    extremes = {0, len(lines) - 1}
    for key in keys:
        measured = _measured_indices(lines, key)
        if measured:
            lowest = min(measured, key=lambda index: lines[index][key])
            highest = max(measured, key=lambda index: lines[index][key])
            extremes |= {measured[0], measured[-1], lowest, highest}
    return extremes


def _rarely_measured_indices(lines: Sequence[Line], keys: Sequence[str]) -> set[int]:
    """Return the indices of the lines that have a rare metric of `keys`.

    A metric is rare if at most a third of the lines have it, such as the score of an evaluation.
    """
    rare: set[int] = set()
    for key in keys:
        measured = _measured_indices(lines, key)
        if len(measured) * 3 <= len(lines):
            rare |= set(measured)
    return rare


def _measured_indices(lines: Sequence[Line], key: str) -> list[int]:
    """Return the indices of the lines on which the metric `key` is a finite number, in order."""
    return [index for index, line in enumerate(lines) if number(line.get(key)) is not None]


def _evenly_spread(items: Sequence[int], count: int) -> list[int]:
    """Choose `count` evenly spread items: the middle one of each of `count` equal parts.

    Returns [] if `count` is 0 or less.
    """
    # The part number `part`, counted from 0, has its middle half a part after its beginning.
    return [items[int((part + 0.5) * len(items) / count)] for part in range(count)]


@dataclass(frozen=True)
class CurveSummary:
    """The first, last, lowest and highest value of a curve, with the steps of the extremes."""

    first: float
    last: float
    min: float
    min_step: float
    max: float
    max_step: float


def summary_of(points: Sequence[tuple[float, float]]) -> CurveSummary:
    """Summarise a curve. `points` are (step, value) in order of steps; there is at least one."""
    values = [value for _, value in points]
    # If several values are equal, min and max return the first.
    min_step, min_value = min(points, key=lambda point: point[1])
    max_step, max_value = max(points, key=lambda point: point[1])
    return CurveSummary(
        first=short(values[0]),
        last=short(values[-1]),
        min=short(min_value),
        min_step=min_step,
        max=short(max_value),
        max_step=max_step,
    )


def spark(values: Sequence[float], width: int = 24) -> str:
    """Draw a curve as at most `width` block characters, such as `▁▃▅█`; "" if there are no values.

    The lowest value becomes the lowest block, the highest value the full block. If there are more
    values than `width`, each character shows the mean of several values.
    """
    if not values:
        return ""
    if len(values) > width:
        values = _means_of_parts(values, width)
    lowest, highest = min(values), max(values)
    blocks = "▁▂▃▄▅▆▇█"
    # Block heights per unit of value; 0 if all values are equal, which draws a flat line.
    scale = (len(blocks) - 1) / (highest - lowest) if highest > lowest else 0.0
    return "".join(blocks[round((value - lowest) * scale)] for value in values)


def _means_of_parts(values: Sequence[float], parts: int) -> list[float]:
    """Cut the values into `parts` sections of about equal length, and return the mean of each.

    There must be at least as many values as sections.
    """
    edges = [len(values) * part // parts for part in range(parts + 1)]
    sections = itertools.pairwise(edges)  # (start, end) of each
    return [math.fsum(values[start:end]) / (end - start) for start, end in sections]


def short(value: float) -> float:
    """Round `value` to five significant digits, which are enough for any curve."""
    return float(f"{value:.5g}")


def number(value: Any) -> float | None:
    """Return `value` if it is a finite number, otherwise None. True and False are no numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def parse_lines(texts: Sequence[str]) -> list[Line]:
    """Parse lines of text as JSON objects, in order. A line that is no JSON object is left out."""
    rows: list[Line] = []
    for text in texts:
        try:
            row = json.loads(text)
        except (ValueError, RecursionError):  # RecursionError: nested too deeply
            continue
        if isinstance(row, Mapping):
            rows.append(dict(row))
    return rows
