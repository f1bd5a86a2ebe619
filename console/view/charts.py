"""Draws line charts as SVG text: no library, no script, no font, readable offline and in any browser.

One chart has one y axis; series are drawn over steps on the x axis. Every series is named directly in a legend line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 46, 34
_MAX_POINTS = 600
_COLORS = ("#1f6feb", "#d1570c", "#1a7f37", "#8250df", "#bf3989", "#0a7ea4", "#9a6700", "#57606a")


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of a chart."""

    name: str
    points: Sequence[tuple[float, float]]
    """(x, y), x ascending, finite."""
    has_markers: bool = False
    """Draw each point, for sparse measurements."""


def line_chart(title: str, series: Sequence[Series], *, y_label: str) -> str:
    """A chart as an `<svg>` element, or a sentence if no series has a point."""
    drawn = [one for one in series if one.points]
    if not drawn:
        return f"<p>{escape(title)}: nothing was measured.</p>"
    xs = [x for one in drawn for x, _ in one.points]
    ys = [y for one in drawn for _, y in one.points]
    y_ticks = ticks(min(0.0, *ys), max(ys))
    scale = _Scale(x_low=min(xs), x_high=max(xs), y_low=y_ticks[0], y_high=y_ticks[-1])
    # The y axis ends at round numbers; the x axis ends with the run.
    x_ticks = [x for x in ticks(min(xs), max(xs)) if min(xs) <= x <= max(xs)]
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}" xmlns="http://www.w3.org/2000/svg">',
        f'<text x="{_LEFT}" y="16" class="title">{escape(title)}</text>',
        *_axes(scale, x_ticks, y_ticks, y_label),
        *(_line(scale, one, _COLORS[index % len(_COLORS)]) for index, one in enumerate(drawn)),
        *_legend(drawn),
        "</svg>",
    ]
    return "\n".join(parts)


def ticks(low: float, high: float, *, count: int = 5) -> list[float]:
    """About `count` round numbers that cover low to high; at least two."""
    span = high - low
    if span <= 0:
        span = abs(high) or 1.0
    rough = span / count
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= rough)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, max(last, first + 1) + 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return _LEFT + (value - self.x_low) / ((self.x_high - self.x_low) or 1.0) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - (value - self.y_low) / ((self.y_high - self.y_low) or 1.0) * (HEIGHT - _TOP - _BOTTOM)


def _axes(scale: _Scale, x_ticks: Sequence[float], y_ticks: Sequence[float], y_label: str) -> list[str]:
    parts = []
    for value in y_ticks:
        y = scale.y(value)
        parts.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" class="tick end">{_short(value)}</text>')
    for value in x_ticks:
        x = scale.x(value)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - _BOTTOM + 16}" class="tick middle">{_short(value)}</text>')
    parts.append(f'<text x="{WIDTH - _RIGHT}" y="{HEIGHT - 4}" class="tick end">step</text>')
    parts.append(f'<text x="{_LEFT - 6}" y="{_TOP - 8}" class="tick end">{escape(y_label)}</text>')
    return parts


def _line(scale: _Scale, series: Series, color: str) -> str:
    points = _thinned(series.points)
    text = " ".join(f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in points)
    line = f'<polyline points="{text}" fill="none" stroke="{color}" stroke-width="1.8" stroke-linejoin="round"/>'
    if not series.has_markers and len(points) > 1:
        return line
    markers = (f'<circle cx="{scale.x(x):.1f}" cy="{scale.y(y):.1f}" r="3" fill="{color}"/>' for x, y in points)
    return line + "".join(markers)


def _legend(series: Sequence[Series]) -> list[str]:
    parts = []
    x = float(_LEFT)
    for index, one in enumerate(series):
        color = _COLORS[index % len(_COLORS)]
        parts.append(f'<rect x="{x:.0f}" y="25" width="12" height="3" fill="{color}"/>')
        parts.append(f'<text x="{x + 16:.0f}" y="30" class="tick">{escape(one.name)}</text>')
        x += 30 + 6.6 * len(one.name)
    return parts


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    if len(points) <= _MAX_POINTS:
        return points
    stride = math.ceil(len(points) / _MAX_POINTS)
    return [*points[::stride], points[-1]]


def _short(value: float) -> str:
    return f"{value:,.10g}" if abs(value) < 10_000 else f"{value / 1000:,.10g}k"
