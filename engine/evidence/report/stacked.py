"""A chart of the groups of a GRPO run by kind, over its steps: stacked areas that add up to all
groups."""

from collections.abc import Mapping, Sequence

from markupsafe import Markup

from engine.evidence.report import charts
from engine.evidence.signal.kinds import KINDS, Kind
from engine.records.lines.curves import number
from engine.records.lines.line_record import Line

# Kind -> its text in the legend. The areas are stacked in this order, the first at the bottom.
_MEANINGS: Mapping[Kind, str] = {
    "effective": "rewards differ: these teach",
    "flat_partial": "all alike at a partial reward",
    "too_hard": "all without a reward",
    "too_easy": "all right",
}
assert set(_MEANINGS) == set(KINDS)
LEGEND = [(f"k-{kind}", meaning) for kind, meaning in _MEANINGS.items()]
_Shares = tuple[float, Mapping[Kind, float]]  # a step, and the share of its groups of each kind


def shares_by_step(lines: Sequence[Line]) -> list[_Shares]:
    """(step, share of groups of each kind) for every step whose groups were counted.

    A kind that a step lacks is 0: earlier versions counted flat_partial as too_hard.
    """
    shares_of_steps: list[_Shares] = []
    for line in lines:
        if number(line.get("groups_effective")) is not None:
            shares: dict[Kind, float] = {
                kind: number(line.get(f"groups_{kind}")) or 0.0 for kind in _MEANINGS
            }
            shares_of_steps.append((line["step"], shares))
    return shares_of_steps


def group_chart(lines: Sequence[Line], width: int, height: int) -> Markup:
    """The chart of the kinds of groups over the steps, as SVG; empty if there are fewer than two
    steps.

    If there are many steps, each share is a moving average. `width` and `height` are in pixels.
    """
    steps = shares_by_step(lines)
    if len(steps) < 2:
        return Markup("")
    first_step, last_step = steps[0][0], steps[-1][0]
    # The frame is made around a curve from 0 at the first step to 1 at the last.
    diagonal = charts.Curve([(first_step, 0.0), (last_step, 1.0)], is_share=True)
    frame = charts.Frame.around(diagonal, width, height)
    svg_parts = [
        *_areas(frame, steps),
        charts.grid_lines(frame, is_share=True),
        charts.step_labels(frame),
    ]
    return charts.as_svg(svg_parts, width, height, "Kinds of groups over the run")


def _areas(frame: charts.Frame, steps: Sequence[_Shares]) -> list[str]:
    """One SVG polygon for each kind of group, stacked: the lower edge of each is the upper edge of
    the previous one. An edge is a list of (step, height), heights from 0 to 1.

    `steps` holds (step, share of each kind of group at that step); the shares are smoothed.
    """
    lower_edge = [(step, 0.0) for step, _ in steps]
    polygons = []
    for kind in _MEANINGS:
        smoothed_shares = charts.moving_average([(step, shares[kind]) for step, shares in steps])
        upper_edge = []
        for (step, height), (_, share) in zip(lower_edge, smoothed_shares, strict=True):
            upper_edge.append((step, height + share))
        outline = [*upper_edge, *reversed(lower_edge)]
        polygons.append(f'<polygon class="k-{kind}" points="{_points(frame, outline)}"/>')
        lower_edge = upper_edge
    return polygons


def _points(frame: charts.Frame, outline: Sequence[tuple[float, float]]) -> str:
    """An outline of (step, height) as text for the SVG attribute `points`, such as "40.0,180.0
    52.5,91.0"."""
    points = []
    for step, height in outline:
        height = min(height, 1.0)  # rounding may lift the sum of the shares above 1
        points.append(f"{frame.x(step):.1f},{frame.y(height):.1f}")
    return " ".join(points)
