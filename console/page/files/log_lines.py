"""Finds warnings and errors in the ends of a run's logs, repeated ones together.

Of libraries only errors: what they warn of is mostly what they do without.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from penstock.process.log_limits import LIBRARY

TAIL_BYTES = 256 * 1024
"""Of each log: what went wrong before that is in the log itself."""
MAX_LOGS = 300
MAX_EVENTS = 200
MAX_LINE_CHARS = 1000
_LEVELS = ("warning", "error", "critical")
_TEXT = re.compile(r"(\S{19,40}Z) \[(\w+) *\] (.*?)(?:  .*| \w+=.*)?$")
_OF_LIBRARY = re.compile(rf" {LIBRARY}=\S")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]|\x1b\[[0-9;]*m")


@dataclass(slots=True, kw_only=True)
class Complaint:
    """An event that a service logged as a warning or an error."""

    source: str
    """Name of the log."""
    level: str
    event: str
    """What is said every time."""
    line: str
    """The newest line."""
    at_s: float | None
    """When that was, Unix seconds."""
    first_s: float | None
    """When it was logged first within what was read."""
    count: int = 1


def complaints(logs: Path) -> list[Complaint]:
    """Those in the ends of all logs of a folder, newest first."""
    found: dict[tuple[str, str], Complaint] = {}
    per_log: Counter[str] = Counter()
    for path in sorted(logs.glob("*.log"))[:MAX_LOGS]:
        for line in _tail(path):
            each = _complaint(path.stem, line)
            if each is None:
                continue
            known = found.get((each.source, each.event))
            if known is not None:
                known.count, known.line, known.at_s = known.count + 1, each.line, each.at_s
            elif per_log[each.source] < MAX_EVENTS:
                per_log[each.source] += 1
                found[each.source, each.event] = each
    return sorted(found.values(), key=lambda each: -(each.at_s or 0.0))


def newest_line(logs: Path, source: str, words: str) -> str | None:
    """The newest line with these words in the end of a log, whatever its level; None if there is none."""
    lines = [line for line in _tail(logs / f"{source}.log") if words in line]
    return lines[-1][:MAX_LINE_CHARS] if lines else None


def _tail(path: Path) -> Iterator[str]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            data = file.read(TAIL_BYTES)
    except OSError:
        return
    # The first line may be cut.
    for line in data.splitlines()[size > TAIL_BYTES :]:
        yield _CONTROL.sub("", line.decode(errors="replace"))


def _complaint(source: str, line: str) -> Complaint | None:
    if line.startswith("{"):
        return _of_json(source, line)
    found = _TEXT.match(line)
    if found is None or found[2] not in _LEVELS or (found[2] == "warning" and _OF_LIBRARY.search(line)):
        return None
    return _made(source, level=found[2], event=found[3], line=line, at=found[1])


def _of_json(source: str, line: str) -> Complaint | None:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or document.get("level") not in _LEVELS:
        return None
    if document["level"] == "warning" and LIBRARY in document:
        return None
    event = str(document.get("event"))
    return _made(source, level=document["level"], event=event, line=line, at=str(document.get("timestamp")))


def _made(source: str, *, level: str, event: str, line: str, at: str) -> Complaint:
    try:
        at_s = datetime.fromisoformat(at).replace(tzinfo=UTC).timestamp()
    except (ValueError, OverflowError):
        at_s = None
    line = line[:MAX_LINE_CHARS]
    return Complaint(source=source, level=level, event=event[:300].strip(), line=line, at_s=at_s, first_s=at_s)
