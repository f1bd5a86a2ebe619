"""Simulates the papers' comparisons and writes docs/results.md and its picture: `make results`.

penstock bench scheduler.results [--only WORD] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path

from benchmarks.scheduler import comparisons
from benchmarks.scheduler.comparisons import Comparison
from benchmarks.scheduler.reasons import COLUMNS, NEED_COLUMNS, needs, reasons

DOCS = Path(__file__).parents[2] / "docs"
PARTS: dict[str, Callable[[], Iterator[Comparison]]] = {
    "AReaL-Hex": comparisons.areal_hex,
    "HetRL": comparisons.hetrl,
    "StreamRL, breakdown": comparisons.streamrl_breakdown,
    "StreamRL, nine settings": comparisons.streamrl_settings,
    "StreamRL, two sites": comparisons.streamrl_sites,
    "By the trainer's own terms": comparisons.trainers_terms,
}
WHY = "What limits them"
"""The part that says in the cost model's terms why rows by the trainer's own are short of the papers."""
AREAL_PAPER = {0: 129, 1: 269, 2: 357, 4: 357, 8: 372, 16: 382}
_COLORS = {"paper": "#9ec5fe", "ours": "#1f6feb"}


def main() -> int:
    """Simulate, write, and report the duration."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="run only parts whose name contains this; writes nothing")
    parser.add_argument("--out", type=Path, default=DOCS)
    options = parser.parse_args()
    began_s = time.process_time()
    tables = [_table(name, part) for name, part in PARTS.items() if options.only in name]
    if options.only in WHY:
        tables.append(_reasons_table())
    if options.only:
        print("\n\n".join(tables))
        return 0
    ours = comparisons.areal_staleness()
    template = (Path(__file__).parent / "results.md").read_text(encoding="utf-8")
    tables.append(_staleness_table(ours))
    text = template.replace("{{tables}}", "\n\n".join(tables))
    (options.out / "results.md").write_text(text, encoding="utf-8")
    (options.out / "results_staleness.svg").write_text(_bars(ours), encoding="utf-8")
    print(
        f"docs/results.md and docs/results_staleness.svg, {time.process_time() - began_s:.0f} s of CPU", file=sys.stderr
    )
    return 0


def _reasons_table() -> str:
    lines = [f"## {WHY}", "", f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    lines += [f"| {' | '.join(reason.cells)} |" for reason in reasons()]
    lines += ["", "What the papers' ratios need of the fastest division of whole machines, in seconds:", ""]
    lines += [f"| {' | '.join(NEED_COLUMNS)} |", f"|{'---|' * len(NEED_COLUMNS)}"]
    return "\n".join([*lines, *(f"| {' | '.join(cells)} |" for cells in needs())])


def _table(name: str, part: Callable[[], Iterator[Comparison]]) -> str:
    lines = [f"## {name}", "", "| what | paper | ours | shown | configurations |", "|---|---|---|---|---|"]
    for row in part():
        shown = "yes" if row.is_shown else "**no**"
        lines.append(f"| {row.name} | {row.paper} | {row.ours:.2f} | {shown} | {row.how} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def _staleness_table(ours: dict[int, float]) -> str:
    base = ours[0]
    lines = [
        "## AReaL, staleness",
        "",
        "1.5B on 128 H800, a quarter of which train; thousands of tokens per second, and over no staleness.",
        "",
        "| staleness bound | paper | ours |",
        "|---|---|---|",
    ]
    for bound, paper in AREAL_PAPER.items():
        lines.append(
            f"| {bound} | {paper} ({paper / AREAL_PAPER[0]:.2f}) | {ours[bound] / 1e3:.0f} ({ours[bound] / base:.2f}) |"
        )
    wanted = "Wanted: 1.5 to 2.2 times from 0 to 1, less than 12 % beyond 4."
    first, late = ours[1] / base, max(ours[8], ours[16]) / ours[4] - 1
    verdict = "yes" if 1.5 <= first <= 2.2 and late < 0.12 else "**no**"
    lines += [
        "",
        f"{wanted} Ours: {first:.2f} times, {late:.0%}. Shown: {verdict}.",
        "",
        "![Throughput by staleness bound](results_staleness.svg)",
    ]
    return "\n".join(lines)


def _bars(ours: dict[int, float]) -> str:
    """Both series over the synchronous run's."""
    width, height, bottom, bar = 560, 240, 200, 26
    most = max(max(ours.values()) / ours[0], max(AREAL_PAPER.values()) / AREAL_PAPER[0])
    title = "AReaL 1.5B: tokens per second over no staleness, by staleness bound"
    parts = [
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}" xmlns="http://www.w3.org/2000/svg">',
        "<style>text{font:12px system-ui,sans-serif;fill:#444}</style>",
        f'<text x="20" y="18">{escape(title)}</text>',
    ]
    for index, bound in enumerate(ours):
        x = 30 + index * 88
        values = {"paper": AREAL_PAPER[bound] / AREAL_PAPER[0], "ours": ours[bound] / ours[0]}
        for offset, (name, value) in enumerate(values.items()):
            tall = value / most * (bottom - 60)
            left = x + offset * bar
            place = f'x="{left}" y="{bottom - tall:.1f}" width="{bar - 2}" height="{tall:.1f}"'
            parts.append(f'<rect {place} fill="{_COLORS[name]}"/>')
            parts.append(f'<text x="{left}" y="{bottom - tall - 4:.1f}">{value:.1f}</text>')
        parts.append(f'<text x="{x + bar}" y="{bottom + 16}" text-anchor="middle">{bound}</text>')
    for offset, (name, color) in enumerate(_COLORS.items()):
        parts.append(f'<rect x="{30 + offset * 80}" y="{height - 14}" width="10" height="10" fill="{color}"/>')
        parts.append(f'<text x="{44 + offset * 80}" y="{height - 5}">{name}</text>')
    return "\n".join([*parts, "</svg>"])


if __name__ == "__main__":
    sys.exit(main())
