"""Words a run's results as tables: the part of report.html that needs no script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from console.config.run_folder import RunFolder
from console.view.forecast_quality import lengths_table
from console.view.formats import duration, number
from console.view.outcome import audit_line, change, loss_by_length, restarts_text
from console.view.source_table import sources_table

Line = Mapping[str, float]


def results_html(
    folder: RunFolder, steps: Sequence[Line], evaluations: Sequence[Line], summary: Mapping[str, Any]
) -> str:
    """The tables. `steps` and `evaluations` are lines of their files, oldest first."""
    outcome = summary.get("outcome") or "under way or cut short"
    message = f": {summary['message']}" if summary.get("message") else ""
    parts = [
        f"<h2>Results</h2><p>{escape(str(outcome) + message)}</p>",
        _summary_table(summary, steps),
        sources_table(steps, evaluations),
        lengths_table(summary),
        _checkpoint_part(newest_checkpoint(folder.checkpoints)),
        _versions_part(summary),
    ]
    return "\n".join(parts)


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


def _of(summary: Mapping[str, Any], key: str, form: str) -> str:
    return number(summary.get(key), form)
