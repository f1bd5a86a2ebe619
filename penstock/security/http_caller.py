"""Identifies the caller of an HTTP request by its connection's certificate or its bearer token."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from typing import Any

from penstock.security.access import identify
from penstock.security.bearer_tokens import Tokens
from penstock.security.credentials import Security
from penstock.security.roles import Caller, caller_of_certificate


def asks_for_certificates(security: Security) -> bool:
    """Whether servers of this process ask their clients for a certificate."""
    return security.ca_file is not None and security.cert_file is not None


def caller_of_http(
    tokens: Tokens,
    admit: Callable[[int], None],
    *,
    authorization: str,
    connection: ssl.SSLObject | ssl.SSLSocket | None,
    asks: bool,
) -> Caller:
    """The caller of a request. Raises BadTokenError.

    Args:
        tokens: Those that are accepted.
        admit: Takes the serial number of the caller's certificate, and raises BadTokenError if it was revoked.
        authorization: The header.
        connection: The TLS connection, if it is one.
        asks: Refuse callers that show neither a token nor a certificate.
    """
    certificate = (connection.getpeercert() if connection is not None else None) or {}
    if "serialNumber" in certificate:
        admit(int(str(certificate["serialNumber"]), 16))
    return identify(tokens, authorization, _caller_of(certificate), shows_what_is_asked=bool(certificate) or not asks)


def _caller_of(certificate: Mapping[str, Any]) -> Caller | None:
    names = [name for kind, name in certificate.get("subjectAltName", ()) if kind == "URI"]
    common = "".join(value for part in certificate.get("subject", ()) for kind, value in part if kind == "commonName")
    return caller_of_certificate(names, common)
