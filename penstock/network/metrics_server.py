"""Serves a process's Prometheus metrics over HTTP, from threads: readable also while the event loop is busy."""

from __future__ import annotations

import socket
import sys
import threading
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from typing import Any, ClassVar, Final

from prometheus_client import MetricsHandler

from penstock.config import ConfigError
from penstock.errors import BadTokenError, ForbiddenError
from penstock.process.logger import get_logger
from penstock.security import Security, tls
from penstock.security.bearer_tokens import Tokens
from penstock.security.http_caller import asks_for_certificates, caller_of_http
from penstock.security.roles import Role

ROLES: Final = frozenset((int(Role.ACCESS_ROLE_OBSERVER),))
"""Roles that may read the metrics, besides the operator."""
REQUEST_TIMEOUT_S = 30.0

_log = get_logger()


def serve_metrics(address: str | None, security: Security) -> None:
    """Serve this process's Prometheus metrics at http(s)://host:port/metrics; nothing when `address` is None.

    Raises:
        ConfigError: It cannot be listened on, or must not be without TLS.
    """
    if address is None:
        return
    security.admit_listener(address, setting="metrics_listen")
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        server = _MetricsServer(found[0], security)
    except OSError as error:
        raise ConfigError(f"metrics_listen: cannot listen on {address}: {error}") from error
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()


class _MetricsServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, at: tuple[Any, ...], security: Security) -> None:
        self.address_family, self.tokens = at[0], security.tokens
        self.revocations = security.revocations
        self.asks = asks_for_certificates(security)
        self._tls = tls.server_context(security.tls_files, requires_certificates=False)
        super().__init__(at[4][:2], _MetricsHandler)

    def get_request(self) -> tuple[Any, Any]:
        """A connection; its TLS handshake runs in its own thread, so that a slow client delays no other."""
        connection, client = super().get_request()
        if self._tls is not None:
            connection = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, client

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Note a connection that broke; the standard library would print a traceback."""
        del request
        _log.info(
            "a client of the metrics broke its connection off", client=client_address, error=repr(sys.exc_info()[1])
        )


class _MetricsHandler(MetricsHandler):
    timeout: ClassVar[float] = REQUEST_TIMEOUT_S
    server: _MetricsServer

    def do_GET(self) -> None:
        """Answer callers that may observe."""
        tokens: Tokens = self.server.tokens
        try:
            caller_of_http(
                tokens,
                self.server.revocations.check,
                authorization=self.headers.get("Authorization", ""),
                connection=self.connection if hasattr(self.connection, "getpeercert") else None,
                asks=self.server.asks,
            ).restricted_to(ROLES, what="GET /metrics")
        except BadTokenError as error:
            self._refuse(HTTPStatus.UNAUTHORIZED, error)
        except ForbiddenError as error:
            self._refuse(HTTPStatus.FORBIDDEN, error)
        else:
            super().do_GET()

    def _refuse(self, status: HTTPStatus, error: Exception) -> None:
        text = f"{error}\n".encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
