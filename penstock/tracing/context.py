"""The trace context of W3C (www.w3.org/TR/trace-context): its header, and the one of the current task.

What a peer sends is data: a header that is malformed, or longer than any of version 00, counts as none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

HEADER = "traceparent"
"""Name in HTTP headers and in gRPC's metadata."""
_FORM = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Names a span; both ids are not 0."""

    trace_id: int
    """128 bits."""
    span_id: int
    """64 bits."""
    is_sampled: bool = True
    """Whether its trace was chosen to be recorded where it began."""

    @property
    def traceparent(self) -> str:
        """The header, 55 characters."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.is_sampled):02x}"


_current: ContextVar[TraceContext | None] = ContextVar("trace", default=None)


def read_traceparent(header: str) -> TraceContext | None:
    """The context that a header names; None if it is not one of version 00."""
    found = _FORM.fullmatch(header)
    if found is None:
        return None
    trace_id, span_id, flags = (int(part, 16) for part in found.groups())
    return TraceContext(trace_id, span_id, bool(flags & _SAMPLED)) if trace_id and span_id else None


def current() -> TraceContext | None:
    """The span inside which this task works, if it is recorded."""
    return _current.get()


@contextmanager
def within(context: TraceContext | None) -> Iterator[None]:
    """Inside, calls that this task makes and lines that it logs carry the context."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def metadata() -> tuple[tuple[str, str], ...] | None:
    """What a gRPC call sends along; None without a context."""
    context = _current.get()
    return None if context is None else ((HEADER, context.traceparent),)


def headers() -> dict[str, str]:
    """The same for a request of HTTP; empty without a context."""
    return dict(metadata() or ())


def context_in(sent: Iterable[tuple[str, Any]] | Mapping[str, Any]) -> TraceContext | None:
    """The context that a caller sent in its metadata or headers, if any."""
    pairs = sent.items() if isinstance(sent, Mapping) else sent
    header = next((value for name, value in pairs if name.lower() == HEADER), "")
    return read_traceparent(str(header)) if header else None


def take(context: TraceContext | None) -> None:
    """Continue a caller's context until this task ends."""
    _current.set(context)
