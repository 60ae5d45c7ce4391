"""Charts as inline SVG: no script, no font, no network, readable without hovering.

Colours come from CSS classes, so one drawing serves the light and the dark page. Text is drawn at
its final size; a chart that must stay legible on a phone is drawn twice, wide and narrow, and the
page shows one of them. Lengths are in pixels; y grows downwards.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from engine.evidence.report.values import axis_text, signed

Point = tuple[float, float]
_XOf = Callable[[float], float]  # a number -> its place, in pixels from the left
WIDE, NARROW = 1020, 360  # widths of a chart in pixels, on a screen and on a phone
_TOP, _BOTTOM = 14, 30  # margins above and below a curve
_SPARSE = 14  # up to this many points are drawn as dots; more get a moving average
_LETTER = 7.2  # width of the widest character of an axis label
_LABEL_GAP = 12  # free space beside the labels of an axis
_LEAST_RIGHT = 44.0  # margin on the right, so that the word "step" fits
# Half the width of a character, for text centred at a point: large, bold and small text.
_HALF_HEAD, _HALF_STRONG, _HALF_TICK = 4.9, 3.7, 3.6
# Height, y of the axis and side margins: of the drawing of an effect, then of the bar of a range.
_STRIP_HEIGHT, _STRIP_AXIS_Y, _STRIP_MARGIN = 104, 52, 18
_RANGE_HEIGHT, _RANGE_AXIS_Y, _RANGE_MARGIN = 84, 40, 14


@dataclass(frozen=True)
class Curve:
    """The data of one line chart.

    Attributes:
        points: (step, value).
        band: (step, low, high) of an area behind the points, such as a confidence interval.
        marks: (step, low, value, high): values measured separately, with their interval.
        is_share: whether values are shares, shown in percent.
        line_at: a step to mark with a vertical line labelled `line_label`; None for no line.
        last_step: the end of the axis; None takes the last step of the points.
        from_zero: whether the axis starts at 0.
    """

    points: Sequence[Point]
    band: Sequence[tuple[float, float, float]] = ()
    marks: Sequence[tuple[float, float, float, float]] = ()
    is_share: bool = False
    line_at: float | None = None
    line_label: str = ""
    last_step: float | None = None
    from_zero: bool = False


def line_chart(curve: Curve, width: int, height: int, label: str) -> Markup:
    """A curve over steps as SVG; empty if the curve has neither points nor marks.

    Many points are drawn faint, with their moving average on top. `width` and `height` are in
    pixels; `label` is read to people who do not see the drawing.
    """
    if not curve.points and not curve.marks:
        return Markup("")
    frame = Frame.around(curve, width, height)
    svg_parts = [grid_lines(frame, curve.is_share), step_labels(frame)]
    if curve.line_at is not None:
        svg_parts.append(_vertical_line(frame, curve.line_at, curve.line_label))
    if curve.band:
        svg_parts.append(_svg_band(frame, curve.band))
    svg_parts += _curve_lines(frame, curve.points)
    svg_parts += [_svg_mark(frame, mark) for mark in curve.marks]
    svg_parts.append(_end_label(frame, curve))
    return as_svg(svg_parts, width, height, label)


@dataclass(frozen=True)
class Effect:
    """A difference with its interval.

    Attributes:
        low, high: the ends of the interval.
        margin: differences smaller than this count as none.
        is_share: whether it is a difference of shares, shown in points.
        lower_is_better: True for a loss.
    """

    low: float
    value: float
    high: float
    margin: float
    is_share: bool
    lower_is_better: bool


def _effect_axis(effect: Effect) -> tuple[float, float]:
    """(start, end) of the axis on which an effect is drawn.

    If the interval contains 0, the axis extends equally far to both sides of 0. Else it is mostly
    the side that the interval is on, with about a fifth of the other side.
    """
    # The margin may fill five eighths (1 / 1.6) of a side; 1e-9 keeps the axis from having no
    # length if all are 0.
    farthest = max(abs(effect.low), abs(effect.high), effect.margin * 1.6, 1e-9)
    extent = farthest * 1.12  # nothing touches the end of the axis
    if effect.low < 0 < effect.high:
        return -extent, extent
    other_side = extent * 0.22
    return min(effect.low, -other_side), max(effect.high, other_side)


def effect_strip(effect: Effect, width: int, label: str) -> Markup:
    """A difference with its interval on an axis through 0, as SVG.

    Differences that count as none are shaded; the difference itself is written above the axis, the
    ends of its interval below.
    """
    x_of = _x_in_strip(_effect_axis(effect), width)
    svg_parts = [
        *_strip_shapes(effect, width, x_of),
        *_strip_labels(effect, width, x_of),
        _strip_headline(effect, width, x_of),
        *_direction_texts(effect, width),
    ]
    return as_svg(svg_parts, width, _STRIP_HEIGHT, label)


def _x_in_strip(axis: tuple[float, float], width: int) -> _XOf:
    """The function from a difference to pixels from the left, in a drawing `width` pixels wide.

    `axis` is (lowest, highest difference); 3 % of it stay free at each end.
    """
    axis_start, axis_end = axis
    axis_span = axis_end - axis_start
    axis_width = width - _STRIP_MARGIN - _STRIP_MARGIN

    def x_of(number: float) -> float:
        """Where `number` is drawn, in pixels from the left."""
        axis_part = (number - axis_start + axis_span * 0.03) / (axis_span * 1.06)
        return _STRIP_MARGIN + axis_part * axis_width

    return x_of


def _strip_shapes(effect: Effect, width: int, x_of: _XOf) -> list[str]:
    """The SVG shapes that draw an effect, without its texts: a shaded band for differences too
    small to matter, the axis, a vertical line at 0, the interval and a dot at the value."""
    x_zero, x_value = x_of(0), x_of(effect.value)
    x_low, x_high = x_of(effect.low), x_of(effect.high)
    axis_y = _STRIP_AXIS_Y
    on_axis = (axis_y, axis_y)  # both ends of a horizontal line
    return [
        _no_difference_band(x_of(-effect.margin), x_of(effect.margin)),
        _svg_line("axis", (_STRIP_MARGIN, width - _STRIP_MARGIN), on_axis),
        _svg_line("zero", (x_zero, x_zero), (axis_y - 26, axis_y + 26)),
        _svg_line("interval", (x_low, x_high), on_axis),
        f'<circle class="estimate" cx="{x_value:.1f}" cy="{axis_y}" r="7"/>',
    ]


def _no_difference_band(x_start: float, x_end: float) -> str:
    """The SVG of the shaded band of differences that are too small to matter. It reaches from
    `x_start` to `x_end`, in pixels from the left, and 22 pixels above and below the axis."""
    return (
        f'<rect class="moot" x="{x_start:.1f}" y="{_STRIP_AXIS_Y - 22}" rx="3" '
        f'width="{x_end - x_start:.1f}" height="44"/>'
    )


def _strip_labels(effect: Effect, width: int, x_of: _XOf) -> list[str]:
    """The texts below the axis as SVG: the ends of the interval, and "no change" at 0."""
    unit = " points" if effect.is_share else ""  # the headline shows the unit, the axis does not
    low_text = signed(effect.low, effect.is_share).removesuffix(unit)
    high_text = signed(effect.high, effect.is_share).removesuffix(unit)
    # The first labels have priority: "no change" is left out if it would overlap the numbers.
    labels = [
        (x_of(effect.low), low_text),
        (x_of(effect.high), high_text),
        (x_of(0), "no change"),
    ]
    return _labels(labels, width, _STRIP_AXIS_Y + 44, gap=6)


def _strip_headline(effect: Effect, width: int, x_of: _XOf) -> str:
    """The difference as text, above its dot on the axis."""
    text = signed(effect.value, effect.is_share)
    x = _centre_inside(x_of(effect.value), _HALF_HEAD * len(text), width)
    return _svg_text("head mid", x, _STRIP_AXIS_Y - 16, text)


def _direction_texts(effect: Effect, width: int) -> list[str]:
    """The texts in the upper corners that say which direction is better."""
    if effect.lower_is_better:
        left_text, right_text = "← better", "worse →"
    else:
        left_text, right_text = "← worse", "better →"
    return [
        _svg_text("faint", _STRIP_MARGIN, 11, left_text),
        _svg_text("faint end", width - _STRIP_MARGIN, 11, right_text),
    ]


@dataclass(frozen=True)
class Range:
    """The estimated range of a value, and the value itself.

    Attributes:
        actual: the value; None while it is not known.
        texts: four labels, for low, likely, high and actual.
    """

    low: float
    likely: float
    high: float
    actual: float | None
    texts: Sequence[str]


def range_bar(estimate: Range, width: int, label: str) -> Markup:
    """The range of an estimate as a bar, as SVG; the actual value, if it is known, is a mark on it.

    `label` is read to people who do not see the drawing.
    """
    # 1e-9 keeps the axis from having no length if all are 0; 1.06 leaves room at the end.
    axis_end = max(estimate.high, estimate.actual or 0.0, 1e-9) * 1.06
    x_of = _x_in_range(axis_end, width)
    low_text, likely_text, high_text, actual_text = estimate.texts
    svg_parts = _range_shapes(estimate, width, x_of)
    if estimate.actual is not None:
        svg_parts += _actual_mark(x_of(estimate.actual), actual_text, width)
    # The first labels have priority if they would overlap.
    labels = [
        (x_of(estimate.likely), likely_text),
        (x_of(estimate.high), high_text),
        (x_of(estimate.low), low_text),
    ]
    svg_parts += _labels(labels, width, _RANGE_AXIS_Y + 30, gap=8)
    return as_svg(svg_parts, width, _RANGE_HEIGHT, label)


def _x_in_range(axis_end: float, width: int) -> _XOf:
    """The function from a value to pixels from the left, on an axis from 0 to `axis_end`."""

    def x_of(number: float) -> float:
        """Where `number` is drawn, in pixels from the left."""
        return _RANGE_MARGIN + number / axis_end * (width - _RANGE_MARGIN - _RANGE_MARGIN)

    return x_of


def _range_shapes(estimate: Range, width: int, x_of: _XOf) -> list[str]:
    """SVG shapes: the axis, the bar from the low to the high value, a line at the likely value.

    `width` is that of the drawing; `x_of` gives the place of a value, in pixels from the left.
    """
    x_low, x_likely, x_high = x_of(estimate.low), x_of(estimate.likely), x_of(estimate.high)
    axis_y = _RANGE_AXIS_Y
    bar_width = max(x_high - x_low, 3)  # narrower would not be seen
    return [
        _svg_line("axis", (_RANGE_MARGIN, width - _RANGE_MARGIN), (axis_y, axis_y)),
        f'<rect class="range" x="{x_low:.1f}" y="{axis_y - 9}" rx="4" '
        f'width="{bar_width:.1f}" height="18"/>',
        _svg_line("likely", (x_likely, x_likely), (axis_y - 9, axis_y + 9)),
    ]


def _actual_mark(mark_x: float, text: str, width: int) -> list[str]:
    """The SVG of the actual value at `mark_x` pixels from the left: an arrow, a line, a text."""
    axis_y = _RANGE_AXIS_Y
    x_text = _centre_inside(mark_x, _HALF_STRONG * len(text), width)
    return [
        f'<path class="actual" d="M{mark_x:.1f} {axis_y - 11}l-7 -11h14z"/>',
        _svg_line("actualline", (mark_x, mark_x), (axis_y - 11, axis_y + 11)),
        _svg_text("strong mid", x_text, 12, text),
    ]


def _centre_inside(x: float, half_width: float, width: int) -> float:
    """The centre nearest to `x` at which a text of twice `half_width` stays inside a drawing of
    `width` pixels, two pixels from its edges."""
    leftmost, rightmost = half_width + 2, width - half_width - 2
    return min(max(x, leftmost), rightmost)


def _svg_line(style: str, xs: tuple[float, float], ys: tuple[float, float]) -> str:
    """The SVG of a line from (xs[0], ys[0]) to (xs[1], ys[1]); `style` is its CSS class."""
    (x1, x2), (y1, y2) = xs, ys
    ends = f'x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"'
    return f'<line class="{style}" {ends}/>'


def _svg_text(style: str, x: float, y: float, text: str) -> str:
    """The SVG of a text at (x, y); `style` is its CSS class."""
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _labels(texts: Sequence[tuple[float, str]], width: int, y: int, gap: int) -> list[str]:
    """The SVG of texts `y` pixels from the top, each given as (x of its centre, text).

    A text that would leave the drawing, `width` pixels wide, is moved inside. One that would then
    be nearer than `gap` pixels to an earlier text is left out.
    """
    drawn: list[tuple[float, float]] = []  # (centre, half the width) of each text drawn
    parts = []
    for preferred_x, text in texts:
        half_width = _HALF_TICK * len(text)
        x = _centre_inside(preferred_x, half_width, width)
        overlaps = any(
            abs(x - other_x) < half_width + other_half_width + gap
            for other_x, other_half_width in drawn
        )
        if not overlaps:
            drawn.append((x, half_width))
            parts.append(_svg_text("tick mid", x, y, text))
    return parts


def level_bar(
    value: float, low: float, high: float, axis: tuple[float, float], label: str
) -> Markup:
    """A level with its interval as a small drawing for a table cell, as SVG.

    `axis` is the lowest and the highest value of the axis; `label` is read to people who do not see
    the drawing.
    """
    width, height, y_middle = 220, 22, 11
    axis_start, axis_end = axis
    axis_span = max(axis_end - axis_start, 1e-9)  # never 0: it is a divisor

    def x_of(number: float) -> float:
        """Where `number` is drawn, in pixels from the left; the dot needs 6 pixels at each end."""
        return 6 + (number - axis_start) / axis_span * (width - 12)

    svg_parts = [
        _svg_line("axis", (4, width - 4), (y_middle, y_middle)),
        _svg_line("interval", (x_of(low), x_of(high)), (y_middle, y_middle)),
        f'<circle class="estimate" cx="{x_of(value):.1f}" cy="{y_middle}" r="5"/>',
    ]
    return as_svg(svg_parts, width, height, label)


def nice_ticks(low: float, high: float, wanted_count: int = 4) -> list[float]:
    """Round, evenly spaced numbers that cover `low` to `high`, about `wanted_count` of them.

    nice_ticks(0, 0.9) gives [0, 0.25, 0.5, 0.75, 1]. If `low` and `high` are equal, except for
    rounding, the range is widened upwards.
    """
    # A range below 1e-200 could have a step that rounds to 0, which has no logarithm.
    if _are_equal(low, high) or high - low < 1e-200:
        added_range = abs(low) if abs(low) > 1e-200 else 1.0
        high = low + added_range
    step = _round_step((high - low) / wanted_count)
    # 1e-9 so that a rounding error does not add a tick.
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def _round_step(exact_step: float) -> float:
    """The smallest round number that is at least `exact_step`: 1, 2, 2.5 or 5 times a power of
    ten."""
    power_of_ten = 10 ** math.floor(math.log10(exact_step))
    round_steps = (1, 2, 2.5, 5, 10)
    least_step = exact_step * 0.999  # so that a rounding error does not lead to the next larger one
    factor = next(factor for factor in round_steps if factor * power_of_ten >= least_step)
    return factor * power_of_ten


def _are_equal(low: float, high: float) -> bool:
    """Whether two numbers are equal, except for rounding."""
    return high - low <= 1e-12 * max(abs(low), abs(high))


@dataclass(frozen=True)
class Frame:
    """The mapping from steps and values to pixels of the drawing.

    Attributes:
        first_step, last_step: the ends of the step axis.
        ticks: the values with a line and a label; the first and the last end the value axis.
        margin_left, margin_right: free space beside the curve, for labels.
    """

    first_step: float
    last_step: float
    ticks: Sequence[float]
    width: int
    height: int
    margin_left: float
    margin_right: float

    @staticmethod
    def around(curve: Curve, width: int, height: int) -> "Frame":
        """The frame of a drawing of `width` by `height` pixels, with room for the labels.

        `curve` must have a point or a mark; its `last_step` may lengthen the axis beyond them.
        """
        steps = [step for step, _ in curve.points] + [step for step, *_ in curve.marks]
        ticks = nice_ticks(*_value_range(curve))
        longest_tick = max(len(axis_text(tick, curve.is_share)) for tick in ticks)
        return Frame(
            first_step=min(steps),
            last_step=max([*steps, curve.last_step or 0]),
            ticks=ticks,
            width=width,
            height=height,
            margin_left=_LABEL_GAP + _LETTER * longest_tick,
            margin_right=_right_margin(curve),
        )

    def x(self, step: float) -> float:
        """Where a step is drawn, in pixels from the left."""
        span = (self.last_step - self.first_step) or 1.0  # 1 if there is only one step
        curve_width = self.width - self.margin_left - self.margin_right
        return self.margin_left + (step - self.first_step) / span * curve_width

    def y(self, value: float) -> float:
        """Where a value is drawn, in pixels from the top."""
        low, high = self.ticks[0], self.ticks[-1]
        curve_height = self.height - _TOP - _BOTTOM
        return self.height - _BOTTOM - (value - low) / (high - low) * curve_height


def _right_margin(curve: Curve) -> float:
    """The pixels to leave free to the right of a curve, where the value at its end is written."""
    end = _line_end(curve)
    if end is None:
        return _LEAST_RIGHT
    _, end_value = end
    # One character more, for the dot at the end of the line.
    label_length = len(axis_text(end_value, curve.is_share)) + 1
    bold_letter = 1.1 * _LETTER  # the label is bold, so its characters are wider
    return max(_LEAST_RIGHT, _LABEL_GAP + bold_letter * label_length)


def _drawn_values(curve: Curve) -> list[float]:
    """Every value that a drawing of the curve shows: those of its points, its band and its
    marks."""
    values = [value for _, value in curve.points]
    values += [bound for _, low, high in curve.band for bound in (low, high)]
    for _, low, value, high in curve.marks:
        values += [low, value, high]
    return values


def _value_range(curve: Curve) -> tuple[float, float]:
    """(lowest, highest) value that the axis of a curve must cover; never two equal numbers."""
    values = _drawn_values(curve)
    low, high = min(values), max(values)
    all_within_0_and_1 = low >= 0.0 and high <= 1.0
    # An axis of shares starts at 0 unless that would waste about a third of the height.
    if curve.from_zero or (curve.is_share and low < 0.35 * high):
        low = min(low, 0.0)
    if _are_equal(low, high):
        padding = abs(low) * 0.1 or 0.5  # 0.5 if both are 0
        high += padding
        if low:  # an axis of zeros starts at 0
            low -= padding
    if curve.is_share and all_within_0_and_1:  # the padding must not go beyond 0 and 1
        low, high = max(low, 0.0), min(high, 1.0)
    return low, high


def grid_lines(frame: Frame, is_share: bool) -> str:
    """The SVG of a horizontal line with its label for every tick of the value axis; `is_share` says
    that values are shares, shown in percent."""
    left_x, right_x = frame.margin_left, frame.width - frame.margin_right
    parts = []
    for tick in frame.ticks:
        y = frame.y(tick)
        parts.append(_svg_line("grid", (left_x, right_x), (y, y)))
        # The label ends left of the line; 4 pixels lower, its middle is at the height of the line.
        parts.append(_svg_text("tick end", left_x - 8, y + 4, axis_text(tick, is_share)))
    return "".join(parts)


def step_labels(frame: Frame) -> str:
    """The labels of the step axis: some whole steps, and the word "step" at its end."""
    label_y = frame.height - _BOTTOM + 19  # below the axis
    tick_count = 5 if frame.width > 460 else 3  # fewer on a phone and in small charts
    parts = []
    for tick in nice_ticks(frame.first_step, frame.last_step, wanted_count=tick_count):
        is_whole = tick == int(tick)
        if is_whole and frame.first_step <= tick <= frame.last_step:
            parts.append(_svg_text("tick mid", frame.x(tick), label_y, str(int(tick))))
    word_x = frame.width - frame.margin_right + 14
    return "".join(parts) + _svg_text("faint", word_x, label_y, "step")


def _vertical_line(frame: Frame, step: float, text: str) -> str:
    """The SVG of a vertical line at `step`, with `text` on the side that has more room."""
    line_x, bottom = frame.x(step), frame.height - _BOTTOM
    line = _svg_line("best", (line_x, line_x), (_TOP, bottom))
    label_y = bottom - 7  # just above the axis
    if line_x > frame.width * 0.6:  # a label to the right of it might leave the drawing
        return line + _svg_text("bestlabel end", line_x - 6, label_y, text)
    return line + _svg_text("bestlabel", line_x + 6, label_y, text)


def _svg_band(frame: Frame, band: Sequence[tuple[float, float, float]]) -> str:
    """The area between the low and the high values, given as (step, low, high), as SVG.

    Its outline runs along the high values and back along the low ones.
    """
    top = [f"{frame.x(step):.1f},{frame.y(high):.1f}" for step, _, high in band]
    bottom = [f"{frame.x(step):.1f},{frame.y(low):.1f}" for step, low, _ in reversed(band)]
    outline = " ".join(top + bottom)
    return f'<polygon class="band" points="{outline}"/>'


def _curve_lines(frame: Frame, points: Sequence[Point]) -> list[str]:
    """The SVG of the line: few points with dots, many points as a faint line with their moving
    average.

    Returns [] without points.
    """
    if not points:
        return []
    if len(points) <= _SPARSE:
        dots = "".join(
            f'<circle class="dot" cx="{frame.x(step):.1f}" cy="{frame.y(value):.1f}" r="3.5"/>'
            for step, value in points
        )
        return [_svg_path(frame, points, "line"), dots]
    smooth = moving_average(points)
    return [_svg_path(frame, points, "raw"), _svg_path(frame, smooth, "line")]


def moving_average(points: Sequence[Point]) -> list[Point]:
    """The points, with each value replaced by the mean of the values around it.

    The window is about a twelfth of the curve, centred, and shorter at the ends.
    """
    half_window = max(1, len(points) // 24)
    values = [value for _, value in points]
    smoothed_points = []
    for index, (step, _) in enumerate(points):
        window = values[max(0, index - half_window) : index + half_window + 1]
        smoothed_points.append((step, math.fsum(window) / len(window)))
    return smoothed_points


def _svg_path(frame: Frame, points: Sequence[Point], style: str) -> str:
    """The SVG of a line through the points; `style` is its CSS class."""
    corners = " ".join(f"{frame.x(step):.1f},{frame.y(value):.1f}" for step, value in points)
    return f'<polyline class="{style}" points="{corners}"/>'


def _svg_mark(frame: Frame, mark: tuple[float, float, float, float]) -> str:
    """The SVG of a separately measured value, given as (step, low, value, high): a diamond, and a
    vertical line for its interval."""
    step, low, value, high = mark
    centre_x, centre_y = frame.x(step), frame.y(value)
    interval = _svg_line("whisker", (centre_x, centre_x), (frame.y(low), frame.y(high)))
    # From the top corner, 7 pixels above the centre, to the right, bottom and left corners.
    outline = f"M{centre_x:.1f} {centre_y - 7:.1f}l7 7l-7 7l-7 -7z"
    return f'{interval}<path class="mark" d="{outline}"/>'


def _end_label(frame: Frame, curve: Curve) -> str:
    """The SVG of a dot at the end of the line with its value; "" without points."""
    end = _line_end(curve)
    if end is None:
        return ""
    step, value = end
    dot_x, dot_y = frame.x(step), frame.y(value)
    dot = f'<circle class="lastdot" cx="{dot_x:.1f}" cy="{dot_y:.1f}" r="4"/>'
    return dot + _svg_text("strong", dot_x + 9, dot_y + 4, axis_text(value, curve.is_share))


def _line_end(curve: Curve) -> Point | None:
    """The last point of the line as it is drawn; None without points.

    If there are many points, it is the last point of their moving average.
    """
    if not curve.points:
        return None
    if len(curve.points) <= _SPARSE:
        return curve.points[-1]
    return moving_average(curve.points)[-1]


def as_svg(parts: Sequence[str], width: int, height: int, label: str) -> Markup:
    """The `parts`, SVG elements as text, as one drawing of `width` by `height` pixels; `label`
    describes it to screen readers."""
    start_tag = (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{escape(label)}">'
    )
    # `Markup` marks it as safe HTML: the functions that made the parts have escaped their texts.
    return Markup(start_tag + "".join(parts) + "</svg>")
