"""Exports spans to a collector by OTLP over gRPC, where and how OpenTelemetry's variables say.

Promises: whatever the collector does (it is away, slow, refuses, answers nonsense, shows a wrong certificate) is
counted in `penstock_trace_spans_lost_total{at="collector"}`, and logged once until it takes spans again.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import grpc
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from penstock.process.logger import get_logger
from penstock.tracing.counters import LOST

EXPORT_TIMEOUT_S = 5.0
"""Of one batch, attempts to reach the collector again included."""
PROBE_TIMEOUT_S = 5.0
_MAX_SAID_CHARACTERS = 200

_log = get_logger()


class CollectorExporter(SpanExporter):
    """Exports batches, one after the other."""

    def __init__(self) -> None:
        self._exporter = _Exporter()
        self._is_refused = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export them, within `EXPORT_TIMEOUT_S`."""
        self._exporter.num_rejected = 0
        try:
            is_taken = self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception as error:  # what a library raises must not end the thread that exports
            is_taken, self._exporter.error = False, f"{type(error).__name__}: {error}"
        num_lost = self._exporter.num_rejected if is_taken else len(spans)
        LOST.labels("collector").inc(num_lost)
        if num_lost and not self._is_refused:
            _log.warning("the collector does not take spans; the run goes on without them", error=self._exporter.error)
        elif self._is_refused and not num_lost:
            _log.info("the collector takes spans again")
        self._is_refused = bool(num_lost)
        return SpanExportResult.FAILURE if num_lost else SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Close the connection."""
        self._exporter.shutdown()


def probe() -> str:
    """Why the collector takes no spans, in words; empty if it does. Sends none; takes some seconds at most."""
    exporter = _Exporter()
    try:
        exporter.probe()
    except grpc.RpcError:
        return f"takes no spans: {exporter.error}"
    finally:
        exporter.shutdown()
    return ""


class _Exporter(OTLPSpanExporter):
    """OpenTelemetry's, which tells neither why it failed nor what was rejected, and logs each time."""

    _client: Any

    def __init__(self) -> None:
        self.error = ""
        """What the last call that failed said."""
        self.num_rejected = 0
        """Spans that were refused although their batch was taken."""
        super().__init__(timeout=EXPORT_TIMEOUT_S)

    def probe(self) -> None:
        """Export nothing. Raises grpc.RpcError."""
        request = trace_service_pb2.ExportTraceServiceRequest()
        self._client.Export(request=request, metadata=self._headers, timeout=PROBE_TIMEOUT_S)

    def _initialize_channel_and_stub(self) -> None:
        super()._initialize_channel_and_stub()  # type: ignore[no-untyped-call]
        export = self._client.Export

        def noted(request: Any, metadata: Any, timeout: float) -> Any:
            try:
                response = export(request, metadata=metadata, timeout=timeout)
            except grpc.RpcError as error:
                self.error = _said(error)
                raise
            if rejected := response.partial_success.rejected_spans:
                # A number of theirs, so not beyond what was sent.
                num_sent = sum(len(part.spans) for each in request.resource_spans for part in each.scope_spans)
                self.num_rejected += min(max(0, rejected), num_sent)
                self.error = _plain(response.partial_success.error_message)
            return response

        self._client = SimpleNamespace(Export=noted)


def _said(error: Any) -> str:
    return _plain(f"{error.code().name}: {error.details() or 'no reason given'}")


def _plain(text: str) -> str:
    """What a stranger says, in one short line without what would move a terminal's cursor."""
    return "".join(each if each.isprintable() else " " for each in text[:_MAX_SAID_CHARACTERS])
