"""Makes spans of OpenTelemetry's SDK, and queues them for the file and for the collector."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import Link, SpanContext, Status, StatusCode, TraceFlags

from penstock.process.logger import get_logger
from penstock.tracing.context import TraceContext
from penstock.tracing.counters import LOST, RECORDED
from penstock.tracing.recording import Attributes, Span, new_context
from penstock.tracing.settings import RUN_ATTRIBUTE, TraceSettings
from penstock.tracing.span_queue import SpanQueue
from penstock.tracing.trace_file import TraceFile

MAX_TEXT_CHARACTERS = 256
MAX_EVENTS, MAX_LINKS = 256, 1024
"""Of one span; the first ones are kept."""
FILE_DELAY_MS, EXPORT_DELAY_MS = 1_000.0, 5_000.0
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
        # It logs each batch that is not taken, and each span that finds the queue full; both are counted here.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._service = service
        self._run_id = run_id
        self._instance = instance
        self._queues: list[SpanQueue] = []
        if settings.folder is not None:
            self._queues.append(SpanQueue(_FileExporter(TraceFile(settings.folder)), "file", FILE_DELAY_MS))
        if settings.exports:
            # Half a second of imports that a process without a collector does not spend.
            from penstock.tracing.export.collector import CollectorExporter

            self._queues.append(SpanQueue(CollectorExporter(), "collector", EXPORT_DELAY_MS))
        self._resource = lru_cache(_MAX_RUNS)(self._make_resource)

    def record(self, span: Span) -> None:
        """Queue a span; one that finds a full queue is left out."""
        RECORDED.inc()
        made = self._readable(span)
        for queue in self._queues:
            queue.on_end(made)

    def close(self) -> None:
        """Write and export what is queued, within some seconds."""
        for queue in self._queues:
            queue.close()

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


def _sdk_context(context: TraceContext) -> SpanContext:
    # What is recorded was chosen to be, by whatever rule.
    return SpanContext(context.trace_id, context.span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _bounded(attributes: Attributes) -> Attributes:
    return {key: _cut(value) if isinstance(value, str) else value for key, value in attributes.items()}


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT_CHARACTERS else text[:MAX_TEXT_CHARACTERS]


def _nanos(at_s: float) -> int:
    return int(at_s * 1e9)
