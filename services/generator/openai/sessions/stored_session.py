"""Writes a session down as the broker keeps it, so that any generator may go on with it. Pure.

A turn says what it adds: tokens and conversation beyond its parent's, and of the conversation for reward models what
the turns before do not share. So each turn costs what it brought, however long the session is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from google.protobuf.duration_pb2 import Duration

from penstock.v1 import sessions_pb2, types_pb2
from penstock.wire.codec import decode_versions, encode_versions, float32_array, float32_bytes, int32_array, int32_bytes
from penstock.wire.routes import Routes
from penstock.wire.timestamps import duration
from services.generator.openai.sessions.agent_session import AnsweredRequest, History, Sampled, Session, Turn

Transcript = list[tuple[str, str]]
"""A conversation: role and text of each message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """What a session that has ended was given, and when by the clock of the session's other times."""

    value: float
    components: dict[str, float]
    model: str
    finish_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredSession:
    """A session outside of its generator."""

    session: Session
    group: str
    """The name of its group."""
    reward: Reward | None = None
    """None while it is open."""


def write_session(stored: StoredSession, *, now_s: float) -> sessions_pb2.AgentSession:
    """A session without its turns; times become ages, since `now_s` is this machine's monotonic time."""
    session, reward = stored.session, stored.reward
    message = sessions_pb2.AgentSession(
        session_id=session.session_id,
        task=session.task,
        has_named_task=session.has_named_task,
        group=stored.group,
        undelivered_turns=[number for number, turn in enumerate(session.turns) if turn in session.undelivered],
        started_ago=duration(max(0.0, now_s - session.started_s)),
        used_ago=duration(max(0.0, now_s - session.last_used_s)),
    )
    if reward is not None:
        message.reward, message.reward_model = reward.value, reward.model
        message.components.update(reward.components)
        message.finished_ago.CopyFrom(duration(max(0.0, now_s - reward.finish_s)))
    return message


def write_turns(session: Session, first: int) -> list[sessions_pb2.AgentTurn]:
    """The turns of a session from number `first` on. Raises ValueError for text that is not Unicode."""
    numbers = {turn: number for number, turn in enumerate(session.turns)}
    return [_turn_message(session, turn, numbers) for turn in session.turns[first:]]


def read_session(
    message: sessions_pb2.AgentSession, turns: Sequence[sessions_pb2.AgentTurn], *, now_s: float
) -> StoredSession:
    """The session with times by this machine's clock, whose time it was stored at is `now_s`. Raises ValueError."""
    session = Session(
        session_id=message.session_id,
        task=message.task,
        started_s=now_s - _seconds(message.started_ago),
        last_used_s=now_s - _seconds(message.used_ago),
        has_named_task=message.has_named_task,
    )
    undelivered, transcripts = set(message.undelivered_turns), list[Transcript]()
    for number, stated in enumerate(turns):
        turn = _read_turn(stated, session)
        if number in undelivered:
            session.undelivered.add(turn)
        shared = transcripts[stated.shared_with][: stated.num_shared] if stated.HasField("shared_with") else []
        transcripts.append([*shared, *((said.role, said.content) for said in stated.transcript)])
        session.add(turn, transcripts[-1])
    reward = None
    if message.HasField("reward"):
        reward = Reward(
            value=message.reward,
            components=dict(message.components),
            model=message.reward_model,
            finish_s=now_s - _seconds(message.finished_ago),
        )
    return StoredSession(session=session, group=message.group, reward=reward)


