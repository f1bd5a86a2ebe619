"""Keeps agents' sessions at a broker: SessionService's calls, each with a deadline and retries."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from penstock.errors import QueueFullError
from penstock.network.connection import Connection
from penstock.network.rpc import DEFAULT_TIMEOUT_S, call_with_retry, translated_errors
from penstock.security import NO_SECURITY, Security
from penstock.v1 import sessions_pb2, sessions_pb2_grpc
from penstock.wire.timestamps import duration

MAX_IDS_PER_CALL = 1024

_Response = TypeVar("_Response")


class SessionClient(Connection):
    """The sessions of one generator. Every method raises the PenstockError that the broker raised.

    Args:
        broker: The broker's address, host:port, or several separated by commas.
        run_id: The run.
        generator_id: The caller, as its hello names it.
        security: Certificates and token.
        patience_s: How long a call waits for a broker that is away.
    """

    def __init__(
        self,
        broker: str,
        *,
        run_id: str,
        generator_id: str,
        security: Security = NO_SECURITY,
        patience_s: float,
    ) -> None:
        super().__init__(broker, security=security)
        self._stub = sessions_pb2_grpc.SessionServiceStub(self.channel)
        self._names = {"run_id": run_id, "generator_id": generator_id}
        self._patience_s = patience_s

    async def put(
        self,
        session: sessions_pb2.AgentSession,
        turns: Sequence[sessions_pb2.AgentTurn],
        *,
        first_turn: int,
        keep_s: float,
    ) -> int:
        """Store a session as it is now, with new turns; returns how many are stored, see PutSessionResponse.

        Raises:
            SessionMovedError: Another generator has it, or it has ended.
            QueueFullError: There is no room for it.
        """
        request = sessions_pb2.PutSessionRequest(
            **self._names, session=session, turns=turns, first_turn=first_turn, keep_for=duration(keep_s)
        )
        response = await self._call(self._stub.PutSession, request)
        if response.refusal:
            raise QueueFullError(response.refusal)
        return response.num_turns

    async def take(
        self, *, session_id: str = "", task: str = "", idle_s: float | None = None
    ) -> AsyncGenerator[sessions_pb2.TakeSessionsResponse, None]:
        """Take over sessions whose owner is gone; the frames of the answer."""
        request = sessions_pb2.TakeSessionsRequest(
            **self._names, session_id=session_id, task=task, idle_for=None if idle_s is None else duration(idle_s)
        )
        async with translated_errors(self.peer):
            call = self._stub.TakeSessions(request, timeout=DEFAULT_TIMEOUT_S)
            async for response in call:
                yield response

    async def gone(self, session_ids: Sequence[str]) -> dict[str, bool]:
        """Those that another generator has, or that have ended; and whether each has ended."""
        found: dict[str, bool] = {}
        for start in range(0, len(session_ids), MAX_IDS_PER_CALL):
            part = session_ids[start : start + MAX_IDS_PER_CALL]
            request = sessions_pb2.CheckSessionsRequest(**self._names, session_ids=part)
            response = await self._call(self._stub.CheckSessions, request)
            ended = set(response.ended_ids)
            found |= {session_id: session_id in ended for session_id in response.moved_ids}
        return found

    async def end(self, session_ids: Sequence[str], outcome: str) -> None:
        """End those of them that are the caller's."""
        for start in range(0, len(session_ids), MAX_IDS_PER_CALL):
            part = session_ids[start : start + MAX_IDS_PER_CALL]
            request = sessions_pb2.EndSessionsRequest(**self._names, session_ids=part, outcome=outcome)
            await self._call(self._stub.EndSessions, request)

    async def _call(self, method: Callable[..., Awaitable[_Response]], request: Any) -> _Response:
        return await call_with_retry(method, request, peer=self.peer, give_up_after_s=self._patience_s)
