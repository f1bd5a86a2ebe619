"""One lease in hand: its sample's tokens, stream, slot and session with an environment, for those that act on it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from penstock.clients.sample_stream import SampleStream
from penstock.v1 import broker_pb2
from penstock.wire.codec import Int32, int32_array
from services.generator.decoding.kv_headroom import RunningSample
from services.generator.decoding.traces import LeaseTrace
from services.generator.engine.engine import FinishReason, GenerateRequest
from services.generator.environments.dialogue import Dialogue
from services.generator.environments.turn_tokens import TurnTokens

_log = structlog.get_logger()


class Runner(Protocol):
    """Decodes the leases in hand and decides when each is over: `Rollouts`."""

    def settle(self, work: LeaseWork) -> None:
        """A lease's last chunk is stored."""

    def refuse(self, work: LeaseWork, error: broker_pb2.ChunkError) -> None:
        """The broker refused a chunk."""

    async def decode_part(self, work: LeaseWork, request: GenerateRequest) -> FinishReason:
        """Decode a request into a sample's stream; returns why it ended."""

    def give(self, work: LeaseWork, token_ids: Sequence[int]) -> None:
        """Append tokens that a sample's environment gave."""

    def leave_slot(self, work: LeaseWork) -> None:
        """Give a sample's slot up while it waits for its environment."""

    async def enter_slot(self, work: LeaseWork) -> None:
        """Wait for a slot for a sample that left its own."""


@dataclass(slots=True, kw_only=True, eq=False)
class LeaseWork:
    """One lease in hand. It listens to its stream, and is the sample that an environment talks with (`Conversing`)."""

    lease: broker_pb2.Lease
    runner: Runner
    parts: list[Int32] = field(default_factory=list)
    """Completion tokens decoded here, for the text."""
    is_in_slot: bool = True
    is_finished: bool = False
    """Whether its last chunk is on its way."""
    dialogue: Dialogue | None = None
    """Its session with the environment, until that is closed."""
    stream: SampleStream = field(init=False)
    """Set as soon as it is opened, with this lease as its listener."""
    tokens: TurnTokens = field(init=False)
    """Into that stream; set once it is known whether routes come with them."""
    task: asyncio.Task[None] | None = None
    trace: LeaseTrace | None = None
    """If the sample is sampled."""

    @property
    def named(self) -> dict[str, str | int]:
        """Its sample, for a log line."""
        return {"group_id": self.lease.key.group_id, "sample_index": self.lease.key.sample_index}

    def completion(self) -> Sequence[int]:
        """The completion's token ids, those of earlier leases first."""
        token_ids: list[int] = int32_array(self.lease.prefix_token_ids, "prefix_token_ids").tolist()
        for part in self.parts:
            token_ids.extend(part.tolist())
        return token_ids

    def to_running(self, max_model_len: int) -> RunningSample:
        """What it takes of a KV cache, in a context of `max_model_len` tokens."""
        num_prompt_tokens = len(self.lease.prompt.token_ids) // 4
        limit = min(self.lease.prompt.sampling.max_new_tokens, max_model_len - num_prompt_tokens)
        return RunningSample(
            num_prompt_tokens=num_prompt_tokens,
            num_new_tokens=self.stream.num_tokens,
            max_new_tokens=max(1, limit),
        )

    # -- as the stream's listener --------------------------------------------------------------------------------------

    def settled(self) -> None:
        """The last chunk is stored."""
        self.runner.settle(self)

    def refused(self, error: broker_pb2.ChunkError) -> None:
        """The broker refuses its tokens."""
        self.runner.refuse(self, error)

    # -- as `Conversing` -----------------------------------------------------------------------------------------------

    async def decode(self, request: GenerateRequest) -> tuple[list[int], FinishReason]:
        """See `Conversing.decode`."""
        before = len(self.parts)
        reason = await self.runner.decode_part(self, request)
        return [token_id for part in self.parts[before:] for token_id in part.tolist()], reason

    def give(self, token_ids: Sequence[int]) -> None:
        """See `Conversing.give`."""
        self.runner.give(self, token_ids)

    async def stored(self) -> None:
        """See `Conversing.stored`."""
        await self.stream.wait_until_stored()

    def leave_slot(self) -> None:
        """See `Conversing.leave_slot`."""
        self.runner.leave_slot(self)

    async def enter_slot(self) -> None:
        """See `Conversing.enter_slot`."""
        await self.runner.enter_slot(self)


class GiveBack:
    """Hears how the return of a refused sample ended; if even that is refused, the lease is left to expire."""

    def settled(self) -> None:
        """The sample is back in the queue."""

    def refused(self, error: broker_pb2.ChunkError) -> None:
        """It is not; its lease is no longer renewed."""
        _log.info("return of a sample refused; its lease will expire", lease_id=error.lease_id, reason=error.reason)
