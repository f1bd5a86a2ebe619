"""Implements SessionService: checks, calls the core through the run's replica, encodes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import grpc

from penstock.errors import InternalError, QueueFullError
from penstock.names import check_run_id
from penstock.v1 import sessions_pb2, sessions_pb2_grpc
from services.broker.ingest.session_check import check_ids, check_put, check_take
from services.broker.ingest.validation import check_id, check_reason
from services.broker.operations import agent_sessions
from services.broker.records_pb2 import SessionRecord
from services.broker.rules.limits import duration
from services.broker.runtime.run_registry import RunRegistry
from services.broker.runtime.run_replica import RunReplica
from services.broker.state.other_records import session_name
from services.broker.state.run_state import RunState

SILENT_AFTER_S = 8.0
"""A generator sends a heartbeat every 4.5 s at least, and another broker hears of it up to 3 s later."""

_Context = grpc.aio.ServicerContext[Any, Any]


class SessionService(sessions_pb2_grpc.SessionServiceServicer):
    """See sessions.proto for what each call promises."""

    def __init__(self, run_registry: RunRegistry) -> None:
        self._run_registry = run_registry

    async def PutSession(
        self, request: sessions_pb2.PutSessionRequest, context: _Context
    ) -> sessions_pb2.PutSessionResponse:
        """Store what is new of a session."""
        replica = self._replica(request.run_id, request.generator_id)
        check_put(request)
        turns = [turn.SerializeToString() for turn in request.turns]
        try:
            num_turns = await replica.transact(
                lambda state: agent_sessions.put(state, request, turns, replica.clock.now_s())
            )
        except QueueFullError as error:
            return sessions_pb2.PutSessionResponse(refusal=str(error))
        return sessions_pb2.PutSessionResponse(num_turns=num_turns)

    async def TakeSessions(
        self, request: sessions_pb2.TakeSessionsRequest, context: _Context
    ) -> AsyncIterator[sessions_pb2.TakeSessionsResponse]:
        """Take sessions over, and send them with their turns."""
        replica = self._replica(request.run_id, request.generator_id)
        check_take(request)
        taken = await _take(replica, request)
        holders = [_holder(replica, name) for name in (taken.held_by, *sorted(taken.siblings_of)) if name]
        for holder in holders:
            if holder.is_silent or holder.generator_id == taken.held_by:
                yield sessions_pb2.TakeSessionsResponse(holder=holder)
                break
        for record in taken.records:
            async with aclosing(_with_turns(replica, record)) as responses:
                async for response in responses:
                    yield response

    async def CheckSessions(
        self, request: sessions_pb2.CheckSessionsRequest, context: _Context
    ) -> sessions_pb2.CheckSessionsResponse:
        """Those that are not the caller's."""
        replica = self._replica(request.run_id, request.generator_id)
        check_ids(request.session_ids)
        moved_ids, ended_ids = await replica.transact(
            lambda state: agent_sessions.not_own(state, request.generator_id, request.session_ids)
        )
        return sessions_pb2.CheckSessionsResponse(moved_ids=moved_ids, ended_ids=ended_ids)

    async def EndSessions(
        self, request: sessions_pb2.EndSessionsRequest, context: _Context
    ) -> sessions_pb2.EndSessionsResponse:
        """End sessions, and count them."""
        replica = self._replica(request.run_id, request.generator_id)
        check_ids(request.session_ids)
        check_reason(request.outcome, field="outcome")
        num_ended = await replica.transact(
            lambda state: agent_sessions.end(state, request.generator_id, request.session_ids, request.outcome)
        )
        return sessions_pb2.EndSessionsResponse(num_ended=num_ended)

    def _replica(self, run_id: str, generator_id: str) -> RunReplica:
        check_run_id(run_id)
        check_id("generator_id", generator_id)
        return self._run_registry.replica(run_id)


async def _take(replica: RunReplica, request: sessions_pb2.TakeSessionsRequest) -> agent_sessions.Taken:
    """Take sessions over; an owner that seems gone may have come to another broker since the store was last asked."""
    suspects: set[str] = set()

    def suspected(generator_id: str) -> bool:
        suspects.add(generator_id)
        return False

    await replica.learn_time()
    await replica.peers.refresh()
    taken = await _take_of(replica, request, suspected)
    if suspects:
        await replica.peers.refresh(at_once=True)
        taken = await _take_of(replica, request, lambda generator_id: True)
    return taken


async def _take_of(
    replica: RunReplica, request: sessions_pb2.TakeSessionsRequest, is_gone: Callable[[str], bool]
) -> agent_sessions.Taken:
    """Take sessions over of owners that do not live and for which `is_gone` answers yes.

    One lives that is heard, whose stream to this broker did not break off, and that does not drain.
    """

    def operation(state: RunState) -> agent_sessions.Taken:
        living = replica.peers.living(max_age_s=max(SILENT_AFTER_S, state.limits.generation_lease_s))
        return agent_sessions.take(
            state, request, is_gone=lambda owner: owner not in living and is_gone(owner), now_s=replica.clock.now_s()
        )

    return await replica.transact(operation)


def _holder(replica: RunReplica, generator_id: str) -> sessions_pb2.SessionHolder:
    heard = {view.hello.generator_id for view in replica.peers.generators(max_age_s=SILENT_AFTER_S)}
    is_silent = generator_id not in heard or replica.peers.is_lost(generator_id, for_s=0.0)
    return sessions_pb2.SessionHolder(generator_id=generator_id, is_silent=is_silent)


async def _with_turns(
    replica: RunReplica, record: SessionRecord
) -> AsyncGenerator[sessions_pb2.TakeSessionsResponse, None]:
    """A session, then its turns."""
    session_id = record.session.session_id
    [turns] = await replica.store.chunks(replica.run_id, [(session_name(session_id), 0)])
    if len(turns) < record.num_turns:
        raise InternalError(f"session {session_id!r}: {len(turns)} turns are stored, not {record.num_turns}")
    head = sessions_pb2.TakenSession(
        session=record.session,
        stored_ago=duration(max(0.0, replica.clock.now_s() - record.put_s)),
        num_turns=record.num_turns,
    )
    yield sessions_pb2.TakeSessionsResponse(session=head)
    for turn in turns[: record.num_turns]:
        yield sessions_pb2.TakeSessionsResponse(turn=sessions_pb2.AgentTurn.FromString(turn))
