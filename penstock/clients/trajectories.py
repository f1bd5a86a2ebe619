"""Implements a producer's side of PutTrajectories: finished, scored groups on one stream, each stored exactly once.

    put / send -> window -> request -> unanswered -> receipt
                              ^            |
                              +-- resent --+  stream lost, or the run is full

Promises:

- At most `max_unanswered` requests are in flight, of at most MAX_UNANSWERED_BYTES in total unless a single one is
  larger; then `send` waits. So a stalled trainer slows down its producers, and memory does not grow anywhere.
- A request above MAX_BYTES_PER_PUT, which is one large group, goes in parts and is stored like any other.
- After a lost stream every unanswered request is sent again, unchanged and in order; the broker recognises its put id.
- A request refused for lack of capacity is sent again after the delay that the broker states. Groups keep the order of
  the calls if `max_unanswered` is 1; otherwise a later request may overtake one that had to wait.
- Errors that a retry cannot fix end the session and are raised by every call.
"""

from __future__ import annotations

import asyncio
import copy
import secrets
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.clients.streams import BackgroundStream
from penstock.errors import InternalError, PenstockError, RefusedError, require
from penstock.network.connection import Connection
from penstock.network.rpc import call_with_retry
from penstock.process.logger import get_logger
from penstock.process.time_limits import Wake
from penstock.v1 import broker_pb2, broker_pb2_grpc, types_pb2
from penstock.wire.codec import field_prefix, group_parts, packed_parts
from penstock.wire.pieces import MAX_GROUP_BYTES, batched, joined_pieces
from penstock.wire.trajectory_groups import complete_group

MAX_GROUPS_PER_PUT = 1024
MAX_BYTES_PER_PUT = 4 * 1024 * 1024
"""Size limit of one message; larger requests are sent in parts."""
FILLED_BYTES_PER_PUT = 2 * 1024 * 1024
"""Size up to which groups share a request: long trajectories in requests of twice the size take a fifth longer, since
every buffer on their way outgrows the caches."""
MAX_UNANSWERED_BYTES = 64 * 1024 * 1024
DEFAULT_UNANSWERED = 4
"""More are slower on one machine (their payload leaves the caches), fewer are slower between sites."""
MAX_LEFT_PUTS = 1024
"""Refused puts whose receipts were not awaited; with more, the next put reports them."""
MAX_SILENCE_S = 20.0
"""An idle stream is closed after this, and opened again when there is something to send."""

_METHOD = "/penstock.v1.BrokerService/PutTrajectories"
_GROUPS = broker_pb2.PutTrajectoriesRequest.GROUPS_FIELD_NUMBER

_log = get_logger()


@dataclass(slots=True, kw_only=True)
class PutReceipt:
    """Outcome of the groups of one call."""

    num_samples: int = 0
    """Samples added to the run's counters; none for groups that the run already had."""
    refused: list[types_pb2.ItemError] = field(default_factory=list)
    """Groups refused for good; `index` counts from the first group of the call."""


class PendingPut:
    """The future receipt of one `put`: await it, or leave it to `flush`."""

    def __init__(self, left: dict[PendingPut, None]) -> None:
        self._left = left
        self._parts: list[tuple[int, asyncio.Future[PutReceipt]]] = []
        """The first group of each request, and its receipt."""
        self._num_groups = 0

    def __await__(self) -> Generator[Any, None, PutReceipt]:
        """The outcome of the groups. Raises PenstockError if the session has failed."""
        self._left.pop(self, None)
        return self._whole().__await__()

    async def _whole(self) -> PutReceipt:
        whole = PutReceipt()
        for first, pending in self._parts:
            receipt = await asyncio.shield(pending)
            whole.num_samples += receipt.num_samples
            for error in copy.deepcopy(receipt.refused):
                error.index += first
                whole.refused.append(error)
        return whole

    def add(self, part: asyncio.Future[PutReceipt], *, num_groups: int) -> None:
        """Add another request of the put."""
        self._parts.append((self._num_groups, part))
        self._num_groups += num_groups
        self._left[self] = None
        part.add_done_callback(self._note_answer)

    def _note_answer(self, _part: asyncio.Future[PutReceipt]) -> None:
        # A session that is never flushed must not keep all its puts.
        if all(_is_stored(part) for _first, part in self._parts):
            self._left.pop(self, None)


