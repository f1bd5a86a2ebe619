"""Receives a consumer's stream of scored groups: StreamMicrobatches that survives a broker's restart.

Promises:

- At most `max_held_groups` groups are received and not yet released; credits are granted accordingly.
- After a reconnect the broker is sent the ids of those groups, and never hands them out a second time.
- A stream on which nothing arrives for SILENCE_LIMIT_S (the broker sends at least every 5 s) is reopened.
- A group sent in pieces counts as held once it is whole; if the stream ends earlier, its pieces are discarded. Besides
  the groups held, memory takes at most twice the largest group (`penstock.wire.pieces.MAX_GROUP_BYTES`).
- Errors that a retry cannot fix end the session and are raised by `next`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any, cast

from google.protobuf.message import DecodeError

from penstock.clients.streams import BackgroundStream
from penstock.errors import InternalError, InvalidFieldError, PenstockError, RunClosedError, VersionConflictError
from penstock.network.connection import Connection
from penstock.network.rpc import call_with_retry
from penstock.process.logger import get_logger
from penstock.process.time_limits import TimeLimit
from penstock.v1 import broker_pb2, broker_pb2_grpc, types_pb2
from penstock.wire import packed
from penstock.wire.pieces import Assembly

SILENCE_LIMIT_S = 20.0
_METHOD = "/penstock.v1.BrokerService/StreamMicrobatches"

_log = get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedMicrobatch:
    """Scored groups, ready to train on."""

    microbatch_id: str
    groups: list[types_pb2.TrajectoryGroup]
    """Whole groups, at least one; packed groups come last."""
    policy_version: int
    """The run's policy version when they were delivered."""


