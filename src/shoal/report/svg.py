"""Charts as inline SVG: lines, columns and stacked bars, coloured by the classes of the page around them.

No colours are written here, only classes (`s0` … `s6` for series, `base` for the run the others are measured
against), so that one style sheet serves light, dark and paper. Beside a line chart lie its points as JSON:
`charts.js` draws from them a chart to point at and to zoom. The SVG serves paper and pages without scripts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 480, 290
LEFT, RIGHT, TOP, BOTTOM = 48, 468, 12, 244  # the plot area inside them
COLOURS = 7
BASE = -1  # style of the run the others are measured against
MOST_MARKERS = 24
MOST_COUNTS = 12  # numbers of workers and the like that each have a tick
ROW = 46  # pixels from one bar to the next
SHAPES = (
    "M-3.4,0a3.4,3.4 0 1,0 6.8,0a3.4,3.4 0 1,0 -6.8,0z",  # circle
    "M-3,-3h6v6h-6z",  # square
    "M0,-4.4L4.4,0L0,4.4L-4.4,0z",  # diamond
    "M0,-4L4,3.2h-8z",  # triangle
    "M0,4L4,-3.2h-8z",  # triangle, point down
)


@dataclass(frozen=True)
class Scale:
    """Maps values from `low` to `high` onto coordinates from `start` to `end`, evenly or by ratio."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)
        at = math.log10(value) if self.log else value
        return self.start + (self.end - self.start) * (at - low) / (high - low)


@dataclass(frozen=True)
class Axis:
    """What an axis measures, how its ticks are written, and whether it is logarithmic."""

    label: str
    text: Callable[[float], str]
    log: bool = False


@dataclass(frozen=True)
class Point:
    """A measurement and its tooltip."""

    x: float
    y: float
    note: str


@dataclass(frozen=True)
class Mark:
    """Where something happened to a line, and what."""

    x: float
    note: str


@dataclass(frozen=True)
class Series:
    """A named line; `style` chooses colour, dash and marker."""

    name: str
    style: int
    points: Sequence[Point]
    marks: Sequence[Mark] = ()


@dataclass(frozen=True)
class Part:
    """A piece of a bar: its CSS class, its length and its tooltip."""

    kind: str
    value: float
    note: str


@dataclass(frozen=True)
class Bar:
    """A row of a bar chart: its name, the text at its end, and its pieces from left to right."""

    name: str
    text: str
    parts: Sequence[Part]


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round values, 1, 2 or 5 times a power of ten apart; the ends enclose low and high."""
    if not high > low:
        pad = 0.1 * abs(low) or 1.0
        low, high = (low - pad, high + pad) if low else (0.0, pad)
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    # i * step alone gives 0.30000000000000004
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Round values for a logarithmic axis, enclosing low and high: 1, 2 and 5 within two decades, else 1."""
    wide = high / low > 100
    multiples = (1,) if wide else (1, 2, 5)
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    ticks = [float(f"{m}e{p}") for p in range(first, max(last, first) + 1) for m in multiples]
    below = [tick for tick in ticks if tick <= low * (1 + 1e-9)]
    above = [tick for tick in ticks if tick >= high * (1 - 1e-9)]
    return [
        tick for tick in ticks if below[-1] <= tick <= (above[0] if above[0] > below[-1] else 10 * below[-1])
    ]


def _counts_or_round(values: set[float]) -> list[float]:
    """Ticks of a logarithmic axis: the values themselves if they are a few counts, else round ones."""
    low, high = min(values), max(values)
    if len(values) <= MOST_COUNTS and all(float(value).is_integer() for value in values):
        return sorted(values)
    return [tick for tick in log_ticks(low, high) if low <= tick <= high] or [low, high]


def series_class(style: int) -> str:
    """The classes of a series: one of seven colours, a dash for each further round."""
    return "base" if style == BASE else f"s{style % COLOURS} d{style // COLOURS % 3}"


def line_chart(title: str, series: Sequence[Series], x: Axis, y: Axis, floor: float | None = None) -> str:
    """A line for each series, cut off below `floor`, with its points as JSON; an empty frame without any."""
    points = [point for line in series for point in line.points]
    if not points:
        return _svg(f"{title}: no measurements", _nothing("no measurements"))
    left, right = min(point.x for point in points) if x.log else 0.0, max(point.x for point in points)
    x_ticks = _counts_or_round({point.x for point in points}) if x.log else nice_ticks(left, right)
    low = min(point.y for point in points) if floor is None else floor
    high = max(point.y for point in points)
    y_ticks = log_ticks(low, high) if y.log else nice_ticks(low, high)
    along = Scale(left, right if right > left else x_ticks[-1] + x.log, LEFT, RIGHT, x.log)
    up = Scale(y_ticks[0], y_ticks[-1], BOTTOM, TOP, y.log)
    ends = ", ".join(f"{line.name} ends at {y.text(line.points[-1].y)}" for line in series if line.points)
    area = (LEFT - 6, TOP - 6, RIGHT - LEFT + 12, BOTTOM - TOP + 6)
    box = " ".join(f"{side:g}" for side in area)
    x0, y0, width, height = area
    # the inner svg maps one to one: it is there to clip at the frame
    inner = f'<svg x="{x0}" y="{y0}" width="{width}" height="{height}" viewBox="{box}">'
    lines = "".join(_line(line, along, up) for line in series if line.points)
    grid = _x_axis(x, along, [tick for tick in x_ticks if tick <= along.high * 1.0001]) + _y_axis(
        y, up, y_ticks
    )
    marks = "".join(_mark(line, mark, along) for line in series for mark in line.marks)
    drawn = _svg(f"{title}, over {x.label}: {ends}", f"{grid}{marks}{inner}{lines}</svg>")
    return drawn + _points(title, series, x, y, floor)


