"""A collector of traces for tests: OTLP's official messages over gRPC or HTTP, by TLS or without; it may misbehave."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
        self.note_call({name: str(value) for name, value in context.invocation_metadata()})
        response = self.behave(request, context)
        self.note(request)
        return response

    def note(self, request: Request) -> None:
        """Keep what was answered without an error."""
        with self._lock:
            self.requests.append(request)

    def note_call(self, metadata: dict[str, str]) -> None:
        """Keep what a call was sent along with."""
        with self._lock:
            self.metadata.append(metadata)

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


Answer = tuple[int, bytes | Iterable[bytes]]
"""Status and body."""


def take_all(request: Request) -> Answer:
    """What a collector answers over HTTP that has taken all."""
    return 200, Response().SerializeToString()


@contextmanager
def collecting_by_http(
    behave: Callable[[Request], Answer] = take_all, *, certificate: Path | None = None
) -> Iterator[Collector]:
    """The same over HTTP, at /v1/traces."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert (self.path, self.headers["Content-Type"]) == ("/v1/traces", "application/x-protobuf")
            request = Request.FromString(self.rfile.read(int(self.headers["Content-Length"])))
            collector.note_call({name.lower(): value for name, value in self.headers.items()})
            status, body = behave(request)
            self.send_response(status, "sesame" if status >= 300 else None)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Location", "http://127.0.0.1:1/")
            self.end_headers()
            with suppress(OSError):
                for piece in [body] if isinstance(body, bytes) else body:
                    self.wfile.write(piece)
                    self.wfile.flush()
            if status == HTTPStatus.OK:
                collector.note(request)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
        server.socket = context.wrap_socket(server.socket, server_side=True)
    collector.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
