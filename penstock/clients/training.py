"""A consumer's stream of scored groups: StreamMicrobatches that survives a broker's restart.

Promises:

- At most `max_held_groups` groups are in this process's hands: what was received and not yet released. Credits follow.
- After a reconnect the broker hears which groups are held; a group that is held is never handed out a second time.
- A stream that was silent for SILENCE_LIMIT_S (the broker speaks at least every 5 s) is taken for dead and reopened.
- A group that comes in pieces counts, and is held, once it is whole; a stream that ends before throws its pieces away.
  Beside the groups held, memory takes at most twice the largest group (`penstock.pieces.MAX_GROUP_BYTES`).
- Errors that a retry cannot heal end the session and are raised by `next`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any, Self, cast

import grpc
import structlog
from google.protobuf.message import DecodeError

from penstock import packed
from penstock.errors import (
    InternalError,
    InvalidFieldError,
    PenstockError,
    RunClosedError,
    ServiceUnavailableError,
)
from penstock.outage import Outage
from penstock.pieces import Assembly
from penstock.rpc import backoff_s, explained
from penstock.v1 import broker_pb2, types_pb2

SILENCE_LIMIT_S = 20.0
_METHOD = "/penstock.v1.BrokerService/StreamMicrobatches"

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscription:
    """What a consumer pulls."""

    run_id: str
    consumer_id: str
    """Names the consumer; stable over reconnects and restarts."""
    purpose: types_pb2.Purpose.ValueType
    max_held_groups: int
    """Most groups held at once, >= 1."""
    max_groups: int
    """Most groups in one microbatch, >= 1."""
    target_tokens: int = 0
    """Aim for about this many tokens a microbatch; 0 means no aim."""
    owner: broker_pb2.RunOwner | None = None
    """The trainer that pulls; None where the run has no named owner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedMicrobatch:
    """Scored groups, ready to train on."""

    microbatch_id: str
    groups: list[types_pb2.TrajectoryGroup]
    """Whole groups, at least one; those that came packed after the others."""
    policy_version: int
    """The run's policy version when they were handed out."""


