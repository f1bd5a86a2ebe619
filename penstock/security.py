"""Who may talk to whom: optional TLS (mutual when a client certificate is given) and an optional bearer token.

Secrets come from files and the environment only, never from a configuration file's text. Without either, servers listen
in plain text, which is meant for loopback and for networks of their own; `is_plain` lets a server warn otherwise.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_status import rpc_status

from penstock.errors import BadTokenError, to_status
from penstock.secret import read_secret

TOKEN_VARIABLE = "PENSTOCK_TOKEN"
_OPEN_METHODS = ("/grpc.health.v1.Health/",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """Credentials of this process."""

    ca_file: Path | None = None
    """Authorities trusted, PEM; turns TLS on for clients and, for servers, asks clients for a certificate."""
    cert_file: Path | None = None
    """This process's certificate, PEM; turns TLS on for servers."""
    key_file: Path | None = None
    """Its private key, PEM."""
    token: str | None = None
    """Bearer token that every call must carry."""

    @classmethod
    def from_environment(cls) -> Security:
        """PENSTOCK_TOKEN or PENSTOCK_TOKEN_FILE, PENSTOCK_TLS_CA, PENSTOCK_TLS_CERT and PENSTOCK_TLS_KEY.

        What is unset is off. Raises ConfigError.
        """

        def file(name: str) -> Path | None:
            value = os.environ.get(name)
            return Path(value) if value else None

        return cls(
            ca_file=file("PENSTOCK_TLS_CA"),
            cert_file=file("PENSTOCK_TLS_CERT"),
            key_file=file("PENSTOCK_TLS_KEY"),
            token=read_secret(TOKEN_VARIABLE),
        )

    @property
    def is_plain(self) -> bool:
        """Whether neither TLS nor a token protects this process."""
        return self.cert_file is None and self.token is None

    def server_interceptors(self) -> Sequence[grpc.aio.ServerInterceptor]:
        """The token check, when there is a token."""
        return () if self.token is None else (_TokenCheck(self.token),)

    def add_port(self, server: grpc.aio.Server, listen: str) -> int:
        """Bind `listen`, with TLS when there is a certificate; returns the port."""
        if self.cert_file is None or self.key_file is None:
            return server.add_insecure_port(listen)
        pair = (self.key_file.read_bytes(), self.cert_file.read_bytes())
        authorities = self.ca_file.read_bytes() if self.ca_file else None
        credentials = grpc.ssl_server_credentials([pair], authorities, require_client_auth=authorities is not None)
        return server.add_secure_port(listen, credentials)

    def open_channel(self, target: str, options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel:
        """A channel with these credentials."""
        interceptors = [] if self.token is None else _token_interceptors(self.token)
        if self.ca_file is None:
            return grpc.aio.insecure_channel(target, options=options, interceptors=interceptors)
        credentials = grpc.ssl_channel_credentials(
            self.ca_file.read_bytes(),
            self.key_file.read_bytes() if self.key_file else None,
            self.cert_file.read_bytes() if self.cert_file else None,
        )
        return grpc.aio.secure_channel(target, credentials, options=options, interceptors=interceptors)


NO_SECURITY = Security()


class _TokenCheck(grpc.aio.ServerInterceptor):
    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}"

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        given = dict(handler_call_details.invocation_metadata or ()).get("authorization", "")
        if handler is None or handler_call_details.method.startswith(_OPEN_METHODS):
            return handler
        if hmac.compare_digest(str(given).encode(), self._expected.encode()):
            return handler
        return _refusing(handler)


def _refusing(handler: Any) -> Any:
    status = rpc_status.to_status(to_status(BadTokenError(f"missing or wrong bearer token; set {TOKEN_VARIABLE}")))

    async def refuse_unary(_request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort_with_status(status)

    async def refuse_stream(_request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        await context.abort_with_status(status)
        yield

    streams_in, streams_out = handler.request_streaming, handler.response_streaming
    name = f"{'stream' if streams_in else 'unary'}_{'stream' if streams_out else 'unary'}_rpc_method_handler"
    return getattr(grpc, name)(
        refuse_stream if streams_out else refuse_unary,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


def _token_interceptors(token: str) -> list[Any]:
    kinds = (
        (grpc.aio.UnaryUnaryClientInterceptor, "intercept_unary_unary"),
        (grpc.aio.UnaryStreamClientInterceptor, "intercept_unary_stream"),
        (grpc.aio.StreamUnaryClientInterceptor, "intercept_stream_unary"),
        (grpc.aio.StreamStreamClientInterceptor, "intercept_stream_stream"),
    )

    async def add_token(_self: Any, continuation: Any, details: Any, request: Any) -> Any:
        metadata = grpc.aio.Metadata(*(details.metadata or ()), ("authorization", f"Bearer {token}"))
        return await continuation(details._replace(metadata=metadata), request)

    return [type(f"Token_{method}", (kind,), {method: add_token})() for kind, method in kinds]