def _is_stored(part: asyncio.Future[PutReceipt]) -> bool:
    return part.done() and not part.cancelled() and part.exception() is None and not part.result().refused


@dataclass(slots=True, kw_only=True)
class _Sent:
    head: broker_pb2.PutTrajectoriesRequest
    """The request without the groups."""
    parts: Sequence[bytes]
    """A serialized TrajectoryGroups, in parts."""
    size_bytes: int
    receipt: asyncio.Future[PutReceipt]
    is_written: bool = False

    def messages(self) -> Iterator[bytes]:
        """The serialized request, or the serialized parts that it is split into."""
        if self.size_bytes <= MAX_BYTES_PER_PUT:
            yield b"".join((self.head.SerializeToString(), field_prefix(_GROUPS, self.size_bytes), *self.parts))
            return
        self.head.total_bytes, start = self.size_bytes, 0
        for piece in joined_pieces(self.parts):
            self.head.offset = start
            yield b"".join((self.head.SerializeToString(), field_prefix(_GROUPS, len(piece)), piece))
            start += len(piece)


class TrajectorySession(BackgroundStream):
    """One producer of one run; an async context manager that sends in the background until exit.

    Args:
        broker: Connection to it.
        run_id: Which run.
        producer_id: Names the producer; stable across reconnects and restarts, 1 to 128 characters.
        max_unanswered: Most requests in flight, >= 1.
    """

    def __init__(
        self,
        broker: Connection,
        *,
        run_id: str,
        producer_id: str,
        max_unanswered: int = DEFAULT_UNANSWERED,
    ) -> None:
        super().__init__(broker, run_id=run_id)
        # Requests are sent as bytes, serialized here without copying their payload: see `send`.
        self._put_trajectories: Any = broker.channel.stream_stream(
            _METHOD, response_deserializer=broker_pb2.PutTrajectoriesResponse.FromString
        )
        self._producer_id = producer_id
        self._max_unanswered = max_unanswered
        self._session_id = secrets.token_hex(6)
        self._num_requests = 0
        self._unanswered: dict[str, _Sent] = {}
        self._unanswered_bytes = 0
        self._paused_until_s = 0.0
        self._work = Wake()
        self._room = asyncio.Event()
        self._get_run = broker_pb2_grpc.BrokerServiceStub(broker.channel).GetRun
        self._groups_per_step = 0
        self._left: dict[PendingPut, None] = {}
        """Puts whose receipts were not awaited, except those stored completely."""
        self.num_refusals = 0
        """Requests that the broker had no capacity for so far; each is sent again."""

    async def __aexit__(self, *exception: object) -> None:
        """`flush`, unless the block raised an exception: unanswered groups may or may not be stored then."""
        try:
            if exception[:1] == (None,):
                await self.flush()
        finally:
            await super().__aexit__()
            for sent in self._unanswered.values():
                sent.receipt.cancel()

    async def put(
        self,
        groups: types_pb2.TrajectoryGroup | Sequence[types_pb2.TrajectoryGroup],
        *,
        max_groups: int | None = None,
    ) -> PendingPut:
        """Send any number of groups, in order, as many a request as travel fast; waits only for space in the window.

        Waits while the broker has no capacity: bound it with `asyncio.timeout`. If the receipt is not awaited, `flush`
        raises an error for refused groups.

        Args:
            groups: Scored groups; see broker.proto for their bounds. `complete_group` fills in unset fields.
            max_groups: Most groups per request; None means as many as the run accepts.

        Raises:
            RefusedError: More than MAX_LEFT_PUTS puts were refused and neither awaited nor flushed; nothing is sent.
            RunClosedError: The run was closed.
            PenstockError: The broker refused the stream for good.
        """
        if len(self._left) > MAX_LEFT_PUTS:
            await self.flush()
        if isinstance(groups, types_pb2.TrajectoryGroup):
            groups = [groups]
        for group in groups:
            complete_group(group)
        if max_groups is None:
            max_groups = 1 if len(groups) == 1 else await self._most_groups()
        pending = PendingPut(self._left)
        for part in split(groups, max_groups=max_groups):
            pending.add(await self.send(part), num_groups=len(part))
        return pending

    async def store(self, groups: Sequence[types_pb2.TrajectoryGroup], *, max_groups: int | None = None) -> PutReceipt:
        """`put`, and wait for the receipt."""
        return await (await self.put(groups, max_groups=max_groups))

    async def flush(self) -> None:
        """Wait until the broker has answered every group sent so far.

        Raises:
            RefusedError: It refused some whose receipts were not awaited.
            PenstockError: As `put` does.
        """
        left, receipts = list(self._left), [sent.receipt for sent in self._unanswered.values()]
        refused = [error for pending in left for error in (await pending).refused]
        for receipt in receipts:
            await asyncio.shield(receipt)
        if refused:
            raise RefusedError(
                f"{self._peer}: {len(refused)} groups were refused, the first of them: {refused[0].message}",
                refusals=[error.message for error in refused],
                reason=refused[0].reason,
            )

    async def _most_groups(self) -> int:
        """Groups of one request: as many as a step of the run has."""
        if not self._groups_per_step:
            request = broker_pb2.GetRunRequest(run_id=self._run_id)
            run = await call_with_retry(self._get_run, request, peer=self._peer, give_up_after_s=None)
            self._groups_per_step = min(MAX_GROUPS_PER_PUT, run.limits.groups_per_step)
        return self._groups_per_step

    async def send(self, groups: Sequence[types_pb2.TrajectoryGroup]) -> asyncio.Future[PutReceipt]:
        """Send groups as one request; waits for space in the window and returns the future receipt.

        Args:
            groups: 1 to MAX_GROUPS_PER_PUT groups of at most MAX_GROUP_BYTES; in parts above MAX_BYTES_PER_PUT.

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
        put_id = f"{self._session_id}-{self._num_requests}"
        head = broker_pb2.PutTrajectoriesRequest(run_id=self._run_id, producer_id=self._producer_id, put_id=put_id)
        receipt: asyncio.Future[PutReceipt] = asyncio.get_running_loop().create_future()
        self._unanswered[put_id] = _Sent(head=head, parts=parts, size_bytes=size_bytes, receipt=receipt)
        self._unanswered_bytes += size_bytes
        self._work.set()
        return receipt

    def _has_room(self, size_bytes: int) -> bool:
        """Whether another request fits in the window."""
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
        # Not an outage: an idle stream ends, too.
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
            if sent is None:
                await self._work.wait()
            else:
                await self._work.take_within(pause_s)

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
                # Marked as retrieved: a caller that sent several may never await the later ones.
                sent.receipt.exception()
        self._unanswered.clear()
        self._unanswered_bytes = 0


def split(
    groups: Sequence[types_pb2.TrajectoryGroup], *, max_groups: int = MAX_GROUPS_PER_PUT
) -> Iterator[Sequence[types_pb2.TrajectoryGroup]]:
    """Split groups in order into parts, one a request, of FILLED_BYTES_PER_PUT; a larger group is a part by itself.

    Raises InvalidFieldError if a single group is larger than MAX_GROUP_BYTES.
    """
    return batched(groups, _size_bytes, FILLED_BYTES_PER_PUT, most_items=max_groups)


def _size_bytes(group: types_pb2.TrajectoryGroup) -> int:
    size_bytes = sum(map(len, group_parts(group))) + 8
    shown = f"group {group.prompt.group_id!r} of {size_bytes} bytes"
    require(size_bytes <= MAX_GROUP_BYTES, "groups", shown, f"at most {MAX_GROUP_BYTES} bytes, which a put holds")
    return size_bytes
