"""Exports spans to a collector by OTLP, over gRPC or HTTP, where and how OpenTelemetry's variables say.

Promises: whatever the collector does (it is away, slow, refuses, answers nonsense, shows a wrong certificate) is
counted in `penstock_trace_spans_lost_total{at="collector"}`, and logged once until it takes spans again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from penstock.process.logger import get_logger
from penstock.tracing.counters import LOST
from penstock.tracing.settings import GRPC, protocol_of

EXPORT_TIMEOUT_S = 5.0
"""Of one batch, attempts to reach the collector again included."""

_log = get_logger()


class Sender(Protocol):
    """What sends batches by one of the protocols."""

    error: str
    """What the last call that failed said, or the last answer that rejected spans."""
    num_rejected: int
    """Spans that were refused although their batch was taken, as the collector counts them."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch."""

    def probe(self) -> bool:
        """Send none; whether that was taken."""

    def shutdown(self) -> None:
        """Close the connection."""


class CollectorExporter(SpanExporter):
    """Exports batches, one after the other."""

    def __init__(self) -> None:
        self._sender = _make_sender()
        self._is_refused = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export them, within `EXPORT_TIMEOUT_S`."""
        sender = self._sender
        sender.num_rejected = 0
        try:
            is_taken = sender.export(spans) is SpanExportResult.SUCCESS
        except Exception as error:  # what a library raises must not end the thread that exports
            is_taken, sender.error = False, f"{type(error).__name__}: {error}"
        # A number of theirs, so not beyond what was sent.
        num_lost = min(max(0, sender.num_rejected), len(spans)) if is_taken else len(spans)
        LOST.labels("collector").inc(num_lost)
        if num_lost and not self._is_refused:
            _log.warning("the collector does not take spans; the run goes on without them", error=sender.error)
        elif self._is_refused and not num_lost:
            _log.info("the collector takes spans again")
        self._is_refused = bool(num_lost)
        return SpanExportResult.FAILURE if num_lost else SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Close the connection."""
        self._sender.shutdown()


def probe() -> str:
    """Why the collector takes no spans, in words; empty if it does. Sends none; takes some seconds at most."""
    sender = _make_sender()
    try:
        return "" if sender.probe() else f"takes no spans: {sender.error}"
    finally:
        sender.shutdown()


def _make_sender() -> Sender:
    # Each imports what the other does not need.
    if protocol_of() == GRPC:
        from penstock.tracing.export.over_grpc import GrpcSender

        return GrpcSender(timeout_s=EXPORT_TIMEOUT_S)
    from penstock.tracing.export.over_http import HttpSender

    return HttpSender(timeout_s=EXPORT_TIMEOUT_S)