class MicrobatchSession:
    """One consumer of one run; an async context manager that connects on entry and lets go of everything on exit.

    Args:
        channel: To the broker.
        peer: Names the broker in messages.
        subscription: What to pull.
    """

    def __init__(self, channel: grpc.aio.Channel, *, peer: str, subscription: Subscription) -> None:
        # Responses come as bytes and are read together with the packed groups in them.
        self._stream_microbatches: Any = channel.stream_stream(
            _METHOD, request_serializer=broker_pb2.StreamMicrobatchesRequest.SerializeToString
        )
        self._peer = peer
        self._hello = broker_pb2.TrainerHello(
            run_id=subscription.run_id,
            consumer_id=subscription.consumer_id,
            purpose=subscription.purpose,
            max_groups=subscription.max_groups,
            target_tokens=subscription.target_tokens,
            accepts_packed_groups=True,
            owner=subscription.owner,
            accepts_group_pieces=True,
        )
        self._max_held_groups = subscription.max_held_groups
        self._held: dict[str, None] = {}
        self._received: asyncio.Queue[ReceivedMicrobatch] = asyncio.Queue()
        self._num_received_on_stream = 0
        self._assembly = Assembly()
        """The group that comes in pieces."""
        self._credit_changed = asyncio.Event()
        self._reason = f"connecting to {peer}"
        self.is_away = True
        """Whether there is no stream: what does not come meanwhile says nothing of those who make it."""
        self._outage = Outage(peer)
        self._failure: PenstockError | None = None
        self._task: asyncio.Task[None] | None = None
        self.num_connects = 0

    async def __aenter__(self) -> Self:
        """Start pulling."""
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_exception: object) -> None:
        """End the stream; what is held goes back when the consumer says hello without it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def held_group_ids(self) -> list[str]:
        """Groups received and not yet released, oldest first."""
        return list(self._held)

    @property
    def waiting_reason(self) -> str:
        """Why there is nothing to hand out, for people; as of the last word from the broker."""
        return self._reason

    async def next(self, *, timeout_s: float) -> ReceivedMicrobatch | None:
        """The next microbatch, or None when none came within `timeout_s` seconds.

        Raises:
            RunClosedError: The run was closed.
            PenstockError: The broker refused the stream for good.
        """
        if self._received.empty():
            if self._failure is not None:
                raise self._failure
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._received.get()
            except TimeoutError:
                if self._failure is not None:
                    raise self._failure from None
                return None
        return self._received.get_nowait()

    def release(self, group_ids: Iterable[str]) -> None:
        """These groups are acknowledged or dropped: forget them and let the broker send others."""
        for group_id in group_ids:
            self._held.pop(group_id, None)
        self._credit_changed.set()

    async def _run(self) -> None:
        delays = backoff_s()
        while True:
            connects = self.num_connects
            try:
                await self._follow_one_stream()
                self._failure = RunClosedError(f"{self._peer}: the run was closed", run_id=self._hello.run_id)
                return
            except PenstockError as error:
                if not error.is_retryable:
                    self._failure = error
                    return
                self.is_away = True
                self._outage.failed(error)
                self._reason = self._outage.told(error)
            if self.num_connects > connects:
                delays = backoff_s()
            await asyncio.sleep(next(delays))

    async def _follow_one_stream(self) -> None:
        """Read until the stream ends; returns when the broker ended it with OK. Raises PenstockError."""
        self._num_received_on_stream, self._assembly = 0, Assembly()
        call = self._stream_microbatches(self._requests())
        try:
            is_first = True
            while (response := await self._read(call)) is not None:
                self.num_connects += is_first
                is_first = self.is_away = False
                self._outage.answered()
                self._take(response)
        except grpc.aio.AioRpcError as error:
            raise await explained(error, peer=self._peer) from error
        finally:
            call.cancel()

    async def _read(self, call: Any) -> Any:
        """A response; None when the stream is over. Raises InternalError: the broker checked groups when they came."""
        try:
            async with asyncio.timeout(SILENCE_LIMIT_S):
                data = await call.read()
        except TimeoutError:
            raise ServiceUnavailableError(f"{self._peer}: silent for {SILENCE_LIMIT_S:.0f} s") from None
        if not isinstance(data, bytes):
            return None
        try:
            return packed.StreamMicrobatchesResponse.FromString(data)
        except DecodeError as error:
            raise InternalError(f"{self._peer}: a response of {len(data)} bytes cannot be read: {error}") from error

    async def _requests(self) -> AsyncIterator[broker_pb2.StreamMicrobatchesRequest]:
        hello = broker_pb2.TrainerHello()
        hello.CopyFrom(self._hello)
        hello.held_group_ids.extend(self._held)
        credit = self._credit_total()
        yield broker_pb2.StreamMicrobatchesRequest(hello=hello, credit_total=credit)
        while True:
            await self._credit_changed.wait()
            self._credit_changed.clear()
            if self._credit_total() > credit:
                credit = self._credit_total()
                yield broker_pb2.StreamMicrobatchesRequest(credit_total=credit)

    def _credit_total(self) -> int:
        return self._num_received_on_stream + max(0, self._max_held_groups - len(self._held))

    def _take(self, response: Any) -> None:
        if response.WhichOneof("frame") == "waiting":
            self._reason = response.waiting.reason
            return
        self._reason = ""
        microbatch = response.microbatch
        groups = self._groups(microbatch)
        self._num_received_on_stream += len(groups)
        fresh = [group for group in groups if group.prompt.group_id not in self._held]
        if len(fresh) < len(groups):
            _log.warning("held groups were handed out again and are ignored", peer=self._peer)
            self._credit_changed.set()
        self._held.update(dict.fromkeys(group.prompt.group_id for group in fresh))
        if fresh:
            self._received.put_nowait(
                ReceivedMicrobatch(
                    microbatch_id=microbatch.microbatch_id, groups=fresh, policy_version=microbatch.policy_version
                )
            )

    def _groups(self, microbatch: Any) -> list[types_pb2.TrajectoryGroup]:
        """The groups that are whole with this message. Raises InternalError where its piece fits nowhere."""
        if not microbatch.HasField("piece"):
            if len(self._assembly):
                raise InternalError(f"{self._peer}: a group that came in pieces was broken off by another one")
            return [*microbatch.groups, *microbatch.packed_groups.groups]
        try:
            whole = self._assembly.add(microbatch.piece.data, is_last=microbatch.piece.is_last)
            return [] if whole is None else [types_pb2.TrajectoryGroup.FromString(cast("bytes", whole))]
        except (InvalidFieldError, DecodeError) as error:
            raise InternalError(f"{self._peer}: a group in pieces cannot be read: {error}") from error
