"""Implements `penstock audit`: shows a run's counters, live or from its folder, and whether they balance."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from console.inspect.find_run import answer_of, find_run
from console.view.formats import plain_console, plain_table
from console.view.outcome import audit_line, loss_by_length, read_summary
from penstock.config import ConfigError
from penstock.wire.audit_json import audit_document

_Document = Mapping[str, Any]
"""What `audit_document` makes, possibly of an older run, without rows."""


def audit_command(run: str | None, *, broker: str | None, runs_dir: Path, by_version: bool, as_json: bool) -> int:
    """Print a run's counters; returns 0 if they balance, else 1. Raises ConfigError."""
    target = find_run(run, broker=broker, runs_dir=runs_dir)
    if target.broker is not None:
        books = answer_of(target.broker, lambda client: client.audit(target.run_id))
        document: _Document = audit_document(books)
        staleness = f"staleness at most {books.max_staleness_seen}, policy version {books.policy_version}"
    else:
        summary = (read_summary(target.folder.summary) if target.folder is not None else None) or {}
        if not isinstance(summary.get("audit"), dict):
            raise ConfigError(
                f"{target.run_id}: not under way, and it left no counters; continue it with penstock run --resume"
            )
        document = summary["audit"]
        staleness = f"staleness at most {summary.get('max_staleness_seen')}, policy version {summary.get('steps')}"
    if as_json:
        print(json.dumps(document, indent=2))
    else:
        print(audit_line(document))
        if "sessions" in document:
            print(sessions_line(document["sessions"]))
        print(staleness)
        bias = loss_by_length(document)
        if bias is not None:
            print(bias)
        show_rows(document, plain_console(), by_version=by_version)
    return 0 if document.get("balanced") else 1


def sessions_line(sessions: _Document) -> str:
    """Agents' sessions, in words."""
    reasons = ", ".join(f"{name} {count}" for name, count in sessions["dropped"].items())
    dropped = f"{sum(sessions['dropped'].values())} dropped{f' ({reasons})' if reasons else ''}"
    return (
        f"agents' sessions: {sessions['opened']} opened = {sessions['put']} put + {dropped} + {sessions['open']} open"
    )


@dataclass(slots=True)
class _Line:
    """One line of a table: samples of one length bucket, or of one version."""

    trained: int = 0
    in_flight: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def add(self, row: _Document) -> None:
        """Add an audit row."""
        self.trained += row["trained"]
        self.in_flight += row["in_flight"]
        self.dropped.update(row["dropped"])


def show_rows(document: _Document, console: Console, *, by_version: bool) -> None:
    """Print the audit rows as a table; nothing if there are none."""
    rows = document.get("rows") or []
    if not rows:
        return
    reasons = sorted({reason for row in rows for reason in row["dropped"]})
    lines = _lines(rows, "submit_version" if by_version else "max_tokens")
    console.print(_by_version(lines, document, reasons) if by_version else _by_length(lines, reasons))


def _lines(rows: Iterable[_Document], key: str) -> dict[int, _Line]:
    lines: defaultdict[int, _Line] = defaultdict(_Line)
    for row in rows:
        lines[row[key]].add(row)
    return dict(sorted(lines.items()))


def _by_length(lines: Mapping[int, _Line], reasons: list[str]) -> Table:
    """Shares of trained and dropped samples, side by side: a length bias shows as a difference."""
    num_trained = sum(line.trained for line in lines.values())
    num_dropped = sum(line.dropped.total() for line in lines.values())
    names = ("tokens", "trained", "% of trained", "dropped", "% of dropped", "% lost", *reasons, "in flight")
    rows = []
    for max_tokens, line in lines.items():
        lost, dropped = line.dropped.total(), (line.dropped[reason] for reason in reasons)
        shares = (_percent(lost, num_dropped), _percent(lost, line.trained + lost))
        trained = (line.trained, _percent(line.trained, num_trained))
        rows.append((_span(max_tokens), *trained, lost, *shares, *dropped, line.in_flight))
    return plain_table(names, rows, justify="right")


def _by_version(lines: Mapping[int, _Line], document: _Document, reasons: list[str]) -> Table:
    submitted = {row["submit_version"]: row["submitted"] for row in document.get("submitted_by_version") or []}
    rows = []
    for version in sorted(submitted.keys() | lines.keys()):
        line, count = lines.get(version, _Line()), submitted.get(version, 0)
        dropped = (line.dropped[reason] for reason in reasons)
        verdict = "yes" if count == line.trained + line.dropped.total() + line.in_flight else "NO"
        rows.append((version, count, line.trained, *dropped, line.in_flight, verdict))
    return plain_table(("version", "submitted", "trained", *reasons, "in flight", "balanced"), rows, justify="right")


def _span(max_tokens: int) -> str:
    """The lengths in a bucket, for example 5-8."""
    least = max_tokens // 2 + 1
    return str(max_tokens) if max_tokens in (0, least) else f"{least}-{max_tokens}"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}" if whole else "-"
