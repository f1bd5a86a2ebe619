"""What waits for an exporter that hangs is bounded in bytes as in number, and what does not fit is counted."""

from __future__ import annotations

import gc
import threading
import tracemalloc
from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from penstock import tracing
from penstock.tracing.counters import LOST
from penstock.tracing.recorder import MAX_EVENTS, MAX_LINKS, Recorder
from penstock.tracing.recording import Event, Span
from penstock.tracing.settings import TraceSettings
from penstock.tracing.span_queue import MAX_QUEUED_BYTES, MAX_SPANS_PER_LINE, SpanQueue

MAKER = Recorder(TraceSettings(), service="test", instance="test-0", run_id="r")
LINKS = [tracing.group_context("r", str(number)) for number in range(MAX_LINKS)]


class Hanging(SpanExporter):
    """Takes nothing until it is told to."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.num_taken = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.goes_on.wait(30)
        self.num_taken += len(spans)
        return SpanExportResult.FAILURE


def lost() -> float:
    return LOST.labels("queue")._value.get()


def largest(number: int) -> ReadableSpan:
    """A span with as much of everything as is kept, in characters of four bytes."""
    texts = {f"rl.k{index}": f"{number}{chr(0x1F600 + index)}" * 200 for index in range(8)}
    counts = {"rl.tokens": 1000 + number, "rl.policy.version": 2000 + number}
    events = [Event(name="chunk", at_s=number + index + 0.5, attributes=counts) for index in range(2 * MAX_EVENTS)]
    return MAKER._readable(
        Span(name="rl.test", start_s=1.0, end_s=2.0, attributes=texts, events=events, links=LINKS, error="x" * 300)
    )


def test_what_waits_is_bounded_in_bytes_and_room_comes_back() -> None:
    exporter, before, num_put = Hanging(), lost(), 150
    queue = SpanQueue(exporter, "collector", 10.0)
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(num_put):
            queue.on_end(largest(number))
        gc.collect()
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    num_left_out = lost() - before
    assert 0 < num_left_out < num_put
    assert 0.7 * MAX_QUEUED_BYTES < taken < 1.1 * MAX_QUEUED_BYTES
    assert queue.num_bytes <= MAX_QUEUED_BYTES
    exporter.goes_on.set()
    queue.close()
    assert exporter.num_taken == num_put - num_left_out
    assert queue.num_bytes == 0


def test_what_an_exporter_raises_leaves_the_room_free() -> None:
    class Raising(SpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            raise RuntimeError("no")

    queue = SpanQueue(Raising(), "collector", 10.0)
    for number in range(2 * MAX_SPANS_PER_LINE):
        queue.on_end(MAKER._readable(Span(name="rl.test", start_s=1.0 + number, end_s=2.0 + number)))
    queue.close()
    assert queue.num_bytes == 0
