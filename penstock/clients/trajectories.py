"""A producer's side of PutTrajectories: finished, scored groups on one stream, each stored exactly once.

    put / send -> window -> request -> unanswered -> receipt
                              ^            |
                              +-- resent --+  stream lost, or the run holds as much as it may

Promises:

- At most `max_unanswered` requests are on the way, of MAX_UNANSWERED_BYTES together or one that is larger by itself;
  then `send` waits. So a stalled trainer slows its producers down, and memory does not grow anywhere.
- A request above MAX_BYTES_PER_PUT, which is one large group, goes in parts and is stored like any other.
- After a lost stream every unanswered request is sent again, as it was and in order; the broker knows it by its put id.
- A request that the broker had no room for is sent again after the delay the broker asked for. Groups keep the order of
  the calls if `max_unanswered` is 1; else a later request may pass one that had to wait.
- Errors that a retry cannot heal end the session and are raised by every call.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
import structlog

from penstock.clients.streams import BackgroundStream
from penstock.errors import InternalError, InvalidFieldError, PenstockError
from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.codec import field_prefix, group_parts, packed_parts
from penstock.wire.pieces import MAX_GROUP_BYTES, joined_pieces

MAX_GROUPS_PER_PUT = 1024
MAX_BYTES_PER_PUT = 4 * 1024 * 1024
"""Of one message; what is larger goes in parts."""
MAX_UNANSWERED_BYTES = 64 * 1024 * 1024
DEFAULT_UNANSWERED = 4
"""More are slower on one machine (their payload leaves the caches), fewer between sites."""
MAX_SILENCE_S = 20.0
"""An idle stream is closed after this, and opened again when there is something to send."""

_METHOD = "/penstock.v1.BrokerService/PutTrajectories"
_GROUPS = broker_pb2.PutTrajectoriesRequest.GROUPS_FIELD_NUMBER

_log = structlog.get_logger()


@dataclass(slots=True, kw_only=True)
class PutReceipt:
    """What became of the groups of one call."""

    num_samples: int = 0
    """Samples added to the run's books; none for groups that the run had already."""
    refused: list[types_pb2.ItemError] = field(default_factory=list)
    """Groups that are not stored and never will be; `index` counts from the first group of the call."""


@dataclass(slots=True, kw_only=True)
class _Sent:
    head: broker_pb2.PutTrajectoriesRequest
    """Without the groups."""
    parts: Sequence[bytes]
    """A serialized TrajectoryGroups, in parts."""
    size_bytes: int
    receipt: asyncio.Future[PutReceipt]
    is_written: bool = False

    def messages(self) -> Iterator[bytes]:
        """The serialized request, or each of those that it is cut into."""
        if self.size_bytes <= MAX_BYTES_PER_PUT:
            yield b"".join((self.head.SerializeToString(), field_prefix(_GROUPS, self.size_bytes), *self.parts))
            return
        self.head.total_bytes, start = self.size_bytes, 0
        for piece in joined_pieces(self.parts):
            self.head.offset = start
            yield b"".join((self.head.SerializeToString(), field_prefix(_GROUPS, len(piece)), piece))
            start += len(piece)


