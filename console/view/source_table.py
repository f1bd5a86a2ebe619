"""Shows the sources of a run's data beside each other: a table, and a few words for the live display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from statistics import fmean

from console.view.formats import number

Line = Mapping[str, float]
PREFIX = "source/"
"""Before the names of metrics by source: source/NAME/KEY."""
WINDOW_STEPS = 10
MAX_WORDS = 4
"""Sources in the live display."""
_COLUMNS = {
    "share": ("share of groups", ".2f"),
    "groups": ("groups a step", ".1f"),
    "reward_mean": ("reward", ".3f"),
    "pass_rate": ("pass rate", ".2f"),
    "length_mean": ("tokens", ".0f"),
    "zero_variance_share": ("groups without variance", ".2f"),
    "epoch": ("epoch", ".0f"),
    "resting_rows": ("rows that rest", ".0f"),
}
_ACCURACIES = {"sampled_accuracy": "held out, sampled", "greedy_accuracy": "held out, greedy"}


def source_names(lines: Sequence[Line]) -> list[str]:
    """The sources that lines name, in their order."""
    names = (key.removeprefix(PREFIX).rpartition("/")[0] for line in lines for key in line if key.startswith(PREFIX))
    return list(dict.fromkeys(names))


def sources_table(steps: Sequence[Line], evaluations: Sequence[Line]) -> str:
    """Means of the last steps and the newest accuracy of each source; empty in a run without named sources."""
    names = source_names([*steps, *evaluations])
    if not names:
        return ""
    titles = [title for title, _ in _COLUMNS.values()] + list(_ACCURACIES.values())
    rows = ["".join(f"<th>{escape(title)}</th>" for title in ("source", *titles))]
    for name in names:
        cells = [number(_recent(steps, name, key), form) for key, (_, form) in _COLUMNS.items()]
        cells += [number(_newest(evaluations, name, key), ".3f") for key in _ACCURACIES]
        rows.append(f"<th>{escape(name)}</th>" + "".join(f"<td class=value>{escape(cell)}</td>" for cell in cells))
    table = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<h2>Sources, in the last {WINDOW_STEPS} steps</h2><table>{table}</table>"


def source_words(step: Line) -> str:
    """The mean reward of each source in a step, of the first few; empty without named sources."""
    names = [name for name in source_names([step]) if f"{PREFIX}{name}/reward_mean" in step]
    shown = [f"{name} {step[f'{PREFIX}{name}/reward_mean']:.3f}" for name in names[:MAX_WORDS]]
    if len(names) > MAX_WORDS:
        shown.append(f"{len(names) - MAX_WORDS} more")
    return ", ".join(shown)


def _points(lines: Sequence[Line], name: str, key: str) -> list[tuple[float, float]]:
    values = ((line["policy_version"], line.get(f"{PREFIX}{name}/{key}")) for line in lines)
    return [(float(x), float(y)) for x, y in values if y is not None]


def _recent(steps: Sequence[Line], name: str, key: str) -> float | None:
    points = _points(steps[-WINDOW_STEPS:], name, key)
    if not points:
        return None
    # Where the order is, is what the last step says.
    return points[-1][1] if key in ("share", "epoch", "resting_rows") else fmean(y for _, y in points)


def _newest(evaluations: Sequence[Line], name: str, key: str) -> float | None:
    points = _points(evaluations, name, key)
    return points[-1][1] if points else None
