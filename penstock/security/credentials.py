"""A process's credentials: mutual TLS, and a bearer token.

Secrets come from files and the environment only, never from a configuration file's text. Without either, servers listen
in plain text, which is meant for loopback and for networks of their own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from penstock.secret import read_secret
from penstock.security import tls
from penstock.security.access import AccessInterceptor
from penstock.security.files import TlsFiles
from penstock.security.tokens import Tokens, check_header, check_token, read_accepted_tokens, token_interceptors

CLUSTER = "PENSTOCK"
"""What the variables of the cluster's own credentials begin with."""
JUDGES = "PENSTOCK_JUDGE"
"""What those begin with that are shown to third parties' reward models."""


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
    """Bearer token that this process shows with every call, and accepts."""
    accepted_tokens: tuple[str, ...] = ()
    """Further ones that its servers accept."""
    allows_plain: bool = False
    """Whether the token may be shown without TLS."""
    prefix: str = field(default=CLUSTER, compare=False)
    """What the variables that these come from begin with; for messages."""

    @classmethod
    def from_environment(cls, prefix: str = CLUSTER) -> Security:
        """What PENSTOCK_TOKEN(_FILE), PENSTOCK_ACCEPTED_TOKENS_FILE and PENSTOCK_TLS_CA, _CERT and _KEY say.

        With another prefix those of that name: never any of the cluster's, and no accepted tokens. What is unset is
        off. Raises ConfigError.
        """

        def file(name: str) -> Path | None:
            value = os.environ.get(f"{prefix}_TLS_{name}")
            return Path(value) if value else None

        token = read_secret(f"{prefix}_TOKEN")
        if token is not None:
            # A third party's token may look like anything.
            check = check_token if prefix == CLUSTER else check_header
            check(token, where=f"{prefix}_TOKEN")
        return cls(
            ca_file=file("CA"),
            cert_file=file("CERT"),
            key_file=file("KEY"),
            token=token,
            accepted_tokens=read_accepted_tokens() if prefix == CLUSTER else (),
            prefix=prefix,
        )

    @property
    def serves_tls(self) -> bool:
        """Whether servers of this process speak TLS."""
        return self.cert_file is not None and self.key_file is not None

    def may_fetch_from(self, url: str) -> bool:
        """Whether a request to that address keeps the credentials, where there are any, from others."""
        has_credentials = self.token is not None or self.ca_file is not None
        return self.allows_plain or not has_credentials or url.startswith("https://")

    @property
    def tokens(self) -> Tokens:
        """Those that servers of this process accept."""
        return Tokens([*([] if self.token is None else [self.token]), *self.accepted_tokens])

    def server_interceptors(self) -> Sequence[grpc.aio.ServerInterceptor]:
        """The check that every call passes."""
        return (AccessInterceptor(self.tokens),)

    @property
    def tls_files(self) -> TlsFiles:
        """Where its certificates lie."""
        return TlsFiles(self.ca_file, self.cert_file, self.key_file, self.prefix)

    def add_port(self, server: grpc.aio.Server, listen: str) -> int:
        """Bind `listen`, with TLS when there is a certificate; returns the port. Raises ConfigError."""
        return tls.add_port(server, listen, self.tls_files)

    def open_channel(self, target: str, options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel:
        """A channel with these credentials. Raises ConfigError."""
        interceptors = [] if self.token is None else list(token_interceptors(self.token))
        if self.ca_file is None:
            return grpc.aio.insecure_channel(target, options=options, interceptors=interceptors)
        return tls.RenewedChannel(
            self.tls_files,
            lambda credentials: grpc.aio.secure_channel(
                target, credentials, options=options, interceptors=interceptors
            ),
        )


NO_SECURITY = Security()
