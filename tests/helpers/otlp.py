"""A collector of traces for tests: the official TraceService over gRPC, with TLS or without, that may misbehave."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

Request = trace_service_pb2.ExportTraceServiceRequest
Response = trace_service_pb2.ExportTraceServiceResponse
Behave = Callable[[Request, grpc.ServicerContext], Response]


def take(request: Request, context: grpc.ServicerContext) -> Response:
    """What a collector answers that has taken all."""
    return Response()


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it gets."""

    def __init__(self, behave: Behave = take) -> None:
        self.behave = behave
        self.port = 0
        self.metadata: list[dict[str, str]] = []
        """Of each call."""
        self.requests: list[Request] = []
        """Those that were answered without an error."""
        self._lock = threading.Lock()

    @property
    def target(self) -> str:
        """host:port."""
        return f"127.0.0.1:{self.port}"

    def Export(self, request: Request, context: grpc.ServicerContext) -> Response:
        with self._lock:
            self.metadata.append({name: str(value) for name, value in context.invocation_metadata()})
        response = self.behave(request, context)
        with self._lock:
            self.requests.append(request)
        return response

    def spans(self) -> dict[str, dict[str, Any]]:
        """What it took, by the span's id: see `described`."""
        return {
            span.span_id.hex(): described(span, resource.resource)
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        }


def described(span: Any, resource: Any) -> dict[str, Any]:
    """A span of OTLP with its resource, in plain values."""
    return {
        "resource": _values(resource.attributes),
        "trace": span.trace_id.hex(),
        "parent": span.parent_span_id.hex(),
        "name": span.name,
        "times": (span.start_time_unix_nano, span.end_time_unix_nano),
        "attributes": _values(span.attributes),
        "events": [(each.name, each.time_unix_nano, _values(each.attributes)) for each in span.events],
        "links": [(each.trace_id.hex(), each.span_id.hex()) for each in span.links],
        "error": span.status.message if span.status.code == 2 else None,
    }


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


@contextmanager
def collecting(behave: Behave = take, *, certificate: Path | None = None) -> Iterator[Collector]:
    """A collector that serves; with the `certificate` in that folder, by TLS."""
    collector, server = Collector(behave), grpc.server(ThreadPoolExecutor(8))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    if certificate is None:
        collector.port = server.add_insecure_port("127.0.0.1:0")
    else:
        pair = ((certificate / "key.pem").read_bytes(), (certificate / "cert.pem").read_bytes())
        collector.port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    server.start()
    try:
        yield collector
    finally:
        server.stop(0).wait()
