"""OTLP over gRPC."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import grpc
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from penstock.tracing.export.said import plain


class GrpcSender(OTLPSpanExporter):
    """OpenTelemetry's, which tells neither why it failed nor what was rejected, and logs each time."""

    _client: Any

    def __init__(self, *, timeout_s: float) -> None:
        self.error = ""
        self.num_rejected = 0
        self._timeout_s = timeout_s
        super().__init__(timeout=timeout_s)

    def probe(self) -> bool:
        """Export nothing; whether that was taken."""
        request = trace_service_pb2.ExportTraceServiceRequest()
        try:
            self._client.Export(request=request, metadata=self._headers, timeout=self._timeout_s)
        except grpc.RpcError:
            return False
        return True

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
                self.num_rejected += rejected
                self.error = plain(response.partial_success.error_message)
            return response

        self._client = SimpleNamespace(Export=noted)


def _said(error: Any) -> str:
    return plain(f"{error.code().name}: {error.details() or 'no reason given'}")
