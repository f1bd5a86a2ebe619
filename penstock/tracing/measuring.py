"""Times a piece of work as a span."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from penstock.tracing.context import TraceContext, current, within
from penstock.tracing.recording import Span, Value, is_on, new_context, record


@dataclass(slots=True)
class Measured:
    """A piece of work under way; what is added here is recorded at its end."""

    attributes: dict[str, Value] = field(default_factory=dict)
    links: list[TraceContext] = field(default_factory=list)


@contextmanager
def measuring(name: str, attributes: Mapping[str, Value], *, run_id: str = "") -> Iterator[Measured]:
    """A span of what happens inside, within the current one; calls made inside carry it.

    An error that ends it is noted by its type. Nothing is measured where tracing is off.
    """
    measured = Measured()
    if not is_on():
        yield measured
        return
    parent, error = current(), ""
    context = new_context(parent)
    start_s, begun_s = time.time(), time.monotonic()
    try:
        with within(context):
            yield measured
    except Exception as raised:
        error = type(raised).__name__
        raise
    except asyncio.CancelledError:
        measured.attributes["rl.cancelled"] = True
        raise
    finally:
        record(
            Span(
                name=name,
                run_id=run_id,
                start_s=start_s,
                end_s=start_s + time.monotonic() - begun_s,
                context=context,
                parent=parent,
                attributes={**attributes, **measured.attributes},
                links=measured.links,
                error=error,
            )
        )
