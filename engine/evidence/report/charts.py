"""Charts as inline SVG: no script, no font, no network, readable without hovering.

Colours come from classes, so one drawing serves light and dark. Text is drawn at its final size;
what must stay legible on a phone is drawn twice, wide and narrow, and the page shows one of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup, escape

Point = tuple[float, float]
WIDE, NARROW = 1020, 360  # pixels: what a chart is drawn for on a screen and on a phone
_TOP, _BOTTOM = 14, 30
_SPARSE = 14  # so few points are drawn as dots, more as a line with its average
_LETTER = 7.2  # width of a character of an axis label, at most


@dataclass(frozen=True)
class Curve:
    """What one chart shows.

    Attributes:
        points: (step, value).
        band: (step, low, high) drawn behind them, such as a confidence interval.
        marks: (step, low, value, high): values measured apart, with their interval.
        share: values are shares, the axis says percent.
        line_at: a step to mark with a vertical line, with `line_label` at its head.
        end: the last step of the axis; by default that of the points.
        zero: the axis starts at 0.
    """

    points: Sequence[Point]
    band: Sequence[tuple[float, float, float]] = field(default=())
    marks: Sequence[tuple[float, float, float, float]] = field(default=())
    share: bool = False
    line_at: float | None = None
    line_label: str = ""
    end: float | None = None
    zero: bool = False


def line_chart(curve: Curve, width: int, height: int, label: str) -> Markup:
    """A curve over steps. Many noisy points are drawn faint with their moving average on top."""
    xs = [step for step, _ in curve.points] + [mark[0] for mark in curve.marks]
    ys = [value for _, value in curve.points]
    ys += [v for _, low, high in curve.band for v in (low, high)]
    ys += [v for mark in curve.marks for v in mark[1:]]
    if not xs or not ys:
        return Markup("")
    last = max([*xs, curve.end or 0])
    frame = _Frame.around(min(xs), last, ys, curve, width, height)
    parts = [_grid(frame, curve.share), _steps(frame)]
    if curve.line_at is not None:
        parts.append(_vertical(frame, curve.line_at, curve.line_label))
    if curve.band:
        parts.append(_band(frame, curve.band))
    parts += _lines(frame, curve.points)
    parts += [_mark(frame, mark) for mark in curve.marks]
    parts.append(_last_label(frame, curve))
    return _svg(parts, width, height, label)


@dataclass(frozen=True)
class Effect:
    """A difference with its interval.

    Attributes:
        margin: a difference below it counts as none.
        share: it is of a share, shown in points.
    """

    low: float
    value: float
    high: float
    margin: float
    share: bool
    lower_is_better: bool


def effect_strip(effect: Effect, width: int, label: str) -> Markup:
    """A difference around 0; shaded is what would be too small to matter."""
    low, value, high = effect.low, effect.value, effect.high
    margin, share = effect.margin, effect.share
    height, left, right, middle = 104, 18, 18, 52
    reach = max(abs(low), abs(high), margin * 1.6, 1e-9) * 1.12
    ends = (-reach, reach) if low < 0 < high else (min(low, -reach * 0.22), max(high, reach * 0.22))
    span = ends[1] - ends[0]
    room = width - left - right

    def x_of(number: float) -> float:
        return left + (number - ends[0] + span * 0.03) / (span * 1.06) * room

    parts = [
        f'<rect class="moot" x="{x_of(-margin):.1f}" y="{middle - 22}" rx="3" '
        f'width="{x_of(margin) - x_of(-margin):.1f}" height="44"/>',
        _line("axis", (left, width - right), (middle, middle)),
        _line("zero", (x_of(0), x_of(0)), (middle - 26, middle + 26)),
        _line("interval", (x_of(low), x_of(high)), (middle, middle)),
        f'<circle class="estimate" cx="{x_of(value):.1f}" cy="{middle}" r="7"/>',
    ]
    unit = " points" if share else ""
    end_texts = [signed(number, share).removesuffix(unit) for number in (low, high)]
    # The numbers first; "no change" gives way to them.
    texts = [(x_of(low), end_texts[0]), (x_of(high), end_texts[1]), (x_of(0), "no change")]
    parts += _labels(texts, width, middle + 44, gap=6)
    headline = signed(value, share)
    x = _inside(x_of(value), 4.9 * len(headline), width)
    parts.append(_text("head mid", x, middle - 16, headline))
    better = ("← better", "worse →") if effect.lower_is_better else ("← worse", "better →")
    parts.append(_text("faint", left, 11, better[0]))
    parts.append(_text("faint end", width - right, 11, better[1]))
    return _svg(parts, width, height, label)


@dataclass(frozen=True)
class Range:
    """An estimate with what came in the end; `texts` name low, likely, high and actual."""

    low: float
    likely: float
    high: float
    actual: float | None
    texts: Sequence[str]


def range_bar(estimate: Range, width: int, label: str) -> Markup:
    """The range of an estimate as a bar, and what was used as a mark on it."""
    low, likely, high = estimate.low, estimate.likely, estimate.high
    actual, texts = estimate.actual, estimate.texts
    height, left, right, middle = 84, 14, 14, 40
    top = max(high, actual or 0.0, 1e-9) * 1.06

    def x_of(number: float) -> float:
        return left + number / top * (width - left - right)

    parts = [
        _line("axis", (left, width - right), (middle, middle)),
        f'<rect class="range" x="{x_of(low):.1f}" y="{middle - 9}" rx="4" '
        f'width="{max(x_of(high) - x_of(low), 3):.1f}" height="18"/>',
        _line("likely", (x_of(likely), x_of(likely)), (middle - 9, middle + 9)),
    ]
    if actual is not None:
        parts.append(f'<path class="actual" d="M{x_of(actual):.1f} {middle - 11}l-7 -11h14z"/>')
        parts.append(_line("actualline", (x_of(actual), x_of(actual)), (middle - 11, middle + 11)))
        x = _inside(x_of(actual), 3.7 * len(texts[3]), width)
        parts.append(_text("strong mid", x, 12, texts[3]))
    below = [(x_of(likely), texts[1]), (x_of(high), texts[2]), (x_of(low), texts[0])]
    parts += _labels(below, width, middle + 30, gap=8)
    return _svg(parts, width, height, label)


def _inside(x: float, half: float, width: int) -> float:
    """The middle nearest to `x` of a text of width 2 `half` that stays inside the drawing."""
    return min(max(x, half + 2), width - half - 2)


def _line(style: str, xs: tuple[float, float], ys: tuple[float, float]) -> str:
    ends = f'x1="{xs[0]:.1f}" x2="{xs[1]:.1f}" y1="{ys[0]:.1f}" y2="{ys[1]:.1f}"'
    return f'<line class="{style}" {ends}/>'


def _text(style: str, x: float, y: float, text: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _labels(texts: Sequence[tuple[float, str]], width: int, y: int, gap: int) -> list[str]:
    """(x, text) as centred texts; one less than `gap` pixels from an earlier one is left out."""
    placed: list[tuple[float, float]] = []
    parts = []
    for wanted, text in texts:
        half = 3.6 * len(text)
        x = _inside(wanted, half, width)
        if all(abs(x - other) >= half + other_half + gap for other, other_half in placed):
            placed.append((x, half))
            parts.append(_text("tick mid", x, y, text))
    return parts


def level_bar(
    value: float, low: float, high: float, floor: float, top: float, label: str
) -> Markup:
    """A level with its interval as a small bar for a table cell."""
    width, height, middle = 220, 22, 11
    span = max(top - floor, 1e-9)

    def x_of(number: float) -> float:
        return 6 + (number - floor) / span * (width - 12)

    parts = [
        _line("axis", (4, width - 4), (middle, middle)),
        _line("interval", (x_of(low), x_of(high)), (middle, middle)),
        f'<circle class="estimate" cx="{x_of(value):.1f}" cy="{middle}" r="5"/>',
    ]
    return _svg(parts, width, height, label)


def signed(value: float, share: bool) -> str:
    """A difference as text: points for shares."""
    if share:
        return f"{100 * value:+.1f} points".replace("-", "−")
    return f"{value:+.3g}".replace("-", "−")


def shown(value: float, share: bool) -> str:
    """A value as text, short enough for an axis."""
    if share:
        text = f"{100 * value:.0f}" if abs(value) >= 0.0995 else f"{100 * value:.1f}"
        return f"{text.removesuffix('.0')} %".replace("-0 %", "0 %")
    size = abs(value)
    if size >= 1e6 or 0 < size < 1e-3:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}".replace("-", "−")
    if size >= 10_000:
        return f"{value / 1000:.3g}k".replace("-", "−")
    if size >= 1000:
        return f"{value:,.0f}".replace("-", "−")
    return f"{value:.3g}".replace("-", "−")


def nice_ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers that span low to high, `about` of them."""
    if high - low <= 1e-12 * max(abs(low), abs(high)) or high - low < 1e-200:
        high = low + (abs(low) if abs(low) > 1e-200 else 1.0)
    raw = (high - low) / about
    power = 10 ** math.floor(math.log10(raw))
    step = next(step for step in (1, 2, 2.5, 5, 10) if step * power >= raw * 0.999) * power
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [float(f"{k * step:.12g}") for k in range(first, last + 1)]


