"""Sends the sessions of a task to one generator, whichever of them an agent calls.

    request of a session -> the generator that has its task, or else by rendezvous hashing among those that live
                         -> the next one, where it is gone, drains, or has more than its share of what is under way

So later turns find the prefix of earlier ones in its cache, siblings find each other, and a generator that comes or
goes moves only the tasks that it has. Requests without a session are answered where they come.

Source: rendezvous hashing (Thaler and Ravishankar, 1998) with bounded loads (Mirrokni, Thorup, Zadimoghaddam, 2018).
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence

import aiohttp
import structlog
from aiohttp import web

from penstock.security import Security
from penstock.security.tls import ClientContexts
from services.generator.openai.formats.api_errors import ApiError

PLACED_HEADER = "X-Penstock-Placed"
"""Marks a request that a generator passed on: it is answered where it arrives."""
MAX_REMEMBERED = 100_000
"""Tasks, and sessions, whose place is remembered; beyond that the oldest are hashed again."""
LOAD_FACTOR = 1.25
"""A new task goes elsewhere where a generator has this times the mean of what this one has under way."""
DOWN_S = 5.0
"""A generator that did not answer is left out for this long."""
CONNECT_TIMEOUT_S = 3.0
_PASSED_ON = (
    "Authorization",
    "Content-Type",
    "Idempotency-Key",
    "Traceparent",
    "X-Session-ID",
    "X-Stainless-Retry-Count",
)
_CHUNK_BYTES = 65536

_log = structlog.get_logger()


class GoneError(Exception):
    """A generator did not answer, or does not take anything any more."""


class Placement:
    """Where sessions are.

    Args:
        own: This generator's address, one of `peers`.
        peers: host:port of every generator's endpoint, the same everywhere; empty places nothing.
        security: Credentials of this process, shown to peers beside the request's own.
        timeout_s: Longest time of one request.
    """

    def __init__(
        self,
        own: str,
        peers: Sequence[str],
        *,
        security: Security,
        timeout_s: float,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._own, self._peers = own, tuple(peers)
        self._contexts = ClientContexts(security.tls_files)
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        self._monotonic_s = monotonic_s
        self._http: aiohttp.ClientSession | None = None
        self._places: OrderedDict[str, str] = OrderedDict()
        self._tasks: OrderedDict[str, str] = OrderedDict()
        """The task of each session."""
        self._under_way: Counter[str] = Counter()
        self._down_until_s: dict[str, float] = {}

    async def answer(
        self,
        request: web.Request,
        *,
        session_id: str,
        task: str | None,
        body: bytes,
        serve: Callable[[], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        """The answer of the generator that has the session. `task` is None where the request does not name it."""
        if len(self._peers) < 2 or PLACED_HEADER in request.headers:
            return await serve()
        key = task or self._tasks.get(session_id)
        if task is not None:
            _remember(self._tasks, session_id, task)
        for peer in self._order(key or session_id):
            self._under_way[peer] += 1
            try:
                if peer == self._own:
                    response = await serve()
                else:
                    response = await self._passed_on(request, peer, body, takes_missing=key is not None)
                _remember(self._places, key or session_id, peer)
                return response
            except GoneError as error:
                self._down_until_s[peer] = self._monotonic_s() + DOWN_S
                _log.warning("sessions go elsewhere", peer=peer, error=str(error))
            except (web.HTTPNotFound, web.HTTPConflict, ApiError) as error:
                if error.status != 409 and (error.status != 404 or key is not None):
                    raise
            finally:
                self._under_way[peer] -= 1
        return await serve()

    async def close(self) -> None:
        """End connections to peers."""
        if self._http is not None:
            await self._http.close()

    def _order(self, key: str) -> list[str]:
        """Generators that live, the best place first."""
        now_s = self._monotonic_s()
        living = [peer for peer in self._peers if self._down_until_s.get(peer, 0.0) <= now_s]
        found = ranked(key, living)
        known = self._places.get(key)
        if known is not None:
            # Where it is; else the next one, which has the copies.
            return sorted(found, key=lambda peer: peer != known)
        most = math.ceil(LOAD_FACTOR * (self._under_way.total() + 1) / max(1, len(found)))
        return sorted(found, key=lambda peer: self._under_way[peer] >= most)

    async def _passed_on(
        self, request: web.Request, peer: str, body: bytes, *, takes_missing: bool
    ) -> web.StreamResponse:
        """Its answer.

        Raises GoneError, HTTPConflict for a session that another one has, and HTTPNotFound for one that is not there
        unless it `takes_missing`.
        """
        if self._http is None:
            # Environments' proxies are not for peers.
            self._http = aiohttp.ClientSession(timeout=self._timeout, trust_env=False)
        is_secure = self._contexts.is_of_files
        headers = {name: value for name, value in request.headers.items() if _is_passed_on(name)}
        try:
            asked = self._http.request(
                request.method,
                f"{'https' if is_secure else 'http'}://{peer}{request.path_qs}",
                data=body or None,
                headers={**headers, PLACED_HEADER: "1"},
                ssl=self._contexts.current() if is_secure else True,
                allow_redirects=False,
            )
            answer = await asked
        except (aiohttp.ClientConnectionError, TimeoutError) as error:
            raise GoneError(f"{type(error).__name__}: {error}") from error
        async with answer:
            if answer.status == 503:
                raise GoneError((await answer.text())[:200])
            if answer.status == 409:
                raise web.HTTPConflict
            if answer.status == 404 and not takes_missing:
                raise web.HTTPNotFound
            return await _copied(request, answer)


def ranked(key: str, peers: Iterable[str]) -> list[str]:
    """Generators by rendezvous hashing, the best place first."""
    return sorted(peers, key=lambda peer: _weight(key, peer), reverse=True)


async def _copied(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    """The answer, part by part; one that breaks off breaks off here, too."""
    response = web.StreamResponse(status=answer.status)
    for name in ("Content-Type", "Retry-After", "Content-Length"):
        if name in answer.headers:
            response.headers[name] = answer.headers[name]
    await response.prepare(request)
    try:
        async for part in answer.content.iter_chunked(_CHUNK_BYTES):
            await response.write(part)
        await response.write_eof()
    except (aiohttp.ClientError, ConnectionError) as error:
        _log.warning("an answer that was passed on broke off", error=f"{type(error).__name__}: {error}")
        if request.transport is not None:
            request.transport.abort()
    return response


def _is_passed_on(name: str) -> bool:
    return name.title() in {each.title() for each in _PASSED_ON} or name.lower().startswith("x-penstock-")


def _weight(key: str, peer: str) -> bytes:
    return hashlib.blake2b(f"{key}\0{peer}".encode(), digest_size=8).digest()


def _remember(places: OrderedDict[str, str], key: str, value: str) -> None:
    places[key] = value
    places.move_to_end(key)
    while len(places) > MAX_REMEMBERED:
        places.popitem(last=False)
