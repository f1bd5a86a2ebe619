"""Decides which chunks of a sample are stored, wherever its tokens are kept. Pure.

Promise: a chunk is stored only under the current lease, and only if it continues where the last one ended.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.routes import RoutingShape, num_route_rows, routes_fault
from services.broker.ingest.token_chunk import ChunkFacts
from services.broker.records_pb2 import GroupRecord

_QUEUED, _LEASED = broker_pb2.SAMPLE_STATE_QUEUED, broker_pb2.SAMPLE_STATE_LEASED


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The outcome for chunks; those in neither list are stored."""

    errors: list[broker_pb2.ChunkError]
    """The chunks that were refused."""
    repeated: list[ChunkFacts]
    """Chunks already stored under the same lease: accepted again without effect."""


def routed_prompt_tokens(group: GroupRecord) -> int:
    """Length of the group's prompt in tokens; 0 if its samples come without routes, since they are evaluated only."""
    return group.num_prompt_tokens if group.purpose == types_pb2.PURPOSE_TRAIN else 0


class ChunkRules:
    """Judges one generator's chunks; what is not stored is noted in `accepted`."""

    def __init__(
        self,
        generator_id: str,
        *,
        max_completion_tokens: int,
        policy_version: int,
        routing: RoutingShape | None,
        has_environment: bool,
    ) -> None:
        self._generator_id = generator_id
        self._max_tokens, self._policy_version = max_completion_tokens, policy_version
        self._routing = routing
        self._has_environment = has_environment
        self.accepted = Accepted(errors=[], repeated=[])

    def is_welcome(
        self,
        chunk: ChunkFacts,
        lease_id: str,
        holder_id: str,
        sample_state: broker_pb2.SampleState.ValueType,
        num_tokens: int,
        *,
        num_prompt_tokens: int,
    ) -> bool:
        """Whether to store a chunk of a sample with that lease, state and number of stored tokens.

        `num_prompt_tokens` is 0 for a sample that comes without routes.
        """
        is_held = lease_id == chunk.lease_id and holder_id == self._generator_id
        is_next = is_held and sample_state == _LEASED and chunk.offset == num_tokens
        if is_next and chunk.num_tokens and not (chunk.fault or self._fault(chunk, num_prompt_tokens)):
            # The common case: tokens of a sample that goes on. The code below handles any.
            return True
        if is_held and _is_stored(sample_state, num_tokens, chunk):
            self.accepted.repeated.append(chunk)
        elif not is_held or sample_state != _LEASED:
            self.refuse(chunk, "LEASE_LOST", num_tokens, "the lease expired or was revoked")
        elif chunk.offset != num_tokens:
            self.refuse(chunk, "OFFSET_MISMATCH", num_tokens, f"{num_tokens} tokens are stored")
        elif fault := chunk.fault or self._fault(chunk, num_prompt_tokens):
            self.refuse(chunk, "INVALID_FIELD", num_tokens, fault)
        else:
            return True
        return False

    def refuse(self, chunk: ChunkFacts, reason: str, next_offset: int, message: str) -> None:
        """Note that a chunk is not stored."""
        self.accepted.errors.append(chunk.refuse(reason, next_offset, message))

    def _fault(self, chunk: ChunkFacts, num_prompt_tokens: int) -> str:
        if chunk.end > self._max_tokens:
            return f"{chunk.end} completion tokens, but the run allows {self._max_tokens}"
        if chunk.max_version is not None and chunk.max_version > self._policy_version:
            return f"policy version {chunk.max_version} is ahead of the run's {self._policy_version}"
        if chunk.score is not None and not self._has_environment:
            return "score: set in a run whose policy has no environment"
        if self._routing is None and not chunk.routes.num_bytes:
            # The common case.
            return ""
        num_rows = num_route_rows(num_tokens=chunk.num_tokens, num_prompt_tokens=num_prompt_tokens, offset=chunk.offset)
        return routes_fault(self._routing if num_prompt_tokens else None, chunk.routes, num_rows)


def _is_stored(sample_state: broker_pb2.SampleState.ValueType, num_tokens: int, chunk: ChunkFacts) -> bool:
    """Whether a chunk from the sample's lease holder is a repetition; `num_tokens` are stored already."""
    if chunk.end > num_tokens:
        return False
    if sample_state == _LEASED:
        return chunk.num_tokens > 0 and not chunk.finish_reason
    was_aborted = chunk.finish_reason == types_pb2.FINISH_REASON_ABORTED
    return was_aborted or sample_state not in (_QUEUED, broker_pb2.SAMPLE_STATE_DROPPED)
