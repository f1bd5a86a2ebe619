"""Keeps this generator's sessions at the broker, and goes on with those of generators that are gone.

    a turn is recorded, or a reward given -> what is new of the session, at the broker
    a session that is not known here      -> it and those of its task, from the broker, once their owner is gone
    a session is put, or dropped          -> the broker counts and forgets it

Invariants:
- One process has a session: the broker says which. A former owner hears of it at its next turn, reward or put.
- An answer, or a reward's, is complete only after the broker has its turn, refused it for room, or was away for long.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import aclosing

import structlog

from penstock.clients.sessions import SessionClient
from penstock.clock import Clock
from penstock.errors import NotOfferedError, PenstockError, QueueFullError, SessionMovedError
from penstock.v1 import sessions_pb2
from services.generator.openai.formats.api_errors import ApiError, elsewhere, unavailable
from services.generator.openai.sessions.metrics import OpenAIMetrics
from services.generator.openai.sessions.session_groups import EXPIRED, MOVED
from services.generator.openai.sessions.stored_session import StoredSession, read_session, write_session, write_turns

ADOPT_EVERY_S = 5.0
ASK_EVERY_S = 0.25
HELD_PATIENCE_S = 60.0
"""How long a request waits for an owner that is silent to be back, or to count as gone."""
MAX_PUT_BYTES = 4 * 1024 * 1024
"""Turns of one call beyond its first."""

_log = structlog.get_logger()


class KeptSessions:
    """The sessions of this generator at the broker.

    Args:
        client: Calls the broker.
        metrics: Receives the counts.
        clock: Source of the time.
        adopt_after_s: A session of this age is taken over here if its owner is gone, even without a request for it.
        forget_after_s: A session of this age is given up by the broker.
    """

    def __init__(
        self,
        client: SessionClient,
        *,
        metrics: OpenAIMetrics,
        clock: Clock,
        adopt_after_s: float,
        forget_after_s: float,
    ) -> None:
        self._client = client
        self._metrics, self._clock = metrics, clock
        self._adopt_after_s, self._forget_after_s = adopt_after_s, forget_after_s
        self._num_stored: dict[str, int] = {}
        """Turns that the broker has, of each session of this generator that it has."""
        self._stored_s: dict[str, float] = {}
        """When each of those was stored last."""
        self._storing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._ended: defaultdict[str, list[str]] = defaultdict(list)
        """Sessions that the broker has yet to hear are over, by outcome."""
        self._is_stopping = False

    async def store(self, stored: StoredSession) -> None:
        """Store what is new of a session. Raises ApiError: another generator has it by now."""
        session_id = stored.session.session_id
        async with self._storing[session_id]:
            try:
                await self._put(stored)
            except SessionMovedError as error:
                self._forget([session_id])
                raise unavailable(f"session {session_id!r} went to another generator; ask again") from error
            except (PenstockError, ValueError) as error:
                outcome = "refused" if isinstance(error, QueueFullError) else "failed"
                _log.warning("a session is not stored", session=session_id, outcome=outcome, error=str(error))
                self._metrics.records.labels(outcome).inc()
            else:
                self._metrics.records.labels("stored").inc()

    async def take(self, session_id: str, task: str) -> list[StoredSession]:
        """A session and all of its named task whose generator is gone, if the broker has it.

        Raises ApiError: the broker does not answer, or another generator has the session.
        """
        if self._is_stopping:
            return []
        patience_s = self._clock.monotonic_s() + HELD_PATIENCE_S
        while True:
            try:
                found, holder = await self._take(session_id=session_id, task=task)
            except NotOfferedError:
                return []
            except PenstockError as error:
                raise unavailable(f"the broker does not say where session {session_id!r} is: {error}") from error
            if holder is None:
                return found
            if not holder.is_silent or self._clock.monotonic_s() > patience_s:
                raise elsewhere(
                    f"session {session_id!r} is at generator {holder.generator_id}; send its requests there"
                )
            await asyncio.sleep(ASK_EVERY_S)

    async def gone(self, session_ids: Iterable[str]) -> dict[str, str]:
        """Those that are no longer this generator's, with the reason: MOVED, or EXPIRED at the broker.

        What has ended before its time was up was ended by another generator.
        """
        known = [session_id for session_id in session_ids if session_id in self._num_stored]
        try:
            gone = await self._client.gone(known)
        except PenstockError as error:
            # Groups have names: the broker takes none twice.
            _log.warning("the broker does not say which sessions are here", error=str(error))
            return {}
        late_s = self._clock.monotonic_s() - self._forget_after_s
        expired = {
            name for name, has_ended in gone.items() if has_ended and self._stored_s.get(name, math.inf) <= late_s
        }
        self._forget(gone)
        return {session_id: EXPIRED if session_id in expired else MOVED for session_id in gone}

    def note_end(self, session_ids: Collection[str], outcome: str) -> None:
        """These were put, or dropped for a reason."""
        self._ended[outcome] += [session_id for session_id in session_ids if session_id in self._num_stored]
        self._forget(session_ids)

    async def report_ends(self) -> None:
        """Tell the broker which sessions are over; those it did not confirm are reported again next time."""
        for outcome in list(self._ended):
            session_ids = self._ended.pop(outcome)
            try:
                await self._client.end(session_ids, outcome)
            except PenstockError as error:
                if error.is_retryable:
                    self._ended[outcome] += session_ids
                _log.warning("the broker does not hear which sessions are over", error=str(error))
                return

    async def run(self, adopt: Callable[[Sequence[StoredSession]], Awaitable[None]]) -> None:
        """Take over sessions without requests, until cancelled."""
        while not self._is_stopping:
            try:
                found, _holder = await self._take(idle_s=self._adopt_after_s)
                if found:
                    await adopt(found)
            except (PenstockError, ApiError) as error:
                _log.debug("no sessions are taken over", error=str(error))
            await asyncio.sleep(ADOPT_EVERY_S)

    def stop(self) -> None:
        """Take nothing any more."""
        self._is_stopping = True

    async def close(self) -> None:
        """Close the connection."""
        await self._client.close()

    async def _put(self, stored: StoredSession) -> None:
        """Send turns until the broker has all of them, and the session as it is now."""
        session = stored.session
        num_stored = self._num_stored.get(session.session_id, 0)
        while True:
            head = write_session(stored, now_s=self._clock.monotonic_s())
            turns = _some_of(write_turns(session, num_stored))
            first, num_now = num_stored, num_stored + len(turns)
            stored_s = self._clock.monotonic_s()
            num_stored = await self._client.put(head, turns, first_turn=first, keep_s=self._forget_after_s)
            self._num_stored[session.session_id] = num_stored
            self._stored_s[session.session_id] = stored_s
            if num_stored >= len(session.turns):
                return
            if num_stored < num_now and num_stored >= first:
                raise PenstockError(f"the broker stored {num_stored} turns, not {num_now}")

    async def _take(
        self, *, session_id: str = "", task: str = "", idle_s: float | None = None
    ) -> tuple[list[StoredSession], sessions_pb2.SessionHolder | None]:
        """Sessions that are this generator's from now on; and who has the one that was asked for, if another does."""
        heads: list[tuple[sessions_pb2.TakenSession, list[sessions_pb2.AgentTurn]]] = []
        holder: sessions_pb2.SessionHolder | None = None
        async with aclosing(self._client.take(session_id=session_id, task=task, idle_s=idle_s)) as frames:
            async for frame in frames:
                if frame.HasField("session"):
                    heads.append((frame.session, []))
                elif frame.HasField("turn") and heads:
                    heads[-1][1].append(frame.turn)
                else:
                    holder = frame.holder
        now_s, found = self._clock.monotonic_s(), list[StoredSession]()
        for head, turns in heads:
            try:
                stored_s = now_s - head.stored_ago.ToMicroseconds() / 1e6
                found.append(read_session(head.session, turns, now_s=stored_s))
            except (PenstockError, ValueError, IndexError) as error:
                _log.warning("a session is lost", session=head.session.session_id, error=str(error))
            else:
                self._num_stored[head.session.session_id] = len(turns)
                self._stored_s[head.session.session_id] = stored_s
        self._metrics.records.labels("taken").inc(len(found))
        return found, holder

    def _forget(self, session_ids: Iterable[str]) -> None:
        for session_id in session_ids:
            self._num_stored.pop(session_id, None)
            self._stored_s.pop(session_id, None)
            lock = self._storing.get(session_id)
            if lock is not None and not lock.locked():
                del self._storing[session_id]


def _some_of(turns: Sequence[sessions_pb2.AgentTurn]) -> list[sessions_pb2.AgentTurn]:
    """The first of them, and those after it that fit into the same call."""
    found: list[sessions_pb2.AgentTurn] = []
    num_bytes = 0
    for turn in turns:
        num_bytes += turn.ByteSize()
        if found and num_bytes > MAX_PUT_BYTES:
            break
        found.append(turn)
    return found
