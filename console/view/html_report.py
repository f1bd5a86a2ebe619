"""Writes report.html, one file, no network, no script, from config.yaml, metrics, evaluations and summary.json.

It can be regenerated at any time (`penstock report RUN_DIR`), even for a run that is under way or was cut short.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from console.config.run_folder import RunFolder
from console.launch.probes import masked
from console.view.charts import Series, line_chart
from console.view.forecast_quality import lengths_table
from console.view.formats import duration, number
from console.view.outcome import audit_line, change, loss_by_length, read_lines, read_summary, restarts_text
from console.view.run_view import (
    COMPONENT,
    IDLE_S,
    LENGTH,
    MAX_STALENESS,
    REWARD,
    SAMPLES_PER_SECOND,
    STALENESS,
    STEP_S,
    TOKENS_PER_SECOND,
    TRAIN_S,
)
from console.view.sources import source_charts, sources_table
from penstock.process.durable_files import replace_file

Line = Mapping[str, float]
_VERSION = "policy_version"
MAX_COMPONENTS = 8
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1180px; margin: 2rem auto; padding: 0 1rem;
  color: #1f2328; background: #fff; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.grid-of-charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(460px, 1fr)); gap: 1.2rem; }
svg { width: 100%; height: auto; border: 1px solid #d1d9e0; border-radius: 6px; }
svg .title { font: 600 14px system-ui, sans-serif; fill: #1f2328; }
svg .tick { font: 11px system-ui, sans-serif; fill: #59636e; } svg .end { text-anchor: end; }
svg .middle { text-anchor: middle; } svg .grid { stroke: #e6eaef; stroke-width: 1; }
table { border-collapse: collapse; } td, th { text-align: left; padding: .2rem 1.2rem .2rem 0; vertical-align: top; }
td.value { font-variant-numeric: tabular-nums; } pre { background: #f6f8fa; padding: .8rem; overflow-x: auto;
  border-radius: 6px; font-size: 13px; } .bad { color: #b42318; font-weight: 600; }
"""


def write_report(folder: RunFolder) -> bool:
    """Write report.html; returns whether there was anything to report."""
    steps = read_lines(folder.metrics)
    summary = read_summary(folder.summary) or {}
    if not steps and not summary:
        return False
    config = folder.config.read_text(encoding="utf-8") if folder.config.is_file() else ""
    evaluations = read_lines(folder.path / "evaluations.jsonl")
    checkpoint = newest_checkpoint(folder.checkpoints)
    name = summary.get("run_id") or folder.path.name
    replace_file(
        folder.report, render_report(str(name), steps, evaluations, summary, config=config, checkpoint=checkpoint)
    )
    return True


