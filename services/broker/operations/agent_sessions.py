"""Keeps agents' sessions: the records' side of SessionService. Pure operations on a RunState.

Promises:
- A session has one owner; what anyone else stores or ends of it is refused, or left out.
- A stored turn is kept until the session ends, through changes of owner; a repeated call adds nothing.
- Each session counts as opened once, and once more when it ends: as put, or as dropped for a reason.
- Sessions of a run are bounded in number and bytes, and each in time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from penstock.errors import QueueFullError, SessionMovedError
from penstock.v1 import sessions_pb2
from services.broker.operations import drops
from services.broker.records_pb2 import SessionRecord
from services.broker.state.other_records import session_name
from services.broker.state.run_state import RunState

MAX_SESSIONS = 8_192
MAX_SESSION_BYTES = 16 * 1024 * 1024
MAX_RUN_BYTES = 512 * 1024 * 1024
MAX_TAKEN_BYTES = 64 * 1024 * 1024
"""Of sessions that one call takes over; it takes one at least."""
PUT = "put"
"""The outcome of sessions that are not dropped."""
EXPIRED = "expired"


def put(state: RunState, request: sessions_pb2.PutSessionRequest, turns: Sequence[bytes], now_s: float) -> int:
    """Store a session as it is now, with those of its new turns that are not stored yet; returns how many are.

    Nothing is stored if turns before them are missing. Raises RunClosedError, SessionMovedError, and QueueFullError if
    there is no room.
    """
    state.check_open()
    session_id, owner = request.session.session_id, request.generator_id
    before = state.sessions.get(session_id)
    if (before is None and request.first_turn) or (before is not None and before.generator_id != owner):
        raise SessionMovedError(f"session {session_id!r} of run {state.run.run_id!r} is no longer {owner}'s")
    num_before = 0 if before is None else before.num_turns
    if request.first_turn > num_before:
        return num_before
    new = turns[num_before - request.first_turn :]
    stored_bytes = (0 if before is None else before.stored_bytes) + sum(map(len, new))
    _check_room(state, request.session, before, stored_bytes)
    if before is None:
        state.run.sessions_opened += 1
    record = SessionRecord(
        session=request.session,
        generator_id=owner,
        num_turns=num_before + len(new),
        stored_bytes=stored_bytes,
        put_s=now_s,
        expire_s=now_s + request.keep_for.ToMilliseconds() / 1000,
    )
    state.set_session(session_id, record)
    for turn in new:
        state.append((session_name(session_id), 0), turn)
    return record.num_turns


def _check_room(
    state: RunState, session: sessions_pb2.AgentSession, before: SessionRecord | None, stored_bytes: int
) -> None:
    """Raise QueueFullError if the session, or the run's sessions, would be too large."""
    size = session.ByteSize() + stored_bytes
    if size > MAX_SESSION_BYTES:
        raise QueueFullError(f"session {session.session_id!r}: {size} bytes; at most {MAX_SESSION_BYTES} are kept")
    if before is None and len(state.sessions) >= MAX_SESSIONS:
        raise QueueFullError(f"sessions: {len(state.sessions)} are open; at most {MAX_SESSIONS} are kept")
    others = state.sessions.stored_bytes - (0 if before is None else before.stored_bytes)
    if others + size > MAX_RUN_BYTES:
        raise QueueFullError(f"sessions: {others + size} bytes; at most {MAX_RUN_BYTES} of a run are kept")


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Sessions that are the caller's from now on."""

    records: Sequence[SessionRecord]
    held_by: str = ""
    """Who has the one that was asked for, if it is not among them."""
    siblings_of: frozenset[str] = frozenset()
    """Who has others of its task."""


