"""Times a piece of work as a span."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace

from penstock.tracing.context import TraceContext, current, read_traceparent, within
from penstock.tracing.recording import Span, Value, is_on, new_context, record
from penstock.tracing.tail import SlowOnes, TailBudget


@dataclass(slots=True)
class Measured:
    """A piece of work under way; what is added here is recorded at its end."""

    attributes: dict[str, Value] = field(default_factory=dict)
    links: list[TraceContext] = field(default_factory=list)
    error: str = ""
    """Why it failed; empty if it did not. Of an error that is raised the type is noted."""


@dataclass(slots=True)
class _Details:
    """What this process has seen of work that it records a part of."""

    slow: dict[str, SlowOnes] = field(default_factory=dict)
    """By the name of the span, of which there are few."""
    budget: TailBudget = field(default_factory=TailBudget)

    def keeps(self, span: Span) -> bool:
        """Whether one that is not sampled failed or was slow, and is affordable."""
        is_slow = self.slow.setdefault(span.name, SlowOnes()).note(span.end_s - span.start_s)
        self.budget.earn(span.end_s)
        return bool(span.error or is_slow) and self.budget.affords(1)


_details = _Details()


def measuring(name: str, attributes: Mapping[str, Value], *, run_id: str = "") -> AbstractContextManager[Measured]:
    """A span of what happens inside, within the current one; calls made inside carry it.

    An error that ends it is noted by its type. Nothing is measured where tracing is off.
    """
    if not is_on():
        return nullcontext(Measured())
    return _timed(name, attributes, run_id=run_id, parent=current(), is_sampled=True)


def measuring_detail(
    name: str, attributes: Mapping[str, Value], *, sample: str | None = None, run_id: str = ""
) -> AbstractContextManager[Measured]:
    """The same of work that is done for each sample: recorded if that is sampled, or if it failed or was slow.

    Args:
        name: Of the span.
        attributes: Of the span.
        sample: The trace context of the sample, empty if that is not sampled; None for the one of the caller.
        run_id: The run, if the process works for many.
    """
    if not is_on():
        return nullcontext(Measured())
    named = None if sample is None else read_traceparent(sample)
    parent = named or current()
    # A batch that is always recorded may hold samples that are not sampled.
    decides = parent if sample is None else named
    is_sampled = decides is not None and decides.is_sampled
    return _timed(name, attributes, run_id=run_id, parent=parent, is_sampled=is_sampled)


@contextmanager
def _timed(
    name: str, attributes: Mapping[str, Value], *, run_id: str, parent: TraceContext | None, is_sampled: bool
) -> Iterator[Measured]:
    measured, context = Measured(), new_context(parent)
    # An unsampled context requests no recording, and names no span that may never be written.
    outer = None if parent is None else replace(parent, is_sampled=False)
    start_s, begun_s = time.time(), time.monotonic()
    try:
        with within(context if is_sampled else outer):
            yield measured
    except Exception as raised:
        measured.error = type(raised).__name__
        raise
    except asyncio.CancelledError:
        measured.attributes["rl.cancelled"] = True
        raise
    finally:
        span = Span(
            name=name,
            run_id=run_id,
            start_s=start_s,
            end_s=start_s + time.monotonic() - begun_s,
            context=context,
            parent=parent,
            attributes={**attributes, **measured.attributes},
            links=measured.links,
            error=measured.error,
        )
        if is_sampled or _details.keeps(span):
            record(span)
