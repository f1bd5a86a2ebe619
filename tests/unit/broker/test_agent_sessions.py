"""Agents' sessions in a run's records: one owner, every turn once, opened = put + dropped + open."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import InvalidFieldError, QueueFullError, RunClosedError, SessionMovedError
from penstock.v1 import sessions_pb2
from services.broker.operations import agent_sessions, drops, leasing
from services.broker.operations.agent_sessions import Taken
from services.broker.state.other_records import session_name
from services.broker.state.run_audit import audit
from services.broker.state.run_state import RunState
from tests.helpers.brokers.broker import duration
from tests.unit.broker.builders import lease, open_state, submit


def request(session: str, owner: str = "gen-0", *, first_turn: int = 0, **more: Any) -> sessions_pb2.PutSessionRequest:
    stated = {"session_id": session, "task": "t", "group": "g", "has_named_task": True} | more
    return sessions_pb2.PutSessionRequest(
        run_id="r",
        generator_id=owner,
        session=sessions_pb2.AgentSession(**stated),
        first_turn=first_turn,
        keep_for=duration(60),
    )


def put(state: RunState, session: str, *turns: bytes, now_s: float = 1.0, **more: Any) -> int:
    return agent_sessions.put(state, request(session, **more), turns, now_s)


def take(state: RunState, caller: str, *, gone: tuple[str, ...] = (), now_s: float = 2.0, **asked: Any) -> Taken:
    wanted = sessions_pb2.TakeSessionsRequest(run_id="r", generator_id=caller, **asked)
    return agent_sessions.take(state, wanted, is_gone=gone.__contains__, now_s=now_s)


def names(taken: Taken) -> list[str]:
    return [record.session.session_id for record in taken.records]


def stored(state: RunState, session: str) -> list[bytes]:
    return [chunk for name, chunk in state.pending.chunks if name == (session_name(session), 0)]


def counts(state: RunState) -> tuple[int, int, dict[str, int], int]:
    books = audit(state)
    assert books.balanced
    found = books.sessions
    return found.opened, found.put, dict(found.dropped), found.open


def test_each_turn_is_stored_once_and_each_session_counts_once() -> None:
    state = open_state()
    put(state, "a", b"0")
    put(state, "a", b"0", b"1")
    put(state, "a", b"1", b"2", first_turn=1)
    assert stored(state, "a") == [b"0", b"1", b"2"]
    assert put(state, "a", b"4", first_turn=4) == 3
    put(state, "b", b"0")
    put(state, "c", b"0")
    assert agent_sessions.end(state, "gen-0", ["a", "a", "never"], agent_sessions.PUT) == 1
    assert agent_sessions.end(state, "gen-0", ["a"], "idle") == 0
    assert agent_sessions.end(state, "gen-0", ["b"], "abandoned") == 1
    assert counts(state) == (3, 1, {"abandoned": 1}, 1)
    assert stored(state, "a") == []
    with pytest.raises(SessionMovedError):
        put(state, "a", b"3", first_turn=3)
    assert agent_sessions.expire(state, 60.9) == 0
    assert agent_sessions.expire(state, 61.0) == 1
    assert counts(state) == (3, 1, {"abandoned": 1, "expired": 1}, 0)


def test_only_sessions_of_an_owner_that_is_gone_are_taken_and_the_owner_hears_of_it() -> None:
    state = open_state()
    for session in ("a", "b"):
        put(state, session, b"0")
    put(state, "other", b"0", task="another")
    assert take(state, "gen-1", session_id="a") == Taken(records=[], held_by="gen-0")
    assert take(state, "gen-1", task="t") == Taken(records=[], siblings_of=frozenset({"gen-0"}))
    assert names(take(state, "gen-1", session_id="b", gone=("gen-0",))) == ["b", "a"]
    # Once more, as after a lost answer.
    assert names(take(state, "gen-1", task="t")) == ["a", "b"]
    assert agent_sessions.not_own(state, "gen-0", ["a", "other", "never"]) == (["a", "never"], ["never"])
    with pytest.raises(SessionMovedError, match="no longer gen-0's"):
        put(state, "a", b"1", first_turn=1)
    assert agent_sessions.end(state, "gen-0", ["a"], "idle") == 0
    # Nobody asks for it, and its owner is gone; one without a name for its task has no siblings.
    put(state, "alone", b"0", now_s=5.0, has_named_task=False)
    assert names(take(state, "gen-1", gone=("gen-0",), now_s=11.0, idle_for=duration(10))) == ["a", "b", "other"]
    assert names(take(state, "gen-1", gone=("gen-0",), session_id="alone")) == ["alone"]
    assert counts(state) == (4, 0, {}, 4)


def test_a_process_that_is_replaced_keeps_neither_leases_nor_sessions() -> None:
    state = open_state()
    submit(state, "g")
    assert len(lease(state, 9)) == 2
    put(state, "a", b"0", owner="gen-1")
    put(state, "b", b"0", owner="gen-0")
    assert leasing.end_all_of(state, "gen-0") == 0
    assert leasing.end_all_of(state, "gen-1") == 2
    agent_sessions.release_all_of(state, "gen-1")
    assert len(lease(state, 9)) == 2
    assert names(take(state, "gen-2", task="t")) == ["a"]


def test_sessions_of_a_run_are_bounded_and_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    state = open_state()
    monkeypatch.setattr(agent_sessions, "MAX_SESSIONS", 2)
    monkeypatch.setattr(agent_sessions, "MAX_RUN_BYTES", 1000)
    put(state, "a", b"0" * 500)
    with pytest.raises(QueueFullError, match="at most 1000 of a run"):
        put(state, "b", b"0" * 500)
    put(state, "b", b"0")
    with pytest.raises(QueueFullError, match="at most 2"):
        put(state, "c", b"0")
    put(state, "a", b"1", first_turn=1)
    assert state.sessions.stored_bytes == 502
    monkeypatch.setattr(drops, "MAX_REASONS", 0)
    with pytest.raises(InvalidFieldError, match="one more than the 0 reasons"):
        agent_sessions.end(state, "gen-0", ["a"], "odd")
    agent_sessions.drop_all(state, "run_ended")
    assert counts(state) == (2, 0, {"run_ended": 2}, 0)
    assert state.sessions.stored_bytes == 0
    state.run.is_closed = True
    with pytest.raises(RunClosedError):
        put(state, "d", b"0")
