"""A bounded queue of spans, and the thread of OpenTelemetry's SDK that exports them in batches.

Invariant: the spans that wait, and the batch under way, take at most `MAX_QUEUED_BYTES` of memory and are at most
`MAX_QUEUED_SPANS`. What does not fit is left out and counted in `penstock_trace_spans_lost_total{at="queue"}`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from penstock.tracing.counters import LOST

MAX_QUEUED_SPANS, MAX_SPANS_PER_LINE = 8192, 256
MAX_QUEUED_BYTES = 32 * 2**20
CLOSE_TIMEOUT_S = 5.0
"""How long a process that ends waits for the file and the collector, each."""
_SPAN_BYTES, _ATTRIBUTE_BYTES, _EVENT_BYTES, _LINK_BYTES = 1024, 128, 256, 264
"""What the SDK's objects take by `tracemalloc` (CPython 3.11), rounded up; texts come on top."""


class SpanQueue(BatchSpanProcessor):
    """Exports what is queued, and counts what its full queue leaves out and what is left in it at the end.

    Args:
        exporter: Of the spans.
        at: What does not take them if they are left.
        delay_ms: From a span to its export, at most, unless many are queued.
    """

    def __init__(self, exporter: SpanExporter, at: str, delay_ms: float) -> None:
        self._at = at
        self._lock = threading.Lock()
        self._num_bytes = 0
        super().__init__(
            _Releasing(exporter, self._release),
            max_queue_size=MAX_QUEUED_SPANS,
            schedule_delay_millis=delay_ms,
            max_export_batch_size=MAX_SPANS_PER_LINE,
        )

    @property
    def num_bytes(self) -> int:
        """Memory of the spans that wait or are being exported, about."""
        return self._num_bytes

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a span, if there is room."""
        size = memory_of(span)
        with self._lock:
            queue = self._batch_processor._queue
            fits = len(queue) < MAX_QUEUED_SPANS and self._num_bytes + size <= MAX_QUEUED_BYTES
            self._num_bytes += size if fits else 0
            if fits:
                super().on_end(span)
        if not fits:
            LOST.labels("queue").inc()

    def close(self) -> None:
        """Export what is queued, for at most `CLOSE_TIMEOUT_S`."""
        self._batch_processor.shutdown(timeout_millis=int(CLOSE_TIMEOUT_S * 1000))
        LOST.labels(self._at).inc(len(self._batch_processor._queue))

    def _release(self, spans: Sequence[ReadableSpan]) -> None:
        size = sum(map(memory_of, spans))
        with self._lock:
            self._num_bytes -= size


class _Releasing(SpanExporter):
    """Exports, and then says that the spans are gone, whatever came of it."""

    def __init__(self, exporter: SpanExporter, release: Any) -> None:
        self._exporter = exporter
        self._release = release

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """See `SpanExporter`."""
        try:
            return self._exporter.export(spans)
        finally:
            self._release(spans)

    def shutdown(self) -> None:
        """See `SpanExporter`."""
        self._exporter.shutdown()


def memory_of(span: ReadableSpan) -> int:
    """Bytes of memory that a span takes, about."""
    size = _SPAN_BYTES + _LINK_BYTES * len(span.links) + _attributes(span.attributes)
    size += sum(_EVENT_BYTES + _attributes(event.attributes) for event in span.events)
    return size + sys.getsizeof(span.status.description or "")


def _attributes(values: Mapping[str, Any] | None) -> int:
    # Numbers are in what an attribute takes; texts were cut to a length.
    texts = (sys.getsizeof(value) for value in (values or {}).values() if isinstance(value, str))
    return _ATTRIBUTE_BYTES * len(values or {}) + sum(texts)
