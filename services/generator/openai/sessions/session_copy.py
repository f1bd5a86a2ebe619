"""Writes a session down, so that another generator may go on with it: JSON, arrays as base64. Pure."""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from services.generator.openai.sessions.agent_session import History, Sampled, Session, Turn

MAX_COPY_BYTES = 8 * 1024 * 1024 - 1024
"""Less than a request may have."""
_ARRAYS = {"token_ids": "<i4", "logprobs": "<f4", "versions": "<i8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """What a session that has ended was given, and when by the clock of the session's other times."""

    value: float
    components: dict[str, float]
    model: str
    finish_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SessionCopy:
    """A session outside of its generator."""

    session: Session
    group: str
    """The name of its group."""
    reward: Reward | None = None
    """None while it is open."""


def encode_copy(copy: SessionCopy, *, now_s: float) -> bytes:
    """The copy as bytes; times become ages, since `now_s` is this machine's monotonic time."""
    session, reward = copy.session, copy.reward
    numbers = {turn: number for number, turn in enumerate(session.turns)}
    document = {
        "session": session.session_id,
        "task": session.task,
        "has_named_task": session.has_named_task,
        "group": copy.group,
        "started_ago_s": now_s - session.started_s,
        "used_ago_s": now_s - session.last_used_s,
        "turns": [_turn_document(turn, numbers, now_s) for turn in session.turns],
        "undelivered": sorted(numbers[turn] for turn in session.undelivered if turn in numbers),
        "transcripts": {str(numbers[turn]): said for turn, said in session.transcripts.items()},
        "reward": None
        if reward is None
        else {
            "value": reward.value,
            "components": reward.components,
            "model": reward.model,
            "finished_ago_s": now_s - reward.finish_s,
        },
    }
    return json.dumps(document).encode()


def decode_copy(data: bytes, *, now_s: float) -> SessionCopy:
    """The copy with times by this machine's clock. Raises ValueError."""
    try:
        return _read(json.loads(data), now_s)
    except (KeyError, TypeError, IndexError, AttributeError, RecursionError, binascii.Error) as error:
        raise ValueError(f"a copy of a session cannot be read: {type(error).__name__}: {error}") from error


def _read(document: dict[str, Any], now_s: float) -> SessionCopy:
    session = Session(
        session_id=str(document["session"]),
        task=str(document["task"]),
        started_s=now_s - float(document["started_ago_s"]),
        last_used_s=now_s - float(document["used_ago_s"]),
        has_named_task=bool(document["has_named_task"]),
    )
    transcripts = {int(number): said for number, said in document["transcripts"].items()}
    undelivered = set(document["undelivered"])
    for number, stated in enumerate(document["turns"]):
        turn = _read_turn(stated, session.turns, now_s)
        if number in undelivered:
            session.undelivered.add(turn)
        session.add(turn, [(str(role), str(text)) for role, text in transcripts.get(number, [])])
    reward = document["reward"]
    return SessionCopy(
        session=session,
        group=str(document["group"]),
        reward=None
        if reward is None
        else Reward(
            value=float(reward["value"]),
            components={str(name): float(value) for name, value in reward["components"].items()},
            model=str(reward["model"]),
            finish_s=now_s - float(reward["finished_ago_s"]),
        ),
    )


def _turn_document(turn: Turn, numbers: dict[Turn, int], now_s: float) -> dict[str, Any]:
    sampled, routes = turn.sampled, turn.sampled.routes
    return {
        "parent": None if turn.parent is None else numbers[turn.parent],
        "given": _packed(turn.given_token_ids, "<i4"),
        **{name: _packed(getattr(sampled, name), kind) for name, kind in _ARRAYS.items()},
        "is_truncated": sampled.is_truncated,
        "run_history": sampled.run_history,
        "routes": None if routes is None else [routes.dtype.str, list(routes.shape), _packed(routes, routes.dtype.str)],
        "history": _history_document(turn.history),
        "unsaid": turn.unsaid,
        "begun_ago_s": now_s - turn.begun_s,
        "ended_ago_s": now_s - turn.ended_s,
        "caller": turn.caller,
    }


def _read_turn(stated: dict[str, Any], before: list[Turn], now_s: float) -> Turn:
    parent = stated["parent"]
    if parent is not None and not 0 <= parent < len(before):
        raise ValueError(f"a turn continues turn {parent}, which is not before it")
    token_ids, logprobs, versions = (_unpacked(stated[name], kind) for name, kind in _ARRAYS.items())
    if not 0 < len(token_ids) == len(logprobs) == len(versions):
        raise ValueError("a turn has no tokens, or not one log-prob and version for each")
    routes = stated["routes"]
    return Turn(
        parent=None if parent is None else before[parent],
        given_token_ids=_unpacked(stated["given"], "<i4"),
        sampled=Sampled(
            token_ids=token_ids,
            logprobs=logprobs,
            versions=versions,
            is_truncated=bool(stated["is_truncated"]),
            run_history=int(stated["run_history"]),
            routes=None if routes is None else _unpacked(routes[2], routes[0]).reshape(routes[1]),
        ),
        history=_read_history(stated["history"]),
        unsaid=str(stated["unsaid"]),
        begun_s=now_s - float(stated["begun_ago_s"]),
        ended_s=now_s - float(stated["ended_ago_s"]),
        caller=str(stated["caller"]),
    )


def _history_document(history: History) -> dict[str, Any]:
    if isinstance(history, tuple):
        return {"messages": [digest.hex() for digest in history]}
    return {"text": history} if isinstance(history, str) else {"token_ids": history.hex()}


def _read_history(stated: dict[str, Any]) -> History:
    if "messages" in stated:
        return tuple(map(bytes.fromhex, stated["messages"]))
    return str(stated["text"]) if "text" in stated else bytes.fromhex(stated["token_ids"])


def _packed(array: npt.NDArray[Any], kind: str) -> str:
    return base64.b64encode(np.ascontiguousarray(array, kind).tobytes()).decode()


def _unpacked(text: str, kind: str) -> npt.NDArray[Any]:
    dtype = np.dtype(kind)
    if dtype.hasobject:
        raise ValueError(f"{kind!r} is no type of numbers")
    return np.frombuffer(base64.b64decode(text), dtype).astype(dtype.newbyteorder("="))
