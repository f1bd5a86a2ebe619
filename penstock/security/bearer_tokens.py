"""Bearer tokens: what they open, and how they are shown and compared.

A token is SECRET (an operator's), ROLE:SECRET or ROLE@RUN:SECRET, several roles joined by "+".
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterable, Sequence
from typing import Any

import grpc

from penstock.config import ConfigError
from penstock.secret import read_bounded
from penstock.security.roles import ANY, OPERATOR, BadRoleError, Caller, Grant, parse_role

ACCEPTED_VARIABLE = "PENSTOCK_ACCEPTED_TOKENS_FILE"
MIN_ROLE_SECRET_CHARS = 16


def caller_of_token(token: str) -> Caller:
    """What a token opens.

    Raises:
        BadRoleError: There is a head, but it names no role, or the secret is short: such a token is never taken for an
            operator's. The message does not contain the secret.
    """
    head, colon, secret = token.partition(":")
    if not colon:
        return OPERATOR
    roles, _, run_id = head.partition("@")
    grants = [Grant(parse_role(role), run_id or ANY) for role in roles.split("+")]
    if len(secret) < MIN_ROLE_SECRET_CHARS:
        raise BadRoleError(f"the secret after {head + ':'!r} has fewer than {MIN_ROLE_SECRET_CHARS} characters")
    return Caller(grants=grants)


def read_accepted_tokens() -> tuple[str, ...]:
    """Tokens that servers of this process accept besides its own, one per line; "#" begins a comment.

    Raises ConfigError.
    """
    path = os.environ.get(ACCEPTED_VARIABLE)
    if not path:
        return ()
    lines = map(str.strip, read_bounded(path, where=ACCEPTED_VARIABLE).splitlines())
    tokens = tuple(line for line in lines if line and not line.startswith("#"))
    for number, token in enumerate(tokens, start=1):
        check_token(token, where=f"{ACCEPTED_VARIABLE}: token {number} of {path}")
    return tokens


def check_token(token: str, *, where: str) -> None:
    """Raise ConfigError, which does not contain the token, if it names no role."""
    try:
        caller_of_token(token)
    except BadRoleError as error:
        raise ConfigError(f"{where}: {error}; a token is SECRET, or ROLE:SECRET") from None
    check_header(token, where=where)


def check_header(token: str, *, where: str) -> None:
    """Raise ConfigError, which does not contain the token, if it cannot be sent in a header."""
    if not token.isascii() or not token.isprintable():
        raise ConfigError(f"{where}: has characters that a header cannot carry; use letters and digits")


class Tokens:
    """The tokens that a server accepts."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self._callers = [(f"Bearer {token}".encode(), caller_of_token(token)) for token in tokens]

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._callers)

    def caller(self, authorization: str) -> Caller | None:
        """The caller with this `authorization` header; takes the same time for every token."""
        given = authorization.encode("utf-8", "replace")
        found = [caller for expected, caller in self._callers if hmac.compare_digest(given, expected)]
        return found[0] if found else None


def token_interceptors(token: str) -> Sequence[Any]:
    """Client interceptors that show the token with every call."""
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
