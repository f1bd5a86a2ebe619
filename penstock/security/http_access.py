"""The check that every HTTP request passes: who asks, whether the route is open to that role, and the run in its path.

A route names its roles where it is added; one that names none, and what is no route, is the operator's alone.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final

from aiohttp import web
from aiohttp.typedefs import Middleware

from penstock.errors import BadTokenError, ForbiddenError
from penstock.security.access import identify
from penstock.security.credentials import Security
from penstock.security.roles import ANY, Caller, Role, caller_of_certificate
from penstock.security.tokens import Tokens

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ANYBODY: Final = frozenset((int(Role.ACCESS_ROLE_UNSPECIFIED),))
"""Roles of a route that asks for no credential."""


class HttpAccess:
    """Who may use which route of one server.

    Args:
        security: Of this process: tokens that are accepted, and whether clients are asked for certificates.
        site: Where this server stands, and its callers have to; empty: anywhere.
        always_asks: Nobody gets in without a credential, even where neither a token nor TLS is set.
    """

    def __init__(self, security: Security, *, site: str = "", always_asks: bool = False) -> None:
        self._tokens = security.tokens
        self._asks = always_asks or asks_for_certificates(security)
        self._site = site
        self.routes: dict[tuple[str, web.AbstractResource], frozenset[int]] = {}
        """Roles of every route, besides the operator."""

    def add(self, app: web.Application, method: str, path: str, handler: Handler, *, roles: Iterable[int]) -> None:
        """Add a route that is open to these roles; GET is HEAD as well."""
        for each in (method, "HEAD") if method == "GET" else (method,):
            route = app.router.add_route(each, path, handler)
            assert route.resource is not None
            self.routes[each, route.resource] = frozenset(roles)

    def admit(self, request: web.Request) -> None:
        """Raises BadTokenError and ForbiddenError where a request may not pass."""
        resource = request.match_info.route.resource
        roles = frozenset() if resource is None else self.routes.get((request.method, resource), frozenset())
        if roles == ANYBODY:
            return
        caller = caller_of_http(
            self._tokens,
            authorization=request.headers.get("Authorization", ""),
            connection=request.get_extra_info("ssl_object"),
            asks=self._asks,
        ).restricted_to(roles, what=_name_of(request))
        if run_id := request.match_info.get("run_id"):
            caller.check_run(run_id)
        if self._site and not any(grant.site in (ANY, self._site) for grant in caller.grants):
            raise ForbiddenError(f"site: {self._site!r} is not open to {caller}", field="site")

    @property
    def middleware(self) -> Middleware:
        """Refuses with one line: 401 without a credential that is accepted, 403 with one that opens other doors."""

        @web.middleware
        async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
            try:
                self.admit(request)
            except BadTokenError as error:
                raise web.HTTPUnauthorized(text=f"{error}\n") from error
            except ForbiddenError as error:
                raise web.HTTPForbidden(text=f"{error}\n") from error
            return await handler(request)

        return check


def asks_for_certificates(security: Security) -> bool:
    """Whether servers of this process ask their clients for one."""
    return security.ca_file is not None and security.cert_file is not None


def caller_of_http(
    tokens: Tokens, *, authorization: str, connection: ssl.SSLObject | ssl.SSLSocket | None, asks: bool
) -> Caller:
    """Who sends a request. Raises BadTokenError.

    Args:
        tokens: Those that are accepted.
        authorization: The header.
        connection: TLS, if there is.
        asks: Who shows neither a token nor a certificate is refused.
    """
    certificate = (connection.getpeercert() if connection is not None else None) or {}
    return identify(tokens, authorization, _caller_of(certificate), shows_what_is_asked=bool(certificate) or not asks)


def _caller_of(certificate: Mapping[str, Any]) -> Caller | None:
    names = [name for kind, name in certificate.get("subjectAltName", ()) if kind == "URI"]
    common = "".join(value for part in certificate.get("subject", ()) for kind, value in part if kind == "commonName")
    return caller_of_certificate(names, common)


def _name_of(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return f"{request.method} {resource.canonical if resource is not None else request.path:.200}"
