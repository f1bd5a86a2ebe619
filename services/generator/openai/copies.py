"""Keeps a copy of each session at another generator, where it goes on when its own is gone.

    a turn is recorded, or a reward given -> a copy, at the generator that the session's next place would be
    a session that is not known here      -> copies of its task, from whoever holds them, if their owner is gone

Invariants:
- One process has a session: a copy is handed out once, when its owner does not answer or is another process by now;
  an owner that was only away hears at its next turn, reward or put that it no longer has the session.
- An answer, or a reward's, is complete only after the copy was stored, or no other generator could take it.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import aiohttp
import structlog
from aiohttp import web
from pydantic import BaseModel

from penstock.clock import Clock
from penstock.security import Security
from penstock.security.http_access import Handler
from penstock.security.tls import ClientContexts
from services.generator.openai.formats.api_errors import unavailable
from services.generator.openai.formats.openai_requests import read
from services.generator.openai.placement import DOWN_S, MAX_REMEMBERED, ranked
from services.generator.openai.sessions.held_copies import Held, HeldCopies
from services.generator.openai.sessions.metrics import OpenAIMetrics
from services.generator.openai.sessions.session_copy import MAX_COPY_BYTES, SessionCopy, decode_copy, encode_copy

TIMEOUT_S = 3.0
POLL_S = 2.0
_PATH = "/v1/copies"

_log = structlog.get_logger()


class SessionCopies:
    """Copies of this generator's sessions elsewhere, and of others' sessions here.

    Args:
        own: This generator's address, one of `peers`.
        peers: host:port of every generator's endpoint; without another one nothing is copied.
        security: Credentials of this process.
        metrics: Receives the counts.
        clock: Source of the time.
        adopt_after_s: A copy of this age is taken over here if its owner is gone, though nobody asks for it.
        forget_after_s: A copy of this age is forgotten.
    """

    def __init__(
        self,
        own: str,
        peers: Sequence[str],
        *,
        security: Security,
        metrics: OpenAIMetrics,
        clock: Clock,
        adopt_after_s: float,
        forget_after_s: float,
    ) -> None:
        self.instance = secrets.token_hex(8)
        """Tells this process from others at its address."""
        self._own, self._others = own, tuple(peer for peer in peers if peer != own)
        self._owner = f"{own}#{self.instance}"
        self._contexts = ClientContexts(security.tls_files)
        self._headers = {} if security.token is None else {"Authorization": f"Bearer {security.token}"}
        self._metrics, self._clock = metrics, clock
        self._adopt_after_s, self._forget_after_s = adopt_after_s, forget_after_s
        self._held = HeldCopies()
        self._http: aiohttp.ClientSession | None = None
        self._holders: dict[str, str] = {}
        """Where the copy of each session is; the oldest are forgotten first."""
        self._down_until_s: dict[str, float] = {}
        self._is_stopping = False

    @property
    def handlers(self) -> dict[str, Handler]:
        """What other generators POST to, by path."""
        return {_PATH: self._put, f"{_PATH}/check": self._check, f"{_PATH}/take": self._take}

    async def store(self, copy: SessionCopy) -> None:
        """Copy a session. Raises ApiError: another generator has it by now."""
        if not self._others:
            return
        session = copy.session
        data = await asyncio.to_thread(encode_copy, copy, now_s=self._clock.monotonic_s())
        if len(data) > MAX_COPY_BYTES:
            self._metrics.copies.labels("too_large").inc()
            return
        query = {"session": session.session_id, "task": session.task if session.has_named_task else ""}
        for peer in self._places(session.session_id, query["task"] or session.session_id):
            answer = await self._ask(peer, "", query | {"owner": self._owner}, data)
            if answer is not None and answer.get("is_held"):
                self._holders[session.session_id] = peer
                if len(self._holders) > MAX_REMEMBERED:
                    del self._holders[next(iter(self._holders))]
                self._metrics.copies.labels("stored").inc()
                return
            if answer is not None and answer.get("is_taken"):
                raise unavailable(f"session {session.session_id!r} went to another generator; ask again")
        self._metrics.copies.labels("failed").inc()

    async def moved(self, session_ids: Iterable[str], *, is_over: bool = False) -> set[str]:
        """Those that another generator has by now. The copies of the others are forgotten if it `is_over`."""
        by_peer: dict[str, list[str]] = {}
        for session_id in session_ids:
            peer = self._holders.pop(session_id, None) if is_over else self._holders.get(session_id)
            if peer is not None:
                by_peer.setdefault(peer, []).append(session_id)
        asked = {"owner": self._owner, "is_over": is_over}
        answers = await asyncio.gather(
            *(self._ask(peer, "/check", {}, asked | {"sessions": own}) for peer, own in by_peer.items())
        )
        return {session_id for answer in answers if answer is not None for session_id in answer.get("taken", ())}

    async def take(self, session_id: str, task: str) -> list[SessionCopy]:
        """Copies of a session, and of all of its named task, whose generator is gone; each once."""
        if not self._others or self._is_stopping:
            return []
        asked = {"session": session_id, "task": task}
        living = [peer for peer in self._others if self._down_until_s.get(peer, 0.0) <= self._clock.monotonic_s()]
        answers = await asyncio.gather(*(self._ask(peer, "/take", {}, asked) for peer in living))
        found = [
            (base64.b64decode(data), float(age_s))
            for answer in answers
            if answer
            for data, age_s in answer.get("copies", ())
        ]
        return self._decoded([*found, *await self._handed_out(self._held.find(session_id, task))])

    async def run(self, adopt: Callable[[Sequence[SessionCopy]], Awaitable[None]]) -> None:
        """Take over what nobody asks for, until cancelled."""
        while not self._is_stopping:
            now_s = self._clock.monotonic_s()
            for owner, session_ids in self._held.older_than(now_s - self._forget_after_s).items():
                for session_id in session_ids:
                    self._held.release(owner, session_id)
            if copies := self._decoded(await self._handed_out(self._held.older_than(now_s - self._adopt_after_s))):
                await adopt(copies)
            await asyncio.sleep(POLL_S)

    def stop(self) -> None:
        """Take nothing any more; what is held here is still handed out."""
        self._is_stopping = True

    async def close(self) -> None:
        """End connections."""
        if self._http is not None:
            await self._http.close()

    def _places(self, session_id: str, key: str) -> list[str]:
        """Where a copy may go: where the last one is, then where the session would go next."""
        now_s, holder = self._clock.monotonic_s(), self._holders.get(session_id)
        living = [peer for peer in ranked(key, self._others) if self._down_until_s.get(peer, 0.0) <= now_s]
        return sorted(living, key=lambda peer: peer != holder)

    def _decoded(self, found: Iterable[tuple[bytes, float]]) -> list[SessionCopy]:
        """Of copies, each with its age in seconds."""
        copies = []
        for data, age_s in found:
            try:
                copies.append(decode_copy(data, now_s=self._clock.monotonic_s() - age_s))
            except ValueError as error:
                _log.warning("a copy of a session is lost", error=str(error))
        self._metrics.copies.labels("taken").inc(len(copies))
        return copies

    async def _handed_out(self, by_owner: dict[str, list[str]]) -> list[tuple[bytes, float]]:
        """Copies whose owner is gone, each with its age in seconds."""
        found: list[Held] = []
        for owner, session_ids in by_owner.items():
            if not await self._is_alive(owner):
                found += self._held.take(owner, session_ids)
        now_s = self._clock.monotonic_s()
        return [(held.data, now_s - held.put_s) for held in found]

    async def _is_alive(self, owner: str) -> bool:
        """Whether that process answers."""
        address, _, instance = owner.partition("#")
        try:
            async with asyncio.timeout(TIMEOUT_S), self._request("GET", address, "/health") as answer:
                is_there: bool = answer.status == web.HTTPOk.status_code
                return is_there and bool((await answer.json()).get("instance") == instance)
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return False

    async def _ask(self, peer: str, path: str, query: dict[str, str], body: Any) -> dict[str, Any] | None:
        """Its answer; None if there is none."""
        sent: dict[str, Any] = {"data": body} if isinstance(body, bytes) else {"json": body}
        try:
            async with (
                asyncio.timeout(TIMEOUT_S),
                self._request("POST", peer, _PATH + path, params=query, **sent) as answer,
            ):
                if answer.status == web.HTTPOk.status_code:
                    found: dict[str, Any] = await answer.json()
                    return found
                _log.warning("a generator takes no copies of sessions", peer=peer, answer=(await answer.text())[:200])
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            _log.warning("a generator takes no copies of sessions", peer=peer, error=f"{type(error).__name__}: {error}")
        self._down_until_s[peer] = self._clock.monotonic_s() + DOWN_S
        return None

    def _request(self, method: str, peer: str, path: str, **more: Any) -> Any:
        if self._http is None:
            self._http = aiohttp.ClientSession(trust_env=False)
        is_secure = self._contexts.is_of_files
        url = f"{'https' if is_secure else 'http'}://{peer}{path}"
        ssl = self._contexts.current() if is_secure else True
        return self._http.request(method, url, headers=self._headers, ssl=ssl, allow_redirects=False, **more)

    async def _put(self, request: web.Request) -> web.Response:
        session_id, task, owner = (request.query.get(name, "") for name in ("session", "task", "owner"))
        if self._held.was_taken(owner, session_id):
            return web.json_response({"is_taken": True})
        held = Held(owner=owner, task=task, data=await request.read(), put_s=self._clock.monotonic_s())
        # Its owner will be asked whether it lives: nobody else's address is called.
        is_peers = owner.partition("#")[0] in (self._own, *self._others)
        is_held = is_peers and not self._is_stopping and self._held.put(session_id, held)
        return web.json_response({"is_held": is_held})

    async def _check(self, request: web.Request) -> web.Response:
        asked = read(_Check, await request.read())
        for session_id in asked.sessions if asked.is_over else ():
            self._held.release(asked.owner, session_id)
        return web.json_response(
            {"taken": [each for each in asked.sessions if self._held.was_taken(asked.owner, each)]}
        )

    async def _take(self, request: web.Request) -> web.Response:
        asked = read(_Take, await request.read())
        found = await self._handed_out(self._held.find(asked.session, asked.task))
        return web.json_response({"copies": [(base64.b64encode(data).decode(), age_s) for data, age_s in found]})


class _Check(BaseModel):
    owner: str
    sessions: list[str]
    is_over: bool = False


class _Take(BaseModel):
    session: str
    task: str