class MicrobatchSession(BackgroundStream):
    """One consumer of one run; an async context manager that connects on entry and releases everything on exit.

    Args:
        broker: Connection to it.
        hello: Names run and consumer, and says what to pull.
        max_held_groups: Most groups received and not released, >= 1.
    """

    def __init__(self, broker: Connection, hello: broker_pb2.TrainerHello, *, max_held_groups: int) -> None:
        super().__init__(broker, run_id=hello.run_id)
        # Responses arrive as bytes and are parsed together with the packed groups in them.
        self._stream_microbatches: Any = broker.channel.stream_stream(
            _METHOD, request_serializer=broker_pb2.StreamMicrobatchesRequest.SerializeToString
        )
        self._hello = hello
        self._hello.accepts_packed_groups = self._hello.accepts_group_pieces = True
        self._max_held_groups = max_held_groups
        self._held: dict[str, None] = {}
        self._received: asyncio.Queue[ReceivedMicrobatch | PenstockError] = asyncio.Queue()
        self._num_received_on_stream = 0
        self._assembly = Assembly()
        """The group being received in pieces."""
        self._credit_changed = asyncio.Event()
        self.waiting_reason = f"connecting to {broker.peer}"
        """Why there is no microbatch, from the broker's last message; for display."""
        self._ack_step = broker_pb2_grpc.BrokerServiceStub(broker.channel).AckStep
        self._version = 0
        """The run's policy version, as far as it is known."""

    @property
    def is_away(self) -> bool:
        """Whether there is no stream: missing groups then say nothing about generators or reward workers."""
        return not self._stream.is_up

    @property
    def num_connects(self) -> int:
        """Streams so far."""
        return self._stream.num_connects

    @property
    def held_group_ids(self) -> list[str]:
        """Groups received and not yet released, oldest first."""
        return list(self._held)

    async def next(self, *, timeout_s: float | None) -> ReceivedMicrobatch | None:
        """The next microbatch, or None if none came within `timeout_s` seconds (None waits indefinitely).

        Raises:
            RunClosedError: The run was closed.
            PenstockError: The broker refused the stream for good.
        """
        if self._received.empty() and self._failure is not None:
            raise self._failure
        try:
            with TimeLimit(timeout_s):
                found = await self._received.get()
        except TimeoutError:
            return None
        if isinstance(found, PenstockError):
            raise found
        return found

    async def __aiter__(self) -> AsyncIterator[ReceivedMicrobatch]:
        """Every microbatch, until the run is closed; waits while there is none. Raises PenstockError."""
        while True:
            try:
                microbatch = await self.next(timeout_s=None)
            except RunClosedError:
                return
            if microbatch is not None:
                yield microbatch

    async def ack(self, groups: Iterable[types_pb2.TrajectoryGroup]) -> broker_pb2.AckStepResponse:
        """Mark groups trained, as one step of the run, and let the broker send others.

        For a consumer without its own policy versions: the step makes the run's next version.

        Raises:
            LeaseLostError, StaleError, UnknownSampleError: A group is too old, was dropped, or is not held by this
                consumer; nothing is marked.
            PenstockError: See broker.proto.
        """
        request = broker_pb2.AckStepRequest(
            run_id=self._run_id,
            consumer_id=self._hello.consumer_id,
            group_ids=[group.prompt.group_id for group in groups],
            policy_version=self._version + 1,
            owner=self._hello.owner if self._hello.HasField("owner") else None,
        )
        while True:
            try:
                response = await call_with_retry(self._ack_step, request, peer=self._peer, give_up_after_s=None)
            except VersionConflictError as error:
                # Another consumer of the run has made the step.
                request.policy_version = int(error.metadata["policy_version"]) + 1
            else:
                break
        self._version = response.policy_version
        self.release(request.group_ids)
        return response

    def release(self, group_ids: Iterable[str]) -> None:
        """These groups are acknowledged or dropped: forget them and let the broker send others."""
        for group_id in group_ids:
            self._held.pop(group_id, None)
        self._credit_changed.set()

    async def _follow(self) -> None:
        self._num_received_on_stream, self._assembly = 0, Assembly()
        call = self._stream_microbatches()
        await self._stream.converse(call, self._requests(), self._take, max_silence_s=SILENCE_LIMIT_S)

    def _fail(self, error: PenstockError) -> None:
        super()._fail(error)
        self._received.put_nowait(error)

    def _note_lost(self, error: PenstockError) -> None:
        super()._note_lost(error)
        self.waiting_reason = self._stream.outage.described(error)

    async def _requests(self) -> AsyncGenerator[broker_pb2.StreamMicrobatchesRequest, None]:
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

    def _take(self, data: bytes) -> None:
        try:
            response = packed.StreamMicrobatchesResponse.FromString(data)
        except DecodeError as error:
            # The broker checked the groups when they were submitted.
            raise InternalError(f"{self._peer}: a response of {len(data)} bytes cannot be read: {error}") from error
        if response.WhichOneof("frame") == "waiting":
            self.waiting_reason = response.waiting.reason
            return
        self.waiting_reason = ""
        microbatch = response.microbatch
        groups = self._groups(microbatch)
        self._num_received_on_stream += len(groups)
        self._version = max(self._version, microbatch.policy_version)
        fresh = [group for group in groups if group.prompt.group_id not in self._held]
        if len(fresh) < len(groups):
            _log.warning("held groups were delivered again and are ignored", peer=self._peer)
            self._credit_changed.set()
        self._held.update(dict.fromkeys(group.prompt.group_id for group in fresh))
        if fresh:
            self._received.put_nowait(
                ReceivedMicrobatch(
                    microbatch_id=microbatch.microbatch_id, groups=fresh, policy_version=microbatch.policy_version
                )
            )

    def _groups(self, microbatch: Any) -> list[types_pb2.TrajectoryGroup]:
        """The groups completed by this message. Raises InternalError if its piece does not fit."""
        if not microbatch.HasField("piece"):
            if len(self._assembly):
                raise InternalError(f"{self._peer}: a group sent in pieces was interrupted by another one")
            return [*microbatch.groups, *microbatch.packed_groups.groups]
        try:
            whole = self._assembly.add(microbatch.piece.data, is_last=microbatch.piece.is_last)
            return [] if whole is None else [types_pb2.TrajectoryGroup.FromString(cast("bytes", whole))]
        except (InvalidFieldError, DecodeError) as error:
            raise InternalError(f"{self._peer}: a group in pieces cannot be read: {error}") from error