def render_report(
    name: str,
    steps: Sequence[Line],
    evaluations: Sequence[Line],
    summary: Mapping[str, Any],
    *,
    config: str,
    checkpoint: Path | None,
) -> str:
    """The whole page. `steps` and `evaluations` are lines of their files, oldest first."""
    title = f"Penstock run {escape(name)}"
    outcome = summary.get("outcome") or "under way or cut short"
    message = f": {summary['message']}" if summary.get("message") else ""
    body = [
        f"<h1>{title}</h1><p>{escape(str(outcome) + message)}</p>",
        _summary_table(summary, steps),
        '<div class="grid-of-charts">',
        *charts(steps, evaluations),
        *source_charts(steps, evaluations),
        "</div>",
        sources_table(steps, evaluations),
        lengths_table(summary),
        _checkpoint_part(checkpoint),
        _versions_part(summary),
        f"<h2>Configuration</h2><pre>{escape(masked(config))}</pre>",
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    content = "\n".join(body)
    top = f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>'
    return f"{top}\n<body>\n{content}\n</body></html>\n"


def charts(steps: Sequence[Line], evaluations: Sequence[Line]) -> list[str]:
    """The plots: reward, accuracy, lengths, staleness, throughput, idle time."""

    def line(name: str, key: str) -> Series:
        return Series(name=name, points=_points(steps, key))

    sampled = Series(name="sampled", points=_points(evaluations, "sampled_accuracy"), has_markers=True)
    greedy = Series(name="greedy", points=_points(evaluations, "greedy_accuracy"), has_markers=True)
    smooth = Series(name="mean of 10 steps", points=_smoothed(_points(steps, REWARD), window=10))
    parts = [line(key.removeprefix(COMPONENT), key) for key in _components(steps)]
    return [
        line_chart("Training reward", [line("each step", REWARD), smooth], y_label="reward"),
        *([line_chart("Components of the reward", parts, y_label="mean")] if parts else []),
        line_chart("Held-out accuracy", [sampled, greedy], y_label="accuracy"),
        line_chart("Completion length", [line("mean", LENGTH), line("longest", "length/max")], y_label="tokens"),
        line_chart(
            "Staleness of trained samples", [line("mean", STALENESS), line("most", MAX_STALENESS)], y_label="versions"
        ),
        line_chart("Throughput", [line("samples", SAMPLES_PER_SECOND)], y_label="samples/s"),
        line_chart("Token throughput", [line("completion tokens", TOKENS_PER_SECOND)], y_label="tokens/s"),
        line_chart(
            "Time of a step", [line("whole step", STEP_S), line("trainer computes", TRAIN_S)], y_label="seconds"
        ),
        line_chart("Idle time of the trainer", [Series(name="idle", points=_idle(steps))], y_label="% of step"),
    ]


def _components(steps: Sequence[Line]) -> list[str]:
    """The keys of the reward's components, those of its parts first; as many as a chart can show."""
    found = {key for step in steps for key in step if key.startswith(COMPONENT)}
    return sorted(found, key=lambda key: (key.count("/"), key))[:MAX_COMPONENTS]


def _waits(summary: Mapping[str, Any]) -> str:
    waits = summary.get("trainer_waits_s") or {}
    return ", ".join(f"{cause} {seconds:.1f} s" for cause, seconds in waits.items()) or "-"


def newest_checkpoint(directory: Path) -> Path | None:
    """The newest `step_N` folder in `directory`; incomplete ones have another name."""
    found = [path for path in directory.glob("step_*") if path.name.removeprefix("step_").isdecimal()]
    return max(found, key=lambda path: int(path.name.removeprefix("step_")), default=None)


def _summary_table(summary: Mapping[str, Any], steps: Sequence[Line]) -> str:
    rows: list[tuple[str, str]] = [
        ("Steps", str(summary.get("steps", len(steps)))),
        ("Samples trained", str(summary.get("samples_trained", "-"))),
        ("Wall time", duration(summary.get("wall_s"))),
        ("Throughput", f"{_of(summary, 'samples_per_second', '.1f')} samples/s, "
         f"{_of(summary, 'response_tokens_per_second', '.0f')} completion tokens/s"),
        ("Reward, first to last five steps", change(summary, "reward_first", "reward_last", " to ")),
        ("Held-out accuracy, sampled", change(summary, "eval_accuracy_start", "eval_accuracy_end", " to ")),
        ("Held-out accuracy, greedy", change(summary, "eval_greedy_start", "eval_greedy_end", " to ")),
        ("Staleness seen / bound", f"{_of(summary, 'max_staleness_seen', 'd')} / {_of(summary, 'max_staleness', 'd')}"),
        ("Overlap of generation and training", _of(summary, "overlap_ratio", ".2f")),
        ("Idle, generators / trainer", f"{_of(summary, 'generator_idle_ratio', '.2f')} / "
         f"{_of(summary, 'trainer_idle_ratio', '.2f')}"),
        ("The trainer waited for", _waits(summary)),
        ("Token budget used by forward passes", _of(summary, "pack_fill", ".2f")),
        ("Restarts", restarts_text(summary) or "none"),
    ]  # fmt: skip
    cells = [f"<tr><th>{escape(key)}</th><td class=value>{escape(value)}</td></tr>" for key, value in rows]
    audit = summary.get("audit")
    if isinstance(audit, dict):
        style = "value" if audit.get("balanced") else "value bad"
        text = escape(audit_line(audit).removeprefix("audit: "))
        cells.append(f'<tr><th>Audit</th><td class="{style}">{text}</td></tr>')
        bias = loss_by_length(audit)
        if bias is not None:
            cells.append(f"<tr><th>Length</th><td class=value>{escape(bias)}</td></tr>")
    return f"<table>{''.join(cells)}</table>"


def _checkpoint_part(checkpoint: Path | None) -> str:
    if checkpoint is None:
        return "<h2>Checkpoint</h2><p>No checkpoint was written.</p>"
    # repr, because a path may hold quotes and backslashes.
    path = repr(str(checkpoint.absolute()))
    code = (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f"path = {path}\n"
        "tokenizer = AutoTokenizer.from_pretrained(path)\n"
        "model = AutoModelForCausalLM.from_pretrained(path)\n"
    )
    return f"<h2>Load the checkpoint</h2><pre>{escape(code)}</pre>"


def _versions_part(summary: Mapping[str, Any]) -> str:
    versions = summary.get("versions") or {}
    text = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return f"<h2>Versions</h2><p>{escape(text)}</p>" if text else ""


def _points(lines: Sequence[Line], key: str) -> list[tuple[float, float]]:
    pairs = ((line.get(_VERSION), line.get(key)) for line in lines)
    return [(float(x), float(y)) for x, y in pairs if _is_number(x) and _is_number(y)]  # type: ignore[arg-type]


def _smoothed(points: Sequence[tuple[float, float]], *, window: int) -> list[tuple[float, float]]:
    return [
        (points[end - 1][0], sum(y for _, y in points[end - window : end]) / window)
        for end in range(window, len(points) + 1)
    ]


def _idle(steps: Sequence[Line]) -> list[tuple[float, float]]:
    times = dict(_points(steps, STEP_S))
    return [(x, 100.0 * idle_s / times[x]) for x, idle_s in _points(steps, IDLE_S) if times.get(x, 0.0) > 0]


def _of(summary: Mapping[str, Any], key: str, form: str) -> str:
    return number(summary.get(key), form)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
