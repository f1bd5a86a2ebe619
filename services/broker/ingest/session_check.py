"""Checks what generators say of agents' sessions: every field is bounded, every refusal names field and value. Pure.

Each check raises InvalidFieldError and returns nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from google.protobuf.duration_pb2 import Duration

from penstock.errors import require
from penstock.v1 import sessions_pb2
from penstock.wire.codec import decode_versions, float32_array, int32_array
from services.broker.ingest.validation import check_id

MAX_IDS = 1_024
MAX_TURNS = 512
"""Of a session."""
MAX_TURNS_BYTES = 8 * 1024 * 1024
"""Of one request."""
MAX_HEAD_BYTES = 16 * 1024
"""Of a session without its turns: every broker of the run holds it in memory."""
MAX_NAME_CHARACTERS = 512
MAX_COMPONENTS = 64
MAX_DIGEST_BYTES = 64
MAX_KEPT_S = 7 * 24 * 3600
MAX_AGO_S = 366 * 24 * 3600


def check_ids(session_ids: Sequence[str]) -> None:
    """Ids of sessions."""
    require(len(session_ids) <= MAX_IDS, "session_ids", len(session_ids), f"at most {MAX_IDS}")
    for session_id in session_ids:
        check_id("session_ids", session_id)


def check_put(request: sessions_pb2.PutSessionRequest) -> None:
    """A session and its new turns."""
    _check_session(request.session)
    _check_duration("keep_for", request.keep_for)
    num_turns, size = request.first_turn + len(request.turns), request.ByteSize()
    require(num_turns <= MAX_TURNS, "turns", num_turns, f"at most {MAX_TURNS} with those before")
    require(size <= MAX_TURNS_BYTES, "turns", f"{size} bytes", f"at most {MAX_TURNS_BYTES} bytes in one request")
    for number, turn in enumerate(request.turns, request.first_turn):
        _check_turn(turn, number)
    undelivered = request.session.undelivered_turns
    is_known = len(undelivered) <= MAX_TURNS and all(number < MAX_TURNS for number in undelivered)
    require(is_known, "session.undelivered_turns", len(undelivered), f"numbers below {MAX_TURNS}, each once")


def check_take(request: sessions_pb2.TakeSessionsRequest) -> None:
    """What a generator asks for."""
    if request.session_id:
        check_id("session_id", request.session_id)
    _check_name("task", request.task)
    if request.HasField("idle_for"):
        _check_duration("idle_for", request.idle_for)


def _check_session(session: sessions_pb2.AgentSession) -> None:
    check_id("session.session_id", session.session_id)
    require(session.task != "", "session.task", session.task, "1 character or more")
    _check_name("session.task", session.task)
    check_id("session.group", session.group)
    for field in ("started_ago", "used_ago", "finished_ago"):
        _check_duration(f"session.{field}", getattr(session, field), max_s=MAX_AGO_S)
    require(math.isfinite(session.reward), "session.reward", session.reward, "a finite number")
    num_components = len(session.components)
    require(num_components <= MAX_COMPONENTS, "session.components", num_components, f"at most {MAX_COMPONENTS}")
    for name, value in session.components.items():
        _check_name("session.components", name)
        require(math.isfinite(value), "session.components", value, "finite numbers")
    _check_name("session.reward_model", session.reward_model)
    size = session.ByteSize()
    require(size <= MAX_HEAD_BYTES, "session", f"{size} bytes", f"at most {MAX_HEAD_BYTES} bytes without its turns")


def _check_turn(turn: sessions_pb2.AgentTurn, number: int) -> None:
    for field in ("parent", "shared_with"):
        if turn.HasField(field):
            before = getattr(turn, field)
            require(before < number, f"turns.{field}", before, f"a turn before turn {number}")
    int32_array(turn.given_token_ids, "turns.given_token_ids")
    num_tokens = len(int32_array(turn.token_ids, "turns.token_ids"))
    require(num_tokens > 0, "turns.token_ids", num_tokens, "at least one token")
    num_logprobs = len(float32_array(turn.logprobs, "turns.logprobs"))
    require(num_logprobs == num_tokens, "turns.logprobs", num_logprobs, f"one for each of {num_tokens} tokens")
    decode_versions(turn.policy_versions, num_tokens=num_tokens, field="turns.policy_versions")
    num_experts, size = math.prod(turn.routes_shape), len(turn.routes)
    has_shape = not size or (len(turn.routes_shape) == 3 and num_experts > 0 and size in (num_experts, 2 * num_experts))
    require(has_shape, "turns.routes", f"{size} bytes", "1 or 2 bytes for each of routes_shape; or none")
    for field in ("begun_after", "took"):
        _check_duration(f"turns.{field}", getattr(turn, field), max_s=MAX_AGO_S)
    _check_name("turns.traceparent", turn.traceparent)
    request = turn.request
    for field, digest in (("key_digest", request.key_digest), ("body_digest", request.body_digest)):
        is_short = len(digest) <= MAX_DIGEST_BYTES
        require(is_short, f"turns.request.{field}", f"{len(digest)} bytes", f"at most {MAX_DIGEST_BYTES}")
    _check_name("turns.request.response_id", request.response_id)
    is_short = all(len(digest) <= MAX_DIGEST_BYTES for digest in turn.messages.digests)
    require(is_short, "turns.messages", "a longer digest", f"at most {MAX_DIGEST_BYTES} bytes each")


def _check_name(field: str, value: str) -> None:
    require(len(value) <= MAX_NAME_CHARACTERS, field, value[:80], f"at most {MAX_NAME_CHARACTERS} characters")


def _check_duration(field: str, value: Duration, *, max_s: float = MAX_KEPT_S) -> None:
    seconds = value.seconds + value.nanos / 1e9
    require(0 <= seconds <= max_s, field, seconds, f"0 to {max_s:g} seconds")
