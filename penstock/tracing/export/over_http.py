"""OTLP over HTTP, with bodies in protobuf."""

from __future__ import annotations

import time
from http import HTTPStatus
from typing import Any

import requests
import urllib3
from google.protobuf.message import DecodeError
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.sdk.trace.export import SpanExportResult

from penstock.tracing.export.said import plain

MAX_ANSWER_BYTES = 64 * 1024
"""Of an answer, of which a few numbers are read; what is longer counts as no answer."""


class HttpSender(OTLPSpanExporter):
    """OpenTelemetry's, which tells neither why it failed nor what was rejected, and logs each time."""

    def __init__(self, *, timeout_s: float) -> None:
        self._calls = _Calls(timeout_s=timeout_s)
        super().__init__(timeout=timeout_s, session=self._calls)

    @property
    def error(self) -> str:
        """See `Sender`."""
        return self._calls.error

    @error.setter
    def error(self, text: str) -> None:
        self._calls.error = text

    @property
    def num_rejected(self) -> int:
        """See `Sender`."""
        return self._calls.num_rejected

    @num_rejected.setter
    def num_rejected(self, number: int) -> None:
        self._calls.num_rejected = number

    def probe(self) -> bool:
        """Export nothing; whether that was taken."""
        return self.export(()) is SpanExportResult.SUCCESS


class _Calls(requests.Session):
    """The exporter's connections, which note what is said."""

    def __init__(self, *, timeout_s: float) -> None:
        super().__init__()
        self.error = ""
        self.num_rejected = 0
        self._timeout_s = timeout_s
        # Otherwise a password in the user's .netrc would take the place of the header that was configured.
        self.auth = lambda request: request
        # Answers are a few bytes, and read as they come.
        self.headers["Accept-Encoding"] = "identity"

    def request(self, *args: Any, **options: Any) -> requests.Response:
        """Make a call, and read its answer within its time and size."""
        until_s = time.monotonic() + self._timeout_s
        try:
            # `verify` is the configured authority: REQUESTS_CA_BUNDLE would otherwise go before the session's own.
            response = super().request(*args, **options | {"stream": True, "verify": self.verify})
            with response:
                self._note(response, _read(response, until_s=until_s))
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
            self.error = plain(f"{type(error).__name__}: {error}")
            raise
        return response

    def _note(self, response: requests.Response, body: bytes) -> None:
        if response.status_code != HTTPStatus.OK:
            self.error = plain(f"HTTP {response.status_code} {response.reason}")
            if response.status_code < HTTPStatus.BAD_REQUEST:
                # OpenTelemetry takes any status below 400 for success, and follows none elsewhere.
                raise requests.RequestException(self.error)
            return
        try:
            answer = trace_service_pb2.ExportTraceServiceResponse.FromString(body)
        except DecodeError as error:
            raise requests.RequestException("the answer is no ExportTraceServiceResponse") from error
        if rejected := answer.partial_success.rejected_spans:
            self.num_rejected += rejected
            self.error = plain(answer.partial_success.error_message)


def _read(response: requests.Response, *, until_s: float) -> bytes:
    body = b""
    # `iter_content` would wait for whole pieces, and each byte restarts the clock of its socket.
    while piece := response.raw.read1(4096):
        body += piece
        if len(body) > MAX_ANSWER_BYTES:
            raise requests.RequestException(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
        if time.monotonic() > until_s:
            raise requests.Timeout("the answer came too slowly")
    return body
