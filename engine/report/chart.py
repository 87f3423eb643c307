"""Line charts as inline SVG, with the points that page.js needs to show values under the pointer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

Point = tuple[float, "float | None"]
MAX_POINTS = 500  # of one line; more than a screen can tell apart
LEFT, RIGHT, TOP, BOTTOM = 58, 24, 12, 30


@dataclass(frozen=True)
class Series:
    """One line. `style` is a class of style.css; `hover` says whether its values appear under the pointer."""

    name: str
    points: Sequence[Point]  # ascending x; None leaves a gap
    style: str = "one"
    dots: bool = False
    hover: bool = True


@dataclass(frozen=True)
class Scale:
    """From data to the plot area's pixels, linear."""

    low: float
    high: float
    begin: float
    end: float
    ticks: list[float] = field(default_factory=list)

    def __call__(self, value: float) -> float:
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most about `limit` points that keep the first, the last, and the extremes of every stretch."""
    if len(points) <= limit:
        return list(points)
    width = 2 * len(points) / limit
    kept = [points[0]]
    for bucket in range(math.ceil(len(points) / width)):
        part = points[int(bucket * width) : int((bucket + 1) * width)]
        known = [p for p in part if p[1] is not None]
        if known:
            extremes = {min(known, key=lambda p: p[1]), max(known, key=lambda p: p[1])}  # type: ignore[arg-type, return-value]
            kept += sorted(extremes)
        elif part:
            kept.append(part[0])
    kept.append(points[-1])
    return [p for i, p in enumerate(kept) if i == 0 or p[0] > kept[i - 1][0]]


def smooth(points: Sequence[Point], window: int) -> list[Point]:
    """Average over `window` points around each, fewer near the ends so that the line neither lags nor leads."""
    sums, counts = [0.0], [0]
    for _, y in points:
        sums.append(sums[-1] + (y or 0.0))
        counts.append(counts[-1] + (y is not None))
    result: list[Point] = []
    for i, (x, y) in enumerate(points):
        reach = min(window // 2, i, len(points) - 1 - i)
        low, high = i - reach, i + reach + 1
        known = counts[high] - counts[low]
        result.append((x, (sums[high] - sums[low]) / known if y is not None else None))
    return result


def nice_ticks(low: float, high: float, count: int, whole: bool = False) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten) that lie in [low, high]."""
    raw = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * 0.999999)
    step = max(1.0, step) if whole else step
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def scale(
    values: Sequence[float], begin: float, end: float, count: int, whole: bool = False, zero: bool = False
) -> Scale:
    """A scale over the values, a little wider than they are unless they are whole numbers; from 0 on if `zero`."""
    if not values:
        return Scale(0.0, 1.0, begin, end)
    low, high = min(values), max(values)
    if zero and low >= 0 and high > 0:
        low, high = 0.0, high * 1.05
    elif low == high:
        pad = 0.5 if whole else abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    elif not whole:
        pad = (high - low) * 0.05
        low, high = (0.0 if 0 <= low < pad else low - pad), high + pad
    return Scale(low, high, begin, end, nice_ticks(low, high, count, whole))


def line_chart(
    title: str,
    series: Sequence[Series],
    show: Callable[[float], str],
    width: int = 520,
    height: int = 210,
    zero: bool = False,
) -> str:
    """A figure: title, legend if there are several lines, and the chart, whose values begin at 0 if `zero`."""
    series = [Series(s.name, thin(s.points), s.style, s.dots, s.hover) for s in series]
    known = [(x, y) for s in series for x, y in s.points if y is not None]
    x_scale = scale([x for x, _ in known], LEFT, width - RIGHT, width // 90, whole=True)
    y_scale = scale([y for _, y in known], height - BOTTOM, TOP, height // 45, zero=zero)
    body = [*_axes(x_scale, y_scale, show, width, height), *(_line(s, x_scale, y_scale) for s in series)]
    if not known:
        body.append(f'<text class="empty" x="{width / 2}" y="{height / 2}">no values yet</text>')
    label, data = escape(f"{title}, by step"), _data(series, x_scale, y_scale, show)
    return (
        f'<figure class="chart"><figcaption>{escape(title)}{_legend(series)}</figcaption>'
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{label}">{"".join(body)}'
        f'<g class="cursor" visibility="hidden"><line y1="{TOP}" y2="{height - BOTTOM}"/></g></svg>'
        f'<div class="tip" hidden></div><script type="application/json">{data}</script>'
        "</figure>"
    )


def _legend(series: Sequence[Series]) -> str:
    named = [s for s in series if s.hover]
    if len(named) < 2:
        return ""
    return "".join(f'<span class="key {s.style}"><i></i>{escape(s.name)}</span>' for s in named)


def _axes(x: Scale, y: Scale, show: Callable[[float], str], width: int, height: int) -> list[str]:
    parts = []
    for value in y.ticks:
        at = f"{y(value):.1f}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text class="tick y" x="{LEFT - 8}" y="{at}">{escape(show(value))}</text>')
    for value in x.ticks:
        parts.append(f'<text class="tick x" x="{x(value):.1f}" y="{height - BOTTOM + 18}">{value:,.0f}</text>')
    base = height - BOTTOM
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{width - RIGHT}" y1="{base}" y2="{base}"/>')
    return parts


def _line(series: Series, x: Scale, y: Scale) -> str:
    """A path with a break at every gap; a point without neighbours is drawn as a dot."""
    path, dots, previous = [], [], None
    for index, (step, value) in enumerate(series.points):
        if value is None:
            previous = None
            continue
        at = f"{x(step):.1f} {y(value):.1f}"
        path.append(f"{'M' if previous is None else 'L'}{at}")
        after = series.points[index + 1][1] if index + 1 < len(series.points) else None
        if series.dots or (previous is None and after is None):
            dots.append(f'<circle cx="{x(step):.1f}" cy="{y(value):.1f}" r="3"/>')
        previous = value
    return f'<g class="line {series.style}"><path d="{"".join(path)}"/>{"".join(dots)}</g>'


def _data(series: Sequence[Series], x: Scale, y: Scale, show: Callable[[float], str]) -> str:
    """For page.js: [step, x, y, text] of every point that has a value. `<` is escaped, since it may end the script."""
    lines = [
        {
            "name": s.name,
            "style": s.style,
            "points": [[p, round(x(p), 1), round(y(v), 1), show(v)] for p, v in s.points if v is not None],
        }
        for s in series
        if s.hover
    ]
    return json.dumps(lines, separators=(",", ":")).replace("<", "\\u003c")
