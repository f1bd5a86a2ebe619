"""Ends a run: saves a remote trainer's results here too, and words its results and its audit."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from console.config.run_folder import RunFolder
from console.view.formats import duration, number
from console.view.run_view import Step
from penstock.process.durable_files import replace_file
from penstock.v1 import trainer_pb2

Summary = dict[str, Any]
MAX_SOURCE_LINES = 8
TAIL_SHARE = 0.2
"""The long tail of completion lengths: the longest fifth, as closely as the audit's buckets allow."""


def keep_results(folder: RunFolder, finished: trainer_pb2.RunFinished, history: Mapping[int, Step]) -> None:
    """Write metrics.jsonl and summary.json from the trainer's events: its own files may be on another machine.

    Files here may then be of an earlier part of the run: the summary and repeated steps are replaced.
    """
    if finished.summary_json:
        replace_file(folder.summary, finished.summary_json)
    if not history:
        return
    kept = {float(line["policy_version"]): line for line in read_lines(folder.metrics)}
    if not _holds(kept, history[max(history)]):
        new_lines = [
            {"policy_version": version, "time": step.time_s, **step.metrics} for version, step in history.items()
        ]
        lines = [line for version, line in kept.items() if version < min(history)] + new_lines
        lines.sort(key=lambda line: float(line["policy_version"]))
        replace_file(folder.metrics, "".join(json.dumps(line) + "\n" for line in lines))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a JSONL file that state a policy version; empty if there is no file. Raises OSError."""
    found: list[dict[str, Any]] = []
    with contextlib.suppress(FileNotFoundError):
        for text in path.read_text(encoding="utf-8").splitlines():
            # The last line of a run that was cut short may be torn.
            with contextlib.suppress(ValueError, TypeError, KeyError):
                line = json.loads(text)
                float(line["policy_version"])
                found.append(line)
    return found


def _holds(lines: Mapping[float, dict[str, Any]], last: Step) -> bool:
    """Whether the trainer wrote the newest step here itself; its file then has more than the events reported."""
    line = lines.get(last.version)
    return line is not None and all(line.get(name) == value for name, value in last.metrics.items())


def add_to_summary(folder: RunFolder, **facts: object) -> None:
    """Add to summary.json, if there is one, what the trainer does not know."""
    summary = read_summary(folder.summary)
    if summary is not None:
        summary |= facts
        replace_file(folder.summary, json.dumps(summary, indent=2) + "\n")


def read_summary(path: Path) -> Summary | None:
    """The summary, or None if it is missing or unreadable."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def closing_lines(folder: RunFolder, finished: trainer_pb2.RunFinished | None, *, has_report: bool) -> list[str]:
    """Closing lines for the user."""
    lines = []
    summary = read_summary(folder.summary)
    if finished is not None:
        outcome = trainer_pb2.RunOutcome.Name(finished.outcome).removeprefix("RUN_OUTCOME_").lower()
        # Why a run failed is the command's last line.
        is_shown_here = finished.message and finished.outcome != trainer_pb2.RUN_OUTCOME_FAILED
        lines.append(f"{outcome}: {finished.message}" if is_shown_here else outcome)
    if finished is not None and summary is not None:
        lines += summary_lines(summary)
        lines += [f"advice: {advice['text']}" for advice in summary.get("advice") or ()]
    if has_report:
        lines.append(f"report: {folder.report}")
    return lines


def summary_lines(summary: Summary) -> list[str]:
    """A summary in a few lines."""
    lines = [
        f"{summary.get('steps')} steps, {summary.get('samples_trained')} samples in "
        f"{duration(summary.get('wall_s'))} ({number(summary.get('samples_per_second'), '.1f')} samples/s, "
        f"{number(summary.get('response_tokens_per_second'), '.0f')} tokens/s)",
        f"reward {change(summary, 'reward_first', 'reward_last', ' -> ')}; held-out accuracy "
        f"{change(summary, 'eval_accuracy_start', 'eval_accuracy_end', ' -> ')} sampled, "
        f"{change(summary, 'eval_greedy_start', 'eval_greedy_end', ' -> ')} greedy",
        f"staleness at most {summary.get('max_staleness_seen')} (bound {summary.get('max_staleness')}); "
        f"overlap {number(summary.get('overlap_ratio'), '.2f')}",
    ]
    lines += source_lines(summary)
    audit = summary.get("audit")
    if isinstance(audit, dict):
        lines.append(audit_line(audit))
        lines += [line for line in (loss_by_length(audit),) if line is not None]
    if restarts := restarts_text(summary):
        lines.append(f"restarts: {restarts}")
    return lines


def source_lines(summary: Summary) -> list[str]:
    """A line for each named source, of the first few."""
    sources = summary.get("sources")
    if not isinstance(sources, dict):
        return []
    return [
        f"source {name}: {found.get('samples_trained')} samples, "
        f"reward {change(found, 'reward_first', 'reward_last', ' -> ')}; held-out accuracy "
        f"{change(found, 'eval_accuracy_start', 'eval_accuracy_end', ' -> ')} sampled"
        for name, found in list(sources.items())[:MAX_SOURCE_LINES]
    ]


def audit_line(audit: Mapping[str, Any]) -> str:
    """The audit equation with its numbers."""
    dropped = audit.get("dropped") or {}
    reasons = f" ({', '.join(f'{reason} {count}' for reason, count in sorted(dropped.items()))})" if dropped else ""
    verdict = "balanced" if audit.get("balanced") else "NOT BALANCED"
    return (
        f"audit: submitted {audit.get('submitted')} = trained {audit.get('trained')} + dropped {sum(dropped.values())}"
        f"{reasons} + in flight {audit.get('in_flight')}: {verdict}"
    )


def loss_by_length(audit: Mapping[str, Any]) -> str | None:
    """The shares lost of the longest samples and of the others; None if nothing was lost or all lengths are similar.

    Args:
        audit: What `audit_document` makes, possibly of an older run. Samples dropped before
            their first token count for neither side: their length is unknown.
    """
    trained: Counter[int] = Counter()
    lost: Counter[int] = Counter()
    for row in audit.get("rows") or []:
        if row["max_tokens"]:
            trained[row["max_tokens"]] += row["trained"]
            lost[row["max_tokens"]] += sum(row["dropped"].values())
    ended = trained + lost
    bound, num_in_tail = 0, 0
    for max_tokens in sorted(ended, reverse=True)[:-1]:
        if num_in_tail < TAIL_SHARE * ended.total():
            bound, num_in_tail = max_tokens // 2, num_in_tail + ended[max_tokens]
    num_others = ended.total() - num_in_tail
    if not lost.total() or not num_in_tail:
        return None
    lost_in_tail = sum(count for max_tokens, count in lost.items() if max_tokens > bound)
    tail, others = lost_in_tail / num_in_tail, (lost.total() - lost_in_tail) / num_others
    return f"lost by length: {100 * tail:.0f} % of samples over {bound} tokens, {100 * others:.0f} % of shorter ones"


def change(summary: Mapping[str, Any], first: str, last: str, between: str) -> str:
    """First and last value, like `0.301 -> 0.842`."""
    return f"{number(summary.get(first), '.3f')}{between}{number(summary.get(last), '.3f')}"


def restarts_text(summary: Mapping[str, Any]) -> str:
    """The services that were restarted, and how often; empty if none was."""
    return ", ".join(f"{name} ({count})" for name, count in (summary.get("restarts") or {}).items() if count)
