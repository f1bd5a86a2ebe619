"""Records an agent's session: every turn with its exact input and output tokens. Pure.

    turn = given tokens (the prompt, a tool's output) + sampled tokens
    turn <- turn <- turn          the client repeated the conversation and continued: the same tokens, extended
         <- turn                  it continued from an earlier point: a second branch
    turn                          it rewrote the history: a separate tree
    turn, turn                    it repeated a request: the answer it continued from counts, or else the newest one

Promises:
- Sampled tokens are never tokenised again: a turn's prompt is its parent's tokens, as sampled, and the tokens given
  since.
- Every sampled token is trained on exactly once: where branches share turns, only the first branch counts them.
- Given tokens are never trained on.
- Nor is an unused answer: one whose client disconnected before getting all of it, or repeated the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from penstock.wire.codec import Float32, Int32, Int64, UInt8
from penstock.wire.routes import Routes

History = tuple[bytes, ...] | str | bytes
"""The repeated history: digests of chat messages; a text; token ids as int32 bytes. Different kinds never match."""
_TOKEN_BYTES = 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sampled:
    """The output of one turn, [n] tokens."""

    token_ids: Int32
    """[n]."""
    logprobs: Float32
    """[n], nats."""
    versions: Int64
    """[n], the policy version that sampled each token."""
    is_truncated: bool
    """Whether a length limit ended it."""
    run_history: int = 0
    """The run's history counter when it began; after a rewind, turns under a lower one are void."""
    routes: Routes | None = None
    """Rows of the positions before its last token; of all, or those since the parent's last row."""

    def without_routes_before(self, num_given: int) -> Sampled:
        """The same with the rows of a turn's own tokens alone; those before them are its parents' as first recorded."""
        if self.routes is None:
            return self
        return replace(self, routes=self.routes[-(num_given + len(self.token_ids)) :].copy())


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredRequest:
    """The request that a turn answers, as a repetition is recognised, and what its answer said beside the tokens."""

    key_digest: bytes
    body_digest: bytes
    response_id: str
    created_s: int
    """Seconds since the Unix epoch."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """One answer and its prompt."""

    parent: Turn | None
    """The turn that it continues."""
    given_token_ids: Int32
    """The tokens appended to the parent's: the whole prompt if there is no parent."""
    sampled: Sampled
    """The answer."""
    history: History
    """The conversation, this answer included, as the client will repeat it."""
    unsaid: str
    """Text of sampled tokens that the answer omits: the end token, the stop string."""
    begun_s: float = 0.0
    """When its request began, by the session's clock; 0 if that is not known."""
    ended_s: float = 0.0
    """When it was answered, likewise."""
    caller: str = ""
    """Trace context that the request named (W3C); empty if none."""
    answers: AnsweredRequest | None = None
    """None for a request that cannot be repeated."""

    @property
    def request(self) -> tuple[int, bytes]:
        """Identifies the request; equal for repeated requests."""
        return id(self.parent), self.given_token_ids.tobytes()

    def path(self) -> list[Turn]:
        """The path from the first turn to this one."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Branch:
    """A branch of a session as one token sequence; P prompt tokens, then C tokens."""

    prompt_token_ids: Int32
    """[P], the first turn's prompt."""
    token_ids: Int32
    """[C], answers and the tokens given between them."""
    logprobs: Float32
    """[C], nats; 0 for given tokens."""
    versions: Int64
    """[C]; a given token has the version of the token before it."""
    loss_mask: UInt8
    """[C], 1 for sampled tokens not counted in another branch."""
    is_truncated: bool
    """Whether its last answer was cut off."""
    routes: Routes | None = None
    """[P + C - 1, layers, experts_per_token]; those of given tokens are of the turn that they were given for."""


