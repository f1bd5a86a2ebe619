"""Draws a plan: every machine's GPUs by their role, and how the time of a step is spent."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from services.scheduler.planning.plan_report import FeasiblePlan

_WIDTH, _LEFT, _ROW, _GPU = 760, 170, 22, 16
_MAX_MACHINES = 200
"""Most rows drawn; a line states how many more there are."""
_COLORS = {"train": "#d1570c", "generate": "#1f6feb", "score": "#8250df", "idle": "#d0d7de", "wait": "#eaeef2"}
_STYLE = "text{font:12px system-ui,sans-serif;fill:#1f2328}.title{font-weight:600;font-size:14px}.end{text-anchor:end}"


def plan_picture(report: FeasiblePlan) -> str:
    """The plan as an SVG file."""
    rows = [*_placement(report), "", *_timeline(report)]
    height = 60 + _ROW * len(rows)
    title = (
        f"{report.model.problem.id}: {report.score.samples_per_second:.4g} samples/s, "
        f"a step in {report.step_s:.4g} s, {report.model.name}"
    )
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(title)}" '
        'xmlns="http://www.w3.org/2000/svg">',
        f"<style>{_STYLE}</style>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="20" class="title">{escape(title)}</text>',
        *_legend(),
        *(f'<g transform="translate(0,{56 + _ROW * index})">{row}</g>' for index, row in enumerate(rows)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _legend() -> list[str]:
    parts = []
    for index, (name, color) in enumerate(_COLORS.items()):
        x = 12 + 90 * index
        parts.append(f'<rect x="{x}" y="30" width="12" height="12" fill="{color}"/>')
        parts.append(f'<text x="{x + 17}" y="40">{name}</text>')
    return parts


def _placement(report: FeasiblePlan) -> list[str]:
    """A row for each machine: its replicas in order, its part of the pool, its idle GPUs."""
    plan, nodes = report.plan, report.model.nodes
    trains = {share.node: share.gpus for share in plan.train}
    rows = []
    for machine, node in list(nodes.items())[:_MAX_MACHINES]:
        replicas = [each.layout.gpus for each in plan.gen if each.node == machine for _ in range(each.count)]
        blocks = [("generate", degree) for degree in replicas] + [("train", trains.get(machine, 0))]
        blocks.append(("score", sum(each.gpus for each in plan.score if each.node == machine)))
        blocks.append(("idle", node.gpus - sum(gpus for _, gpus in blocks)))
        gpu_width = min(_GPU, (_WIDTH - _LEFT - 12) / node.gpus)
        # A gap between blocks: one block is one replica, whatever its tensor-parallel degree.
        bars = [(gpus * gpu_width, does, f"{does}, {gpus} GPUs") for does, gpus in blocks]
        rows.append(_row(f"{machine} ({node.gpu})", bars, gap=2))
    if (hidden := len(nodes) - _MAX_MACHINES) > 0:
        rows.append(f'<text x="{_LEFT}" y="12">and {hidden} more machines</text>')
    return rows


def _timeline(report: FeasiblePlan) -> list[str]:
    """Two rows over one step, one per stage: how long each is busy, and how long it waits for the other."""
    step_s, training = report.step_s, report.score.training
    spans = {
        "generation": [("generate", (1 - report.generation_idle) * step_s, "busy")],
        "training": [
            ("train", training.compute_s, "computation"),
            ("train", training.exposed_allreduce_s, "all-reduce that computation does not hide"),
            ("train", training.overhead_s, "fixed"),
        ],
    }
    scale = (_WIDTH - _LEFT - 12) / step_s
    rows = []
    for stage, parts in spans.items():
        waits_s = max(0.0, step_s - sum(seconds for _, seconds, _ in parts))
        spent = (*parts, ("wait", waits_s, "waits"))
        bars = [(seconds * scale, does, f"{what}, {seconds:.3g} s") for does, seconds, what in spent]
        rows.append(_row(stage, bars, gap=1))
    rows.append(f'<text x="{_LEFT}" y="10">0 s</text><text x="{_WIDTH - 12}" y="10" class="end">{step_s:.4g} s</text>')
    return rows


def _row(name: str, bars: Iterable[tuple[float, str, str]], *, gap: float) -> str:
    """A row of bars, each with its width, role and tip; those without a width are left out."""
    parts, x = [f'<text x="{_LEFT - 8}" y="12" class="end">{escape(name)}</text>'], float(_LEFT)
    for width, does, tip in bars:
        if width > 0:
            parts.append(
                f'<rect x="{x:.1f}" y="0" width="{max(0.5, width - gap):.1f}" height="{_GPU}" rx="2" '
                f'fill="{_COLORS[does]}"><title>{escape(tip)}</title></rect>'
            )
            x += width
    return "".join(parts)
