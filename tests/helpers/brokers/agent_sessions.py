"""Agents' sessions at a broker, by hand."""

from __future__ import annotations

from typing import Any

from penstock.network.rpc import call
from penstock.v1 import sessions_pb2, sessions_pb2_grpc
from penstock.wire.codec import encode_versions, float32_bytes, int32_bytes
from tests.helpers.brokers.broker import RUN, RunningBroker, duration


def agent_turn(*token_ids: int) -> sessions_pb2.AgentTurn:
    """A turn that sampled these tokens."""
    return sessions_pb2.AgentTurn(
        token_ids=int32_bytes(token_ids),
        logprobs=float32_bytes([-0.5] * len(token_ids)),
        policy_versions=encode_versions([0] * len(token_ids)),
        text="ok",
    )


async def put_session(
    broker: RunningBroker, session_id: str, *, owner: str, first_turn: int = 0, num_turns: int = 1, **changes: Any
) -> sessions_pb2.PutSessionResponse:
    """Store a session of the task "t" with turns that each sampled their own number."""
    request = sessions_pb2.PutSessionRequest(
        run_id=RUN,
        generator_id=owner,
        session=sessions_pb2.AgentSession(session_id=session_id, task="t", group="g", has_named_task=True),
        turns=[agent_turn(first_turn + number) for number in range(num_turns)],
        first_turn=first_turn,
        keep_for=duration(60),
    )
    request.MergeFrom(sessions_pb2.PutSessionRequest(**changes))
    stub = sessions_pb2_grpc.SessionServiceStub(broker.channel)
    response: sessions_pb2.PutSessionResponse = await call(stub.PutSession, request, peer="broker")
    return response
