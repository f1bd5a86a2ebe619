"""Records spans of this process: in memory, from where threads write them to the run's file and export them.

Promises: `record` never waits and never raises; what the file, the collector or the bounded queue does not take is
counted in `penstock_trace_spans_lost_total`. OpenTelemetry's SDK is not imported until `configure` needs it.
"""

from __future__ import annotations

import atexit
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.tracing.context import TraceContext
from penstock.tracing.settings import TraceSettings, settings_from

if TYPE_CHECKING:
    from penstock.tracing.recorder import Recorder

Value = str | int | float | bool
Attributes = Mapping[str, Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened within a span."""

    name: str
    at_s: float
    """Unix time."""
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that took time, and has ended."""

    name: str
    """Of the `rl.*` conventions (docs/tracing.md)."""
    start_s: float
    """Unix time."""
    end_s: float
    """Unix time; not before the start."""
    run_id: str = ""
    """The run that it belongs to; empty for the one that the process works for."""
    context: TraceContext | None = None
    """Its own ids, where others refer to them; None for random ones."""
    parent: TraceContext | None = None
    """The span that it is part of."""
    attributes: Attributes = field(default_factory=dict)
    events: Sequence[Event] = ()
    links: Sequence[TraceContext] = ()
    """Spans that it has to do with, of other traces too."""
    error: str = ""
    """Why it failed; empty if it did not."""


@dataclass(slots=True)
class _Process:
    """What this process was configured to do."""

    settings: TraceSettings = field(default_factory=TraceSettings)
    recorder: Recorder | None = None
    run_id: str = ""


_process = _Process()


def configure(service: str, *, instance: str, run_id: str = "", settings: TraceSettings | None = None) -> None:
    """Begin to record, if the environment (or `settings`) says where to.

    Args:
        service: The kind of service, `service.name`.
        instance: Which one of them, `service.instance.id`.
        run_id: The run that spans belong to which name none; empty if it works for many.
        settings: In place of those of the environment.

    Raises:
        ConfigError: A setting is malformed.
    """
    close()
    _process.settings = settings_from() if settings is None else settings
    _process.run_id = run_id
    if _process.settings.is_on:
        # A tenth of a second that a process without tracing does not spend.
        from penstock.tracing.recorder import Recorder

        _process.recorder = Recorder(_process.settings, service=service, instance=instance, run_id=run_id)
        atexit.register(close)


def close() -> None:
    """Write what was recorded, for at most some seconds, and record nothing more."""
    recorder, _process.recorder = _process.recorder, None
    if recorder is not None:
        atexit.unregister(close)
        recorder.close()


def is_on() -> bool:
    """Whether spans are recorded: what only they need is left undone otherwise."""
    return _process.recorder is not None


def ratio() -> float:
    """Share of groups that are sampled; 0 while nothing is recorded."""
    return 0.0 if _process.recorder is None else _process.settings.ratio


def own_run() -> str:
    """The run that spans belong to which name none; empty if the process works for many."""
    return _process.run_id


def record(span: Span) -> None:
    """Record a span that has ended."""
    if _process.recorder is not None:
        _process.recorder.record(span)


def new_context(parent: TraceContext | None = None) -> TraceContext:
    """Ids of a span that is recorded later: within the trace of `parent`, or in one of its own."""
    trace_id = (secrets.randbits(128) or 1) if parent is None else parent.trace_id
    return TraceContext(trace_id, secrets.randbits(64) or 1)
