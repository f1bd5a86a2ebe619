"""Bounds on what a process logs: line length, a budget per event, and a failing output that costs only lines.

Promises:
- Nothing that can make a process log, such as a client with malformed requests, fills a disk: an event writes at most
  `EVENT_BYTES_A_PERIOD` and all together `PROCESS_BYTES_A_PERIOD` in `PERIOD_S` seconds. Suppressed events are counted
  by kind and reported once a period.
- A log call never raises: not where a value cannot be printed, and not where the disk of the log is full.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, MutableMapping, Sequence
from time import monotonic
from typing import Any

import prometheus_client
import structlog

MAX_VALUE_CHARACTERS = 1024
"""Length of one field of a line, and of one line of a traceback."""
MAX_LINE_BYTES = 4096
"""Length of a line with its traceback."""
PERIOD_S = 60.0
EVENT_BYTES_A_PERIOD = 64 * 1024
PROCESS_BYTES_A_PERIOD = 1024 * 1024
MAX_EVENTS = 512
"""Events that have a budget of their own; further ones share one."""
LIBRARY = "library"
"""Field that names the library a line came from; its lines share a budget, since their texts may be anything."""

_OTHER = "other"
_TRACEBACK = "exception"
_ALWAYS_SHOWN = ("event", "level", "timestamp", "service")
_Event = MutableMapping[str, Any]
_Step = Callable[[Any, str, _Event], Any]

SUPPRESSED = prometheus_client.Counter(
    "penstock_log_lines_suppressed", "Log lines left out because their event, or the process, logged too much."
)
LOST = prometheus_client.Counter("penstock_log_lines_lost", "Log lines that could not be written, or not be rendered.")


class BoundedLines:
    """The last processor of structlog: renders an event by `steps`, the last of which writes the line, or drops it."""

    def __init__(self, steps: Sequence[_Step]) -> None:
        self._steps = steps
        self._lock = threading.Lock()
        self._ends_s = monotonic() + PERIOD_S
        self._spent: Counter[str] = Counter()
        self._spent_bytes = 0
        self._suppressed: Counter[str] = Counter()

    def __call__(self, logger: Any, method: str, event: _Event) -> str:
        """The line to write. Raises structlog.DropEvent where it is suppressed."""
        key = str(event.get(LIBRARY) or event.get("event"))[:128]
        with self._lock:
            summary = self._roll(event)
            is_allowed = self._is_allowed(key)
        lines = [self._render(logger, method, each) for each in (summary, event if is_allowed else None) if each]
        if not lines:
            raise structlog.DropEvent
        with self._lock:
            self._charge(key, sum(map(len, lines)))
        return "\n".join(lines)

    def _roll(self, event: _Event) -> _Event | None:
        """Begin a new period if this one is over, and report what was suppressed in it."""
        now_s = monotonic()
        if now_s < self._ends_s:
            return None
        self._ends_s = now_s + PERIOD_S
        self._spent.clear()
        self._spent_bytes = 0
        most, num_lines = dict(self._suppressed.most_common(5)), self._suppressed.total()
        self._suppressed.clear()
        if not num_lines:
            return None
        kept = {name: event[name] for name in _ALWAYS_SHOWN if name in event}
        return {**kept, "event": "log lines were suppressed", "level": "warning", "num": num_lines, "most": most}

    def _is_allowed(self, key: str) -> bool:
        key = self._budget_of(key)
        if self._spent[key] < EVENT_BYTES_A_PERIOD and self._spent_bytes < PROCESS_BYTES_A_PERIOD:
            return True
        self._suppressed[key] += 1
        SUPPRESSED.inc()
        return False

    def _charge(self, key: str, num_bytes: int) -> None:
        self._spent[self._budget_of(key)] += num_bytes
        self._spent_bytes += num_bytes

    def _budget_of(self, key: str) -> str:
        return key if key in self._spent or len(self._spent) < MAX_EVENTS else _OTHER

    def _render(self, logger: Any, method: str, event: _Event) -> str:
        try:
            *prepare, show = self._steps
            for step in prepare:
                event = step(logger, method, event)
            line = str(show(logger, method, _cut_values(event)))
            if len(line.encode("utf-8", "backslashreplace")) <= MAX_LINE_BYTES:
                return line
            short = {name: cut(event[name], 256) for name in _ALWAYS_SHOWN if name in event}
            return str(show(logger, method, {**short, "cut": cut(line, MAX_LINE_BYTES // 4)}))
        except Exception as error:  # a value that cannot be printed must not fail the log call
            LOST.inc()
            return f"a log line could not be rendered: {type(error).__name__}"


class GuardedStderr:
    """Writes lines to standard error; one that cannot be written is counted and reported when output works again.

    Past Python's buffers: what they hold would be tried again, and fail again, when the process ends.
    """

    def __init__(self) -> None:
        self.num_lost = 0

    def msg(self, message: str) -> None:
        """Write a line; never raises."""
        lost = f"{self.num_lost} log lines could not be written\n" if self.num_lost else ""
        try:
            _write(f"{lost}{message}\n")
        except (OSError, ValueError):
            self.num_lost += 1
            LOST.inc()
        else:
            self.num_lost = 0

    log = debug = info = warn = warning = msg
    fatal = failure = err = error = critical = exception = msg


def cut(value: object, limit: int = MAX_VALUE_CHARACTERS) -> str:
    """`str(value)`, of which at most `limit` characters are kept: its beginning and its end."""
    text = value if isinstance(value, str) else str(value)
    if len(text) <= limit:
        return text
    tail = limit // 4
    return f"{text[: limit - tail]}...[{len(text) - limit} characters cut]...{text[-tail:]}"


def _cut_values(event: _Event) -> _Event:
    return {name: _cut_value(name, value) for name, value in event.items()}


def _cut_value(name: str, value: Any) -> Any:
    if isinstance(value, int | float | None):
        return value
    if name == _TRACEBACK:
        lines = "\n".join(cut(line) for line in str(value).splitlines())
        if len(lines) <= MAX_LINE_BYTES // 2:
            return lines
        # What was raised, and where, stands at the end.
        return f"...[cut]...\n{lines[-MAX_LINE_BYTES // 2 :]}"
    shown = value if isinstance(value, str) else repr(value)
    return value if len(shown) <= MAX_VALUE_CHARACTERS else cut(shown)


def _write(text: str) -> None:
    stream = sys.stderr
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError, AttributeError):
        # Replaced in the meantime, for example by a test.
        stream.write(text)
        stream.flush()
    else:
        os.write(descriptor, text.encode("utf-8", "backslashreplace"))
