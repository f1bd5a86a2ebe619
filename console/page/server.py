"""Serves the page of some runs over HTTP or HTTPS: the page's files, and answers to its questions as JSON.

Promises: nothing is changed by any request; every request is bounded in size and number, and so are connections;
pages of other origins can neither read answers nor show the page, and nothing that a completion says is executed
(Content-Security-Policy).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import structlog
from aiohttp import web

from console.page.answers import Answers, BusyError
from console.page.files.values import BadQuestionError
from console.page.page_access import HOW, ROLES, PageAccess
from console.page.page_files import INDEX, TYPES, page_file
from console.page.run_data import RunData
from penstock.network.http_server import listen_http
from penstock.security import Security
from penstock.security.http_access import Handler
from penstock.security.tls import server_context

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
MAX_CONNECTIONS = 64
KEEP_ALIVE_S = 20.0
_SHUTDOWN_S = 1.0
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}

_log = structlog.get_logger()


@asynccontextmanager
async def serving_page(
    runs: Sequence[RunData], listen: str, *, security: Security, setting: str, is_live: bool = False
) -> AsyncIterator[str]:
    """Serve until the context ends; yields the page's link, with its token.

    Args:
        runs: Those to show.
        listen: host:port; 0 for a free port.
        security: Of this process.
        setting: Where `listen` comes from, for messages.
        is_live: Whether the runs go on in this process.

    Raises:
        PortUnavailableError: `listen` cannot be listened on.
        ConfigError: It must not be listened on without TLS.
    """
    access = PageAccess(security)
    answers = Answers(runs, is_live=is_live)
    app = web.Application(middlewares=[_guard(access), access.routes.middleware], client_max_size=1)
    for path, handler in _routes(answers):
        access.routes.add(app, "GET", path, handler, roles=ROLES)
    runner = web.AppRunner(
        app, access_log=None, shutdown_timeout=_SHUTDOWN_S, keepalive_timeout=KEEP_ALIVE_S, max_line_size=8190
    )
    security.admit_listener(listen, setting=setting)
    # Browsers may come with the token alone.
    context = server_context(security.tls_files, requires_certificates=False)
    await runner.setup()
    try:
        address = await listen_http(
            runner, listen, setting=setting, ssl_context=context, max_connections=MAX_CONNECTIONS
        )
        yield access.link(address)
    finally:
        answers.close()
        await runner.cleanup()


def _routes(answers: Answers) -> Sequence[tuple[str, Handler]]:
    async def index(_request: web.Request) -> web.StreamResponse:
        return _file(INDEX)

    async def static(request: web.Request) -> web.StreamResponse:
        return _file(request.match_info["name"])

    async def question(request: web.Request) -> web.StreamResponse:
        try:
            content = await answers.give(request.match_info["what"], request.query)
        except BadQuestionError as error:
            return _problem(400, str(error))
        except BusyError:
            return _problem(503, "too many questions at once; ask again in a second")
        except Exception as error:  # a folder may hold anything: the page says so, and the run goes on
            _log.error("a question of the page failed", question=request.path, exc_info=error)
            return _problem(500, f"this cannot be answered: {type(error).__name__}; the log has more")
        return web.Response(body=content, content_type="application/json", charset="utf-8")

    return (("/", index), ("/static/{name:.+}", static), ("/api/{what}", question))


def _guard(access: PageAccess) -> Any:
    """Takes the link's token and its cookie, and puts the headers on every answer."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = access.redeem(request) or await handler(access.identified(request))
        except web.HTTPUnauthorized:
            response = _problem(401, HOW)
        except web.HTTPException as error:
            response = _problem(error.status, (error.text or error.reason).strip())
        response.headers.update(_HEADERS)
        return response

    return guard


def _file(name: str) -> web.StreamResponse:
    path = page_file(name)
    if path is None:
        raise web.HTTPNotFound(text=f"{name}: the page has no such file\n")
    kind = TYPES[path.suffix]
    return web.FileResponse(path, headers={"Content-Type": f"{kind}; charset=utf-8"})


def _problem(status: int, sentence: str) -> web.Response:
    return web.json_response({"error": sentence}, status=status)