@dataclass(frozen=True)
class _Frame:
    """The mapping from steps and values to the drawing."""

    first: float
    last: float
    ticks: Sequence[float]
    width: int
    height: int
    left: float
    right: float

    @staticmethod
    def around(
        first: float, last: float, ys: Sequence[float], curve: Curve, width: int, height: int
    ) -> "_Frame":
        low, high = min(ys), max(ys)
        if curve.zero or (curve.share and low < 0.35 * high):
            low = min(low, 0.0)
        if high - low <= 1e-12 * max(abs(low), abs(high)):
            pad = abs(low) * 0.1 or 0.5
            low, high = (low - pad if low else 0.0), high + pad
        if curve.share and min(ys) >= 0.0 and max(ys) <= 1.0:
            low, high = max(low, 0.0), min(high, 1.0)
        ticks = nice_ticks(low, high)
        widest = max(len(shown(tick, curve.share)) for tick in ticks)
        end = _end_of(curve)
        longest = len(shown(end[1], curve.share)) + 1 if end else 0
        left, right = 12 + _LETTER * widest, max(44.0, 12 + 1.1 * _LETTER * longest)
        return _Frame(first, last, ticks, width, height, left, right)

    def x(self, step: float) -> float:
        span = (self.last - self.first) or 1.0
        return self.left + (step - self.first) / span * (self.width - self.left - self.right)

    def y(self, value: float) -> float:
        low, high = self.ticks[0], self.ticks[-1]
        return self.height - _BOTTOM - (value - low) / (high - low) * (self.height - _TOP - _BOTTOM)