def _points(title: str, series: Sequence[Series], x: Axis, y: Axis, floor: float | None) -> str:
    """A line chart as `charts.js` reads it."""
    lines = [
        {
            "name": line.name,
            "style": line.style,
            "points": [
                [_six(point.x), _six(point.y), point.note]
                for point in sorted(line.points, key=lambda point: point.x)
            ],
        }
        for line in series
    ]
    chart = {
        "title": title,
        "x": {"label": x.label, "log": x.log},
        "y": {"label": y.label, "log": y.log, "floor": floor},
        "lines": lines,
        "marks": [
            {"x": _six(mark.x), "text": mark.note, "style": line.style}
            for line in series
            for mark in line.marks
        ],
    }
    return f'<script type="application/json" class="points">{script_json(chart)}</script>'


def _six(value: float) -> float:
    """Six digits, which is more than a screen has."""
    return float(f"{value:.6g}")


def script_json(value: object) -> str:
    """JSON that cannot end the script element around it."""
    return json.dumps(value, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c")


def column_chart(
    title: str, columns: Sequence[tuple[float, float, str]], width: float, style: int, x: Axis
) -> str:
    """A histogram: (where it starts, height, words) for each column, all `width` wide in x."""
    tallest = max((height for _, height, _ in columns), default=0.0)
    if tallest <= 0:
        return _svg(f"{title}: no measurements", _nothing("no measurements"))
    ticks = nice_ticks(0.0, tallest, 4)
    up = Scale(0.0, ticks[-1], BOTTOM, TOP)
    low, high = min(start for start, _, _ in columns), max(start for start, _, _ in columns) + width
    along = Scale(low, high, LEFT, RIGHT)
    shapes = []
    for start, height, note in columns:
        left, right = along(start), along(start + width)
        gap = min(2.0, (right - left) * 0.1)
        shapes.append(
            f'<rect class="fill {series_class(style)}" x="{left + gap:.1f}" y="{up(height):.1f}" '
            f'width="{right - left - 2 * gap:.1f}" height="{BOTTOM - up(height):.1f}">{_title(note)}</rect>'
        )
    every = max(1, math.ceil(len(columns) / 12))
    middles = [start + width / 2 for start, _, _ in columns[::every]]
    axes = _x_axis(x, along, middles) + _y_axis(Axis("", lambda v: f"{v:,.10g}"), up, ticks)
    return _svg(title, axes + "".join(shapes))


def bar_chart(title: str, bars: Sequence[Bar], axis: Axis) -> str:
    """Stacked horizontal bars whose text stays readable at any width: x is in per cent, y in pixels.

    On a logarithmic axis a bar starts a decade or more below the shortest one, and zero has no length.
    """
    totals = [sum(part.value for part in bar.parts) for bar in bars]
    positive = [total for total in totals if total > 0]
    if not positive:
        return f'<p class="empty">{escape(axis.label)}: nothing to show.</p>'
    ticks = _bar_ticks(positive, axis.log)
    along = Scale(ticks[0], ticks[-1], 0.0, 100.0, axis.log)
    bottom = ROW * len(bars)
    parts = [vertical_grid(axis, along, ticks, bottom)]
    parts += [_bar(bar, along, ROW * row) for row, bar in enumerate(bars)]
    words = "; ".join(f"{bar.name} {bar.text}" for bar in bars)
    return (
        f'<svg class="chart bars" width="100%" height="{bottom + 40}" role="img" '
        f'aria-label="{escape(f"{title}: {words}")}">{"".join(parts)}</svg>'
    )


def legend(items: Sequence[tuple[str, str]]) -> str:
    """The legend of a chart: (swatch, name) pairs from `line_swatch` and `fill_swatch`."""
    rows = "".join(f"<li>{swatch}{escape(name)}</li>" for swatch, name in items)
    return f'<ul class="legend">{rows}</ul>'


def line_swatch(style: int) -> str:
    """A short piece of the line a series is drawn with."""
    drawn = f'<path class="line {series_class(style)}" d="M1,6H29"/>{_marker(style, 15, 6, "")}'
    return f'<svg class="swatch" width="30" height="12" aria-hidden="true">{drawn}</svg>'


def fill_swatch(kind: str) -> str:
    """A small square in the colour of a bar's piece."""
    square = f'<rect class="fill {kind}" width="12" height="12" rx="2"/>'
    return f'<svg class="swatch" width="12" height="12" aria-hidden="true">{square}</svg>'


def _svg(label: str, body: str) -> str:
    view = f'viewBox="0 0 {WIDTH} {HEIGHT}"'
    return f'<svg class="chart" {view} role="img" aria-label="{escape(label)}">{body}</svg>'


def _title(note: str) -> str:
    return f"<title>{escape(note)}</title>" if note else ""


def _nothing(words: str) -> str:
    x, y = (LEFT + RIGHT) / 2, (TOP + BOTTOM) / 2
    frame = f'<path class="axis" d="M{LEFT},{BOTTOM}H{RIGHT}"/>'
    return f'{frame}<text class="none" x="{x:g}" y="{y:g}" text-anchor="middle">{words}</text>'


def _x_axis(axis: Axis, along: Scale, ticks: Sequence[float]) -> str:
    parts = [f'<path class="axis" d="M{LEFT},{BOTTOM}H{RIGHT}"/>']
    for tick in ticks:
        at, text = along(tick), escape(axis.text(tick))
        # a long number under the right end would leave the picture
        anchor = "end" if at > RIGHT - 4 else "middle"
        parts.append(f'<path class="axis" d="M{at:.1f},{BOTTOM}v4"/>')
        parts.append(f'<text x="{at:.1f}" y="{BOTTOM + 18}" text-anchor="{anchor}">{text}</text>')
    place = f'x="{(LEFT + RIGHT) / 2:g}" y="{BOTTOM + 39}" text-anchor="middle"'
    return "".join(parts) + f'<text class="label" {place}>{escape(axis.label)}</text>'


def _y_axis(axis: Axis, up: Scale, ticks: Sequence[float]) -> str:
    parts = []
    for tick in ticks:
        at = up(tick)
        parts.append(f'<path class="grid" d="M{LEFT},{at:.1f}H{RIGHT}"/>')
        parts.append(
            f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{escape(axis.text(tick))}</text>'
        )
    return "".join(parts)


def _line(line: Series, along: Scale, up: Scale) -> str:
    places = [(along(point.x), up(point.y), point.note) for point in line.points]
    path = "L".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
    drawn = f'<path class="line {series_class(line.style)}" d="M{path}">{_title(line.name)}</path>'
    every = math.ceil(len(places) / MOST_MARKERS)
    shown = places[::-1][::every]  # from the end, so that the last one is always there
    return drawn + "".join(_marker(line.style, x, y, note) for x, y, note in reversed(shown))


def _mark(line: Series, mark: Mark, along: Scale) -> str:
    """A dashed line in the colour of the series, from top to bottom."""
    at = f'd="M{along(mark.x):.1f},{TOP}V{BOTTOM}"'
    return f'<path class="line event {series_class(line.style)}" {at}>{_title(mark.note)}</path>'


def _marker(style: int, x: float, y: float, note: str) -> str:
    shape = SHAPES[style % len(SHAPES)] if style != BASE else SHAPES[0]
    place = f'transform="translate({x:.1f},{y:.1f})"'
    return f'<path class="fill mark {series_class(style)}" {place} d="{shape}">{_title(note)}</path>'


def _bar_ticks(totals: Sequence[float], log: bool) -> list[float]:
    if not log:
        return nice_ticks(0.0, max(totals), 4)
    first, last = math.floor(math.log10(min(totals))) - 1, math.ceil(math.log10(max(totals)) - 1e-9)
    every = max(1, math.ceil((last - first) / 4))
    return [10.0**power for power in range(last, first - every, -every)][::-1]


def vertical_grid(
    axis: Axis, along: Scale, ticks: Sequence[float], bottom: float, *, edge: float = 99, below: int = 36
) -> str:
    """Lines from the top to `bottom` with the text of each tick, and the axis's label so far `below` them.

    A text beyond `edge` per cent of the width ends at its line, so that it is not cut off.
    """
    parts = []
    for tick in ticks:
        at = along(tick)
        anchor = "start" if at < 1 else "end" if at > edge else "middle"
        parts.append(f'<line class="grid" x1="{at:.2f}%" x2="{at:.2f}%" y1="0" y2="{bottom}"/>')
        text = escape(axis.text(tick))
        parts.append(f'<text x="{at:.2f}%" y="{bottom + 16}" text-anchor="{anchor}">{text}</text>')
    label = (
        f'<text class="label" x="50%" y="{bottom + below}" text-anchor="middle">{escape(axis.label)}</text>'
    )
    return "".join(parts) + label


def _bar(bar: Bar, along: Scale, top: float) -> str:
    pieces, done = [], along.low if along.log else 0.0
    for part in bar.parts:
        end = part.value if along.log else done + part.value
        if part.value > 0:
            left, right = along(done), along(end)
            place = f'x="{left:.2f}%" y="{top + 19}" width="{right - left:.2f}%" height="12"'
            pieces.append(f'<rect class="fill piece {part.kind}" {place}>{_title(part.note)}</rect>')
            done = end
    name = f'<text class="name" x="0" y="{top + 13}">{escape(bar.name)}</text>'
    text = f'<text class="value" x="100%" y="{top + 13}" text-anchor="end">{escape(bar.text)}</text>'
    return name + text + "".join(pieces)