def _turn_message(session: Session, turn: Turn, numbers: dict[Turn, int]) -> sessions_pb2.AgentTurn:
    sampled, routes, number = turn.sampled, turn.sampled.routes, numbers[turn]
    message = sessions_pb2.AgentTurn(
        parent=None if turn.parent is None else numbers[turn.parent],
        given_token_ids=int32_bytes(turn.given_token_ids),
        token_ids=int32_bytes(sampled.token_ids),
        logprobs=float32_bytes(sampled.logprobs),
        policy_versions=encode_versions(sampled.versions),
        is_truncated=sampled.is_truncated,
        run_history=sampled.run_history,
        routes=b"" if routes is None else routes.tobytes(),
        routes_shape=() if routes is None else routes.shape,
        unsaid=turn.unsaid,
        traceparent=turn.caller,
    )
    if turn.begun_s:
        message.begun_after.CopyFrom(duration(max(0.0, turn.begun_s - session.started_s)))
        message.took.CopyFrom(duration(max(0.0, turn.ended_s - turn.begun_s)))
    if turn.answers is not None:
        message.request.CopyFrom(
            sessions_pb2.AnsweredRequest(
                key_digest=turn.answers.key_digest,
                body_digest=turn.answers.body_digest,
                response_id=turn.answers.response_id,
                created=turn.answers.created_s,
            )
        )
    known = 0 if turn.parent is None else len(turn.parent.history)
    rest = turn.history[known:]
    if isinstance(rest, tuple):
        message.messages.digests.extend(rest)
    elif isinstance(rest, str):
        message.text = rest
    else:
        message.history_token_ids = rest
    said = session.transcripts.get(turn, [])
    before = [other for other in session.transcripts if numbers[other] < number]
    if before and said:
        shared = session.transcripts[before[-1]]
        num_shared = next((at for at, (a, b) in enumerate(zip(shared, said, strict=False)) if a != b), None)
        message.shared_with = numbers[before[-1]]
        message.num_shared = min(len(shared), len(said)) if num_shared is None else num_shared
    new = said[message.num_shared :]
    message.transcript.extend(types_pb2.ChatMessage(role=role, content=text) for role, text in new)
    return message


def _read_turn(stated: sessions_pb2.AgentTurn, session: Session) -> Turn:
    parent = session.turns[stated.parent] if stated.HasField("parent") else None
    begun_s = session.started_s + _seconds(stated.begun_after) if stated.HasField("begun_after") else 0.0
    token_ids = int32_array(stated.token_ids, "token_ids")
    return Turn(
        parent=parent,
        given_token_ids=int32_array(stated.given_token_ids, "given_token_ids"),
        sampled=Sampled(
            token_ids=token_ids,
            logprobs=float32_array(stated.logprobs, "logprobs"),
            versions=decode_versions(stated.policy_versions, num_tokens=len(token_ids), field="policy_versions"),
            is_truncated=stated.is_truncated,
            run_history=stated.run_history,
            routes=_read_routes(stated),
        ),
        history=_read_history(stated, parent),
        unsaid=stated.unsaid,
        begun_s=begun_s,
        ended_s=begun_s + _seconds(stated.took),
        caller=stated.traceparent,
        answers=_read_request(stated),
    )


def _read_request(stated: sessions_pb2.AgentTurn) -> AnsweredRequest | None:
    if not stated.HasField("request"):
        return None
    request = stated.request
    return AnsweredRequest(
        key_digest=request.key_digest,
        body_digest=request.body_digest,
        response_id=request.response_id,
        created_s=request.created,
    )


def _read_routes(stated: sessions_pb2.AgentTurn) -> Routes | None:
    if not stated.routes:
        return None
    shape = tuple(stated.routes_shape)
    routes: Routes = np.frombuffer(stated.routes, np.uint8 if len(stated.routes) == math.prod(shape) else np.uint16)
    return routes.reshape(shape)


def _read_history(stated: sessions_pb2.AgentTurn, parent: Turn | None) -> History:
    """The whole conversation. Raises ValueError if it is of another kind than the parent's."""
    known = None if parent is None else parent.history
    match stated.WhichOneof("history"):
        case "messages" if known is None or isinstance(known, tuple):
            return (*(known or ()), *stated.messages.digests)
        case "text" if known is None or isinstance(known, str):
            return (known or "") + stated.text
        case "history_token_ids" if known is None or isinstance(known, bytes):
            return (known or b"") + stated.history_token_ids
        case kind:
            raise ValueError(f"history: {kind or 'unset'}; must be of the same kind as that of the turn before")


def _seconds(message: Duration) -> float:
    return message.seconds + message.nanos / 1e9