class TrajectorySession(BackgroundStream):
    """One producer of one run; an async context manager that sends in the background until it is left.

    Args:
        channel: To the broker.
        run_id: Which run.
        producer_id: Names the producer; stable over reconnects and restarts, 1 to 128 characters.
        peer: Names the broker in messages.
        max_unanswered: Requests on the way at once, >= 1.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        run_id: str,
        producer_id: str,
        peer: str,
        max_unanswered: int = DEFAULT_UNANSWERED,
    ) -> None:
        super().__init__(run_id=run_id, peer=peer)
        # Requests go as bytes, made here without a copy of what they carry: see `send`.
        self._put_trajectories: Any = channel.stream_stream(
            _METHOD, response_deserializer=broker_pb2.PutTrajectoriesResponse.FromString
        )
        self._producer_id = producer_id
        self._max_unanswered = max_unanswered
        self._session_id = secrets.token_hex(6)
        self._num_requests = 0
        self._unanswered: dict[str, _Sent] = {}
        self._unanswered_bytes = 0
        self._paused_until_s = 0.0
        self._work = asyncio.Event()
        self._room = asyncio.Event()
        self.num_refusals = 0
        """Requests the broker had no room for so far; each is sent again."""

    async def __aexit__(self, *_exception: object) -> None:
        """Stop; what is unanswered may or may not be stored, and its callers get a CancelledError."""
        await super().__aexit__()
        for sent in self._unanswered.values():
            sent.receipt.cancel()

    async def put(
        self, groups: Sequence[types_pb2.TrajectoryGroup], *, max_groups: int = MAX_GROUPS_PER_PUT
    ) -> PutReceipt:
        """Store groups, any number, in order, in as few requests as fit; waits until all of them are stored.

        Waits as long as the broker has no room: bound it with `asyncio.timeout`.

        Args:
            groups: Purpose TRAIN, every sample scored OK; see broker.proto for their bounds.
            max_groups: Most groups a request, at most the run's groups_per_step.

        Raises:
            RunClosedError: The run was closed.
            PenstockError: The broker refused the stream for good.
        """
        receipts: list[tuple[int, asyncio.Future[PutReceipt]]] = []
        start = 0
        for part in split(groups, max_groups=max_groups):
            receipts.append((start, await self.send(part)))
            start += len(part)
        whole = PutReceipt()
        for first, pending in receipts:
            receipt = await pending
            whole.num_samples += receipt.num_samples
            for error in receipt.refused:
                error.index += first
                whole.refused.append(error)
        return whole

    async def send(
        self, groups: Sequence[types_pb2.TrajectoryGroup], *, put_id: str | None = None
    ) -> asyncio.Future[PutReceipt]:
        """Hand over one request's worth of groups; waits for room in the window and returns the receipt to come.

        Args:
            groups: 1 to MAX_GROUPS_PER_PUT groups of at most MAX_GROUP_BYTES; above MAX_BYTES_PER_PUT it goes in parts.
            put_id: Names the request among the producer's; give the same one to repeat a request of an earlier process.

        Raises:
            ValueError: The groups are too many or too large for one request; `split` them.
        """
        parts = packed_parts(groups)
        size_bytes = sum(map(len, parts))
        if not 1 <= len(groups) <= MAX_GROUPS_PER_PUT or size_bytes > MAX_GROUP_BYTES:
            raise ValueError(
                f"{len(groups)} groups of {size_bytes} bytes; a put holds 1 to {MAX_GROUPS_PER_PUT} groups of at most "
                f"{MAX_GROUP_BYTES} bytes: send fewer"
            )
        while not self._has_room(size_bytes) and self._failure is None:
            self._room.clear()
            await self._room.wait()
        if self._failure is not None:
            raise self._failure
        self._num_requests += 1
        put_id = put_id or f"{self._session_id}-{self._num_requests}"
        if put_id in self._unanswered:
            return self._unanswered[put_id].receipt
        head = broker_pb2.PutTrajectoriesRequest(run_id=self._run_id, producer_id=self._producer_id, put_id=put_id)
        receipt: asyncio.Future[PutReceipt] = asyncio.get_running_loop().create_future()
        self._unanswered[put_id] = _Sent(head=head, parts=parts, size_bytes=size_bytes, receipt=receipt)
        self._unanswered_bytes += size_bytes
        self._work.set()
        return receipt

    def _has_room(self, size_bytes: int) -> bool:
        """Whether a request may join those on the way."""
        if not self._unanswered:
            return True
        has_bytes = self._unanswered_bytes + size_bytes <= MAX_UNANSWERED_BYTES
        return has_bytes and len(self._unanswered) < self._max_unanswered

    async def _follow(self) -> None:
        if not self._unanswered:
            self._work.clear()
            await self._work.wait()
        for sent in self._unanswered.values():
            sent.is_written = False
        call = self._put_trajectories()
        await self._stream.converse(call, self._requests(), self._take, max_silence_s=MAX_SILENCE_S)

    def _note_lost(self, error: PenstockError) -> None:
        # No outage: an idle stream ends, too.
        if self._unanswered:
            _log.info("put stream lost", peer=self._peer, error=str(error), num_waiting=len(self._unanswered))

    async def _requests(self) -> AsyncGenerator[bytes, None]:
        loop = asyncio.get_running_loop()
        while True:
            sent = next((sent for sent in self._unanswered.values() if not sent.is_written), None)
            pause_s = self._paused_until_s - loop.time()
            if sent is not None and pause_s <= 0:
                sent.is_written = True
                for message in sent.messages():
                    yield message
                    if not sent.is_written:
                        # Refused before all of its parts were sent.
                        break
                continue
            self._work.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s if sent is not None else None):
                    await self._work.wait()

    def _take(self, response: broker_pb2.PutTrajectoriesResponse) -> None:
        sent = self._unanswered.get(response.put_id)
        if sent is None:
            raise InternalError(f"{self._peer}: answered put {response.put_id!r}, which was not sent")
        if response.received_bytes:
            return
        if response.HasField("retry_delay"):
            self.num_refusals += 1
            sent.is_written = False
            delay_s = response.retry_delay.ToNanoseconds() / 1e9
            self._paused_until_s = asyncio.get_running_loop().time() + delay_s
        else:
            del self._unanswered[response.put_id]
            self._unanswered_bytes -= sent.size_bytes
            self._room.set()
            if not sent.receipt.done():
                receipt = PutReceipt(num_samples=response.num_samples, refused=list(response.errors))
                sent.receipt.set_result(receipt)
        self._work.set()

    def _fail(self, error: PenstockError) -> None:
        super()._fail(error)
        self._room.set()
        for sent in self._unanswered.values():
            if not sent.receipt.done():
                sent.receipt.set_exception(error)
                # Marked as looked at: a caller that sent several may never await the later ones.
                sent.receipt.exception()
        self._unanswered.clear()
        self._unanswered_bytes = 0


def split(
    groups: Sequence[types_pb2.TrajectoryGroup], *, max_groups: int = MAX_GROUPS_PER_PUT
) -> Iterator[Sequence[types_pb2.TrajectoryGroup]]:
    """Groups in order, in parts that fit one request each; a group above MAX_BYTES_PER_PUT is a part by itself.

    Raises InvalidFieldError where a single group is larger than MAX_GROUP_BYTES.
    """
    start, num_bytes = 0, 0
    for position, group in enumerate(groups):
        size_bytes = sum(map(len, group_parts(group))) + 8
        if size_bytes > MAX_GROUP_BYTES:
            raise InvalidFieldError(
                f"groups: group {group.prompt.group_id!r} has {size_bytes} bytes; a put holds {MAX_GROUP_BYTES}",
                field="groups",
            )
        if position > start and (position - start >= max_groups or num_bytes + size_bytes > MAX_BYTES_PER_PUT):
            yield groups[start:position]
            start, num_bytes = position, 0
        num_bytes += size_bytes
    if start < len(groups):
        yield groups[start:]
