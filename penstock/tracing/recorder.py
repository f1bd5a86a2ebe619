"""Hands spans to OpenTelemetry's SDK: a bounded queue and a thread for the file, and likewise for the collector."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Link, SpanContext, Status, StatusCode, TraceFlags

from penstock.process.logger import get_logger
from penstock.tracing.context import TraceContext
from penstock.tracing.counters import LOST, RECORDED
from penstock.tracing.recording import Attributes, Span, new_context
from penstock.tracing.settings import RUN_ATTRIBUTE, TraceSettings
from penstock.tracing.trace_file import TraceFile

MAX_TEXT_CHARACTERS = 256
MAX_EVENTS, MAX_LINKS = 256, 1024
"""Of one span; the first ones are kept."""
MAX_QUEUED_SPANS, MAX_SPANS_PER_LINE = 8192, 256
FILE_DELAY_MS, EXPORT_DELAY_MS = 1_000.0, 5_000.0
EXPORT_TIMEOUT_S = 5.0
"""Of one attempt to reach the collector, which also bounds how long a process takes to end while that is away."""
_MAX_RUNS = 64

_log = get_logger()


class Recorder:
    """Records the spans of a process.

    Args:
        settings: Where they go.
        service: `service.name` of the resource.
        instance: `service.instance.id`.
        run_id: `rl.run.id` of spans that name no run; empty if it works for many.
    """

    def __init__(self, settings: TraceSettings, *, service: str, instance: str, run_id: str = "") -> None:
        self._service = service
        self._run_id = run_id
        self._instance = instance
        self._processors: list[BatchSpanProcessor] = []
        if settings.folder is not None:
            exporter: SpanExporter = _FileExporter(TraceFile(settings.folder))
            self._processors.append(_batched(exporter, FILE_DELAY_MS))
        if settings.exports:
            self._processors.append(_batched(_Counted(_collector()), EXPORT_DELAY_MS))
        self._resource = lru_cache(_MAX_RUNS)(self._make_resource)

    def record(self, span: Span) -> None:
        """Queue a span; the oldest queued one makes room if there is none."""
        RECORDED.inc()
        made = self._readable(span)
        for processor in self._processors:
            processor.on_end(made)

    def close(self) -> None:
        """Write and export what is queued, within some seconds."""
        for processor in self._processors:
            processor.shutdown()  # type: ignore[no-untyped-call]

    def _make_resource(self, run_id: str) -> Resource:
        # `create` adds OTEL_RESOURCE_ATTRIBUTES.
        given = {"service.name": self._service, "service.instance.id": self._instance}
        return Resource.create(given | ({RUN_ATTRIBUTE: run_id} if run_id else {}))

    def _readable(self, span: Span) -> ReadableSpan:
        status = Status(StatusCode.ERROR, _cut(span.error)) if span.error else Status()
        return ReadableSpan(
            name=span.name,
            context=_sdk_context(span.context or new_context(span.parent)),
            parent=None if span.parent is None else _sdk_context(span.parent),
            resource=self._resource(span.run_id or self._run_id),
            attributes=_bounded(span.attributes),
            events=[
                Event(each.name, _bounded(each.attributes), _nanos(each.at_s)) for each in span.events[:MAX_EVENTS]
            ],
            links=[Link(_sdk_context(each)) for each in span.links[:MAX_LINKS]],
            status=status,
            start_time=_nanos(span.start_s),
            end_time=_nanos(max(span.start_s, span.end_s)),
        )


class _FileExporter(SpanExporter):
    """Writes to the run's folder."""

    def __init__(self, file: TraceFile) -> None:
        self._file = file
        self._is_refused = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """One line; a refused one is counted, and the first of several logged."""
        try:
            self._file.write(spans)
        except OSError as error:
            LOST.labels("file").inc(len(spans))
            if not self._is_refused:
                _log.warning("spans cannot be written; the run goes on without them", error=str(error))
            self._is_refused = True
            return SpanExportResult.FAILURE
        self._is_refused = False
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Close the file."""
        self._file.close()


class _Counted(SpanExporter):
    """Counts what the collector does not take."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export them, within the exporter's own time limit."""
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            LOST.labels("collector").inc(len(spans))
        return result

    def shutdown(self) -> None:
        """Close the connection."""
        self._exporter.shutdown()


class _Processor(BatchSpanProcessor):
    """Counts what its full queue drops."""

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a span."""
        # The SDK only logs it, once.
        queue = self._batch_processor._queue
        if len(queue) == queue.maxlen:
            LOST.labels("queue").inc()
        super().on_end(span)


def _batched(exporter: SpanExporter, delay_ms: float) -> BatchSpanProcessor:
    return _Processor(
        exporter,
        max_queue_size=MAX_QUEUED_SPANS,
        schedule_delay_millis=delay_ms,
        max_export_batch_size=MAX_SPANS_PER_LINE,
    )


def _collector() -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(timeout=EXPORT_TIMEOUT_S)


def _sdk_context(context: TraceContext) -> SpanContext:
    # What is recorded was chosen to be, by whatever rule.
    return SpanContext(context.trace_id, context.span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _bounded(attributes: Attributes) -> Attributes:
    return {key: _cut(value) if isinstance(value, str) else value for key, value in attributes.items()}


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT_CHARACTERS else text[:MAX_TEXT_CHARACTERS]


def _nanos(at_s: float) -> int:
    return int(at_s * 1e9)
