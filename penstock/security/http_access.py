"""The check that every HTTP request passes: the caller, whether the route is open to its role, and the run in the path.

A route names its roles where it is added; routes that name none, and unknown paths, are open to the operator only.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Middleware

from penstock.errors import BadTokenError, ForbiddenError
from penstock.security.credentials import Security
from penstock.security.http_caller import asks_for_certificates, caller_of_http
from penstock.security.revocations import OpenCallers
from penstock.security.roles import ANY, Role

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ANYBODY: Final = frozenset((int(Role.ACCESS_ROLE_UNSPECIFIED),))
"""Roles of a route that needs no credential."""


class HttpAccess:
    """The roles allowed on each route of one server.

    Args:
        security: Of this process: tokens that are accepted, and whether clients are asked for certificates.
        site: The server's site, which its callers must share; empty: any.
        always_asks: A credential is required even if neither a token nor TLS is set.
    """

    def __init__(self, security: Security, *, site: str = "", always_asks: bool = False) -> None:
        self._tokens, self._open = security.tokens, OpenCallers(security.revocations)
        self._asks = always_asks or asks_for_certificates(security)
        self._site = site
        self.routes: dict[tuple[str, web.AbstractResource], frozenset[int]] = {}
        """Roles allowed on each route, besides the operator."""

    def add(self, app: web.Application, method: str, path: str, handler: Handler, *, roles: Iterable[int]) -> str:
        """Add a route that is open to these roles, for GET and HEAD; returns its name."""
        resource = app.router.add_resource(path)
        for each in (method, "HEAD") if method == "GET" else (method,):
            resource.add_route(each, handler)
            self.routes[each, resource] = frozenset(roles)
        return f"{method} {resource.canonical}"

    def admit(self, request: web.Request) -> None:
        """Raise BadTokenError or ForbiddenError if a request may not pass."""
        resource = request.match_info.route.resource
        roles = frozenset() if resource is None else self.routes.get((request.method, resource), frozenset())
        if roles == ANYBODY:
            return
        caller = caller_of_http(
            self._tokens,
            partial(self._open.connection, request.transport),
            authorization=request.headers.get("Authorization", ""),
            connection=request.get_extra_info("ssl_object"),
            asks=self._asks,
        ).restricted_to(roles, what=route_of(request))
        if run_id := request.match_info.get("run_id"):
            caller.check_run(run_id)
        if self._site and not any(grant.site in (ANY, self._site) for grant in caller.grants):
            raise caller.refusal("site", self._site)

    @property
    def middleware(self) -> Middleware:
        """Refuses with one line: 401 without an accepted credential, 403 with one for other routes."""

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


def route_of(request: web.Request) -> str:
    """The name of a request's route, or its path if it matches none."""
    resource = request.match_info.route.resource
    return f"{request.method} {resource.canonical if resource is not None else request.path:.200}"