def take(
    state: RunState,
    request: sessions_pb2.TakeSessionsRequest,
    *,
    is_gone: Callable[[str], bool],
    now_s: float,
) -> Taken:
    """Take over the sessions that the caller asks for, of owners that are gone. Raises RunClosedError.

    Args:
        state: The run.
        request: The caller, and which sessions it wants.
        is_gone: Whether a generator is.
        now_s: The run's time.
    """
    state.check_open()
    caller, found, num_bytes = request.generator_id, list[SessionRecord](), 0
    others = set[str]()
    for session_id, record in _wanted(state, request, now_s):
        if record.generator_id not in ("", caller) and not is_gone(record.generator_id):
            others.add(record.generator_id)
            continue
        if found and num_bytes + record.stored_bytes > MAX_TAKEN_BYTES:
            break
        num_bytes += record.stored_bytes
        if record.generator_id != caller:
            taken = SessionRecord()
            taken.CopyFrom(record)
            taken.generator_id = caller
            state.set_session(session_id, taken)
        found.append(state.sessions[session_id])
    asked = state.sessions.get(request.session_id)
    is_held = asked is not None and asked.generator_id != caller
    held_by = asked.generator_id if is_held and asked is not None else ""
    return Taken(records=found, held_by=held_by, siblings_of=frozenset(others - {held_by}))


def _wanted(
    state: RunState, request: sessions_pb2.TakeSessionsRequest, now_s: float
) -> list[tuple[str, SessionRecord]]:
    """The one that is asked for first, then those of its named task, and those not stored for long."""
    asked = state.sessions.get(request.session_id)
    task = request.task
    if not task and asked is not None and asked.session.has_named_task:
        task = asked.session.task
    found = [] if asked is None else [request.session_id]
    found += state.sessions.of_task(task)
    if request.HasField("idle_for"):
        old_s = now_s - request.idle_for.ToMilliseconds() / 1000
        found += [session_id for session_id, record in state.sessions.items() if record.put_s <= old_s]
    return [(session_id, state.sessions[session_id]) for session_id in dict.fromkeys(found)]


def not_own(state: RunState, generator_id: str, session_ids: Collection[str]) -> tuple[list[str], list[str]]:
    """Those sessions that are not the generator's: another one has them, or they have ended; and which have ended."""
    moved = [session_id for session_id in session_ids if _owner(state, session_id) != generator_id]
    return moved, [session_id for session_id in moved if session_id not in state.sessions]


def end(state: RunState, generator_id: str, session_ids: Collection[str], outcome: str) -> int:
    """End those sessions that are the generator's; returns how many. Raises InvalidFieldError."""
    check_outcome(state, outcome)
    own = [each for each in dict.fromkeys(session_ids) if _owner(state, each) == generator_id]
    for session_id in own:
        _end(state, session_id, outcome)
    return len(own)


def release_all_of(state: RunState, generator_id: str) -> None:
    """Let any generator continue the sessions of one whose process has ended."""
    for session_id, record in list(state.sessions.items()):
        if record.generator_id == generator_id:
            released = SessionRecord()
            released.CopyFrom(record)
            released.generator_id = ""
            state.set_session(session_id, released)


def expire(state: RunState, now_s: float, *, unbroken_since_s: float = 0.0) -> int:
    """Drop the sessions whose time is up, which begins again at the end of a gap; returns how many."""
    late = [
        session_id
        for session_id, record in state.sessions.items()
        if record.expire_s + max(0.0, unbroken_since_s - record.put_s) <= now_s
    ]
    for session_id in late:
        _end(state, session_id, EXPIRED)
    return len(late)


def drop_all(state: RunState, reason: str) -> None:
    """Drop every session: the run ends."""
    for session_id in list(state.sessions):
        _end(state, session_id, reason)


def check_outcome(state: RunState, outcome: str) -> None:
    """Raise InvalidFieldError if an outcome is one too many."""
    if outcome != PUT:
        drops.check_countable(state.run.sessions_dropped, outcome)


def _owner(state: RunState, session_id: str) -> str | None:
    record = state.sessions.get(session_id)
    return None if record is None else record.generator_id


def _end(state: RunState, session_id: str, outcome: str) -> None:
    state.set_session(session_id, None)
    if outcome == PUT:
        state.run.sessions_put += 1
    else:
        state.run.sessions_dropped[outcome] += 1