def _grid(frame: _Frame, share: bool) -> str:
    parts = []
    for tick in frame.ticks:
        y = frame.y(tick)
        parts.append(_line("grid", (frame.left, frame.width - frame.right), (y, y)))
        parts.append(_text("tick end", frame.left - 8, y + 4, shown(tick, share)))
    return "".join(parts)


def _steps(frame: _Frame) -> str:
    y = frame.height - _BOTTOM + 19
    parts = [
        _text("tick mid", frame.x(tick), y, str(int(tick)))
        for tick in nice_ticks(frame.first, frame.last, 5 if frame.width > 460 else 3)
        if frame.first <= tick <= frame.last and tick == int(tick)
    ]
    return "".join(parts) + _text("faint", frame.width - frame.right + 14, y, "step")


def _vertical(frame: _Frame, step: float, text: str) -> str:
    x, bottom = frame.x(step), frame.height - _BOTTOM
    line = _line("best", (x, x), (_TOP, bottom))
    if x > frame.width * 0.6:
        return line + _text("bestlabel end", x - 6, bottom - 7, text)
    return line + _text("bestlabel", x + 6, bottom - 7, text)


def _band(frame: _Frame, band: Sequence[tuple[float, float, float]]) -> str:
    top = [f"{frame.x(step):.1f},{frame.y(high):.1f}" for step, _, high in band]
    bottom = [f"{frame.x(step):.1f},{frame.y(low):.1f}" for step, low, _ in reversed(band)]
    return f'<polygon class="band" points="{" ".join(top + bottom)}"/>'


def _lines(frame: _Frame, points: Sequence[Point]) -> list[str]:
    if not points:
        return []
    if len(points) <= _SPARSE:
        dots = "".join(
            f'<circle class="dot" cx="{frame.x(step):.1f}" cy="{frame.y(value):.1f}" r="3.5"/>'
            for step, value in points
        )
        return [_path(frame, points, "line"), dots]
    smooth = moving_average(points)
    return [_path(frame, points, "raw"), _path(frame, smooth, "line")]


def moving_average(points: Sequence[Point]) -> list[Point]:
    """Centred means over about a twelfth of the curve: steady curves stay as they are."""
    half = max(1, len(points) // 24)
    values = [value for _, value in points]
    windows = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    means = (math.fsum(window) / len(window) for window in windows)
    return [(step, mean) for (step, _), mean in zip(points, means, strict=True)]


def _path(frame: _Frame, points: Sequence[Point], name: str) -> str:
    spots = " ".join(f"{frame.x(step):.1f},{frame.y(value):.1f}" for step, value in points)
    return f'<polyline class="{name}" points="{spots}"/>'


def _mark(frame: _Frame, mark: tuple[float, float, float, float]) -> str:
    step, low, value, high = mark
    x, y = frame.x(step), frame.y(value)
    whisker = _line("whisker", (x, x), (frame.y(low), frame.y(high)))
    return whisker + f'<path class="mark" d="M{x:.1f} {y - 7:.1f}l7 7l-7 7l-7 -7z"/>'


def _last_label(frame: _Frame, curve: Curve) -> str:
    end = _end_of(curve)
    if end is None:
        return ""
    step, value = end
    x, y = frame.x(step), frame.y(value)
    dot = f'<circle class="lastdot" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
    return dot + _text("strong", x + 9, y + 4, shown(value, curve.share))


def _end_of(curve: Curve) -> Point | None:
    """The last point of the line as it is drawn."""
    if len(curve.points) <= _SPARSE:
        return curve.points[-1] if curve.points else None
    return moving_average(curve.points)[-1]


def _svg(parts: Sequence[str], width: int, height: int, label: str) -> Markup:
    head = (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{escape(label)}">'
    )
    return Markup(head + "".join(parts) + "</svg>")  # every text inside was escaped above
