"""Decides who may read the page: the holder of its link, or of a credential of the cluster with the role observer.

    GET /?token=T      sets a cookie for this server and goes on to /
    cookie             of that link
    Authorization      Bearer with the link's token, or with a token of the role observer
    certificate        of the role observer

A browser takes part by its cookie alone, which pages of other origins can neither read nor send. The link's token is an
observer's, which this server alone accepts; the check itself is that of every route, `penstock.security.http_access`.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import replace

from aiohttp import web

from penstock.security import Security
from penstock.security.http_access import HttpAccess
from penstock.security.roles import Role

TOKEN = "token"
HOW = "open the link that was printed with this page's address; it holds the token"
ROLES = (Role.ACCESS_ROLE_OBSERVER,)
_AUTHORIZATION = "Authorization"


class PageAccess:
    """The credentials of one page.

    Args:
        security: Of this process.
    """

    def __init__(self, security: Security) -> None:
        self._token = secrets.token_urlsafe(24)
        # Browsers send cookies to every port of a host: each page has a name of its own.
        self._cookie = f"penstock_{secrets.token_hex(4)}"
        self._is_secure = security.serves_tls
        self._observer = f"observer:{self._token}"
        accepted = (*security.accepted_tokens, self._observer)
        self.routes = HttpAccess(replace(security, accepted_tokens=accepted), always_asks=True)

    def link(self, address: str) -> str:
        """The address with the token in it."""
        return f"{address}/?{TOKEN}={self._token}"

    def identified(self, request: web.Request) -> web.Request:
        """The request as an observer's if it shows the link's token, else as it is."""
        shown = request.cookies.get(self._cookie) or request.headers.get(_AUTHORIZATION, "").removeprefix("Bearer ")
        if not self._is_token(shown):
            return request
        headers = request.headers.copy()
        headers[_AUTHORIZATION] = f"Bearer {self._observer}"
        return request.clone(headers=headers)

    def redeem(self, request: web.Request) -> web.StreamResponse | None:
        """What `/?token=T` is answered: a cookie in exchange for the token; None where no token is shown.

        Raises HTTPUnauthorized.
        """
        shown = request.query.get(TOKEN) if request.path == "/" else None
        if shown is None:
            return None
        if not self._is_token(shown):
            raise web.HTTPUnauthorized
        response = web.Response(status=303, headers={"Location": "/"})
        response.set_cookie(
            self._cookie, self._token, httponly=True, samesite="Strict", secure=self._is_secure, path="/"
        )
        return response

    def _is_token(self, shown: str) -> bool:
        return hmac.compare_digest(shown.encode(errors="replace"), self._token.encode())