def token_ids_of(turn: Turn | None) -> list[int]:
    """All tokens up to the end of a turn; empty without a turn."""
    token_ids: list[int] = []
    for part in turn.path() if turn is not None else ():
        token_ids += part.given_token_ids.tolist()
        token_ids += part.sampled.token_ids.tolist()
    return token_ids


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """The turns of one attempt at a task."""

    session_id: str
    """Chosen by the client."""
    task: str
    """The task, shared with its siblings."""
    started_s: float
    """When its first request came, by a monotonic clock, so that setting the system clock ends no session."""
    last_used_s: float
    """When its last request came or was answered."""
    num_active: int = 0
    """Requests being answered."""
    turns: list[Turn] = field(default_factory=list)
    """Turns in the order in which they were answered."""
    num_bytes: int = 0
    """Approximate memory use."""
    undelivered: set[Turn] = field(default_factory=set)
    """Turns whose client disconnected before getting the whole answer."""
    has_named_task: bool = False
    """Whether the client named the task."""
    transcripts: dict[Turn, list[tuple[str, str]]] = field(default_factory=dict)
    """Conversations of the newest turn, and of the latest accepted one before it."""

    @property
    def run_history(self) -> int | None:
        """The lowest history counter of its turns; None before the first."""
        return min((turn.sampled.run_history for turn in self.turns), default=None)

    def longest_match(self, history: History) -> Turn | None:
        """The turn with the longest conversation that `history` begins with; of equals, the newest."""
        found: Turn | None = None
        for turn in self.turns:
            known = turn.history
            is_kin = type(known) is type(history) and history[: len(known)] == known
            if is_kin and (found is None or len(known) >= len(found.history)):
                found = turn
        return found

    def answer_to(self, key_digest: bytes) -> Turn | None:
        """The newest turn that answers a request of this key."""
        known = (turn for turn in reversed(self.turns) if turn.answers and turn.answers.key_digest == key_digest)
        return next(known, None)

    @property
    def latest(self) -> Turn | None:
        """The newest accepted turn."""
        left_out = self.not_taken()
        return next((turn for turn in reversed(self.turns) if turn not in left_out), None)

    @property
    def transcript(self) -> list[tuple[str, str]]:
        """The conversation of the latest turn as (role, text), for reward models."""
        latest = self.latest
        return self.transcripts.get(latest, []) if latest is not None else []

    def add(self, turn: Turn, transcript: list[tuple[str, str]]) -> None:
        """Record an answered turn."""
        latest = self.latest
        self.num_bytes += _size_bytes(turn) - _text_bytes(self.transcripts)
        self.transcripts = {kept: said for kept, said in self.transcripts.items() if kept is latest}
        self.transcripts[turn] = transcript
        self.num_bytes += _text_bytes(self.transcripts)
        self.turns.append(turn)

    def not_taken(self) -> set[Turn]:
        """Turns that the client neither continued nor kept: it did not get them whole, or repeated the request."""
        continued = {turn.parent for turn in self.turns}
        settled = {turn.request for turn in self.turns if turn in continued}
        left_out: set[Turn] = set()
        for turn in reversed(self.turns):
            if turn in continued:
                continue
            if turn in self.undelivered or turn.request in settled:
                left_out.add(turn)
            else:
                settled.add(turn.request)
        return left_out

    def branches(self) -> list[Branch]:
        """Every branch with an accepted end, in the order in which their last turns were answered."""
        left_out = self.not_taken()
        kept = [turn for turn in self.turns if turn not in left_out]
        parents = {turn.parent for turn in kept}
        counted: set[int] = set()
        return [_branch(turn.path(), counted) for turn in kept if turn not in parents]


def _branch(path: Sequence[Turn], counted: set[int]) -> Branch:
    token_ids, logprobs, versions, masks = [], [], [], []
    for position, turn in enumerate(path):
        sampled, num_given = turn.sampled, len(turn.given_token_ids)
        if position > 0:
            before = path[position - 1].sampled.versions
            token_ids.append(turn.given_token_ids)
            logprobs.append(np.zeros(num_given, np.float32))
            versions.append(np.full(num_given, before[-1], np.int64))
            masks.append(np.zeros(num_given, np.uint8))
        token_ids.append(sampled.token_ids)
        logprobs.append(sampled.logprobs)
        versions.append(sampled.versions)
        masks.append(np.full(len(sampled.token_ids), id(turn) not in counted, np.uint8))
        counted.add(id(turn))
    routes = [turn.sampled.routes for turn in path if turn.sampled.routes is not None]
    return Branch(
        prompt_token_ids=path[0].given_token_ids,
        token_ids=np.concatenate(token_ids),
        logprobs=np.concatenate(logprobs),
        versions=np.concatenate(versions),
        loss_mask=np.concatenate(masks),
        is_truncated=path[-1].sampled.is_truncated,
        routes=np.concatenate(routes) if routes else None,
    )


def _text_bytes(transcripts: dict[Turn, list[tuple[str, str]]]) -> int:
    return sum(len(text) for said in transcripts.values() for _, text in said)


def _size_bytes(turn: Turn) -> int:
    num_tokens = len(turn.given_token_ids) + len(turn.sampled.token_ids)
    items = turn.history if isinstance(turn.history, tuple) else ()
    route_bytes = 0 if turn.sampled.routes is None else turn.sampled.routes.nbytes
    return route_bytes + num_tokens * _TOKEN_BYTES + (64 * len(items) if items else len(turn.history))
