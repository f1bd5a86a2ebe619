"""Draws a simulated run: samples at the generators over time, and below, when the trainer was busy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from console.view.axis_ticks import ticks
from simulator.virtual_run.event_loop import Record

_WIDTH, _LEFT, _RIGHT = 900, 70, 16
_HELD_TOP, _HELD_HEIGHT, _BAR_TOP, _BAR_HEIGHT = 46, 150, 226, 26
_HEIGHT = 300
_STEP_COLORS = ("#1f6feb", "#9ec5fe")
_Scale = Callable[[float], float]
_STYLE = "text{font:12px system-ui,sans-serif;fill:#444}.title{font-size:14px;fill:#111}.grid{stroke:#ddd}"


def timeline(title: str, record: Record) -> str:
    """Draw an `<svg>` element. The record must contain snapshots of the samples under way."""
    end_s = record.steps[-1].end_s
    most = max((count for _, count in record.held), default=0) or 1

    def x(time_s: float) -> float:
        return _LEFT + time_s / end_s * (_WIDTH - _LEFT - _RIGHT)

    def y(count: float) -> float:
        return _HELD_TOP + _HELD_HEIGHT * (1 - count / most)

    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}" '
        'xmlns="http://www.w3.org/2000/svg">',
        f"<style>{_STYLE}</style>",
        f'<text x="{_LEFT}" y="18" class="title">{escape(title)}</text>',
        f'<text x="{_LEFT}" y="{_HELD_TOP - 8}">samples being generated, at most {most:,}</text>',
        f'<polygon points="{_area(record.held, x, y)}" fill="#d1570c" fill-opacity="0.55"/>',
        f'<text x="{_LEFT}" y="{_BAR_TOP - 8}">training, a colour for each step</text>',
    ]
    for begin_s, until_s, step in _joined(record.trained):
        width = max(0.5, x(until_s) - x(begin_s))
        color = _STEP_COLORS[step % len(_STEP_COLORS)]
        parts.append(
            f'<rect x="{x(begin_s):.1f}" y="{_BAR_TOP}" width="{width:.1f}" height="{_BAR_HEIGHT}" fill="{color}"/>'
        )
    for time_s in (each for each in ticks(0.0, end_s, count=8) if each <= end_s):
        at, bottom = f"{x(time_s):.1f}", _BAR_TOP + _BAR_HEIGHT
        parts.append(f'<line x1="{at}" x2="{at}" y1="{_HELD_TOP}" y2="{bottom}" class="grid"/>')
        parts.append(f'<text x="{at}" y="{bottom + 18}" text-anchor="middle">{time_s:,.6g} s</text>')
    return "\n".join([*parts, "</svg>"])


def _area(held: Sequence[tuple[float, int]], x: _Scale, y: _Scale) -> str:
    points = [f"{x(time_s):.1f},{y(count):.1f}" for time_s, count in held]
    return " ".join([f"{x(held[0][0]):.1f},{y(0):.1f}", *points, f"{x(held[-1][0]):.1f},{y(0):.1f}"]) if held else ""


def _joined(trained: Sequence[tuple[float, float, int]]) -> list[tuple[float, float, int]]:
    """Adjacent microbatches of a step, merged into one interval."""
    joined: list[tuple[float, float, int]] = []
    for begin_s, until_s, step in trained:
        if joined and joined[-1][2] == step and begin_s - joined[-1][1] < 1e-9:
            joined[-1] = (joined[-1][0], until_s, step)
        else:
            joined.append((begin_s, until_s, step))
    return joined
