"""Implements a generator's side of StreamTokens: tokens of many samples on one stream, each stored exactly once.

    SampleStream.append -> buffer -> request (a chunk a sample) -> unacknowledged -> stored
                                        ^                              |
                                        +---- resent unchanged --------+  stream lost

Promises:

- Tokens wait at most for the flush interval, or until TARGET_REQUEST_BYTES are buffered, before they are sent. The
  interval is `flush_interval_s`, or what a broker that falls behind asks for, if that is longer: then up to half of
  MAX_BUFFERED_BYTES wait, 2 s of a generator that decodes 32,768 tokens a second.
- At most MAX_UNACKNOWLEDGED requests are in flight and MAX_BUFFERED_BYTES are queued; then `wait_for_room` waits. So a
  slow or absent broker slows down decoding, and memory does not grow.
- After a lost stream unacknowledged requests are sent again unchanged and in order; the broker recognises them by
  their offsets.
- A refused chunk ends its SampleStream: the listener gets the reason, once, and nothing more is sent.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass
from itertools import count

from penstock.clients.sample_stream import SampleStream, StreamListener
from penstock.clients.streams import PERMANENT_ERRORS, Reconnecting
from penstock.errors import InternalError, PenstockError, RunClosedError, ServiceUnavailableError, UnknownRunError
from penstock.flush_interval import asked_s
from penstock.network.connection import Connection
from penstock.process.logger import get_logger
from penstock.process.tasks import set_within
from penstock.v1 import broker_pb2, broker_pb2_grpc, types_pb2

TARGET_REQUEST_BYTES = 64 * 1024
MAX_CHUNKS_PER_REQUEST = 4096
MAX_UNACKNOWLEDGED = 8
MAX_BUFFERED_BYTES = 1024 * 1024
MAX_SILENCE_S = 20.0
"""An idle stream is closed after this, and opened again when there is something to send."""

_log = get_logger()


@dataclass(slots=True, kw_only=True)
class _Sent:
    """An unacknowledged request; `request.sequence` is 0 until it is written to the current stream."""

    request: broker_pb2.StreamTokensRequest
    streams: list[SampleStream]
    """One for each chunk."""
    taken_s: float
    """When it was taken, by the event loop's clock."""


class TokenSession:
    """The token stream of one generator.

    Args:
        broker: Connection to it.
        run_id: Which run.
        generator_id: Which generator.
        flush_interval_s: Longest time a token waits before it is sent, seconds, unless the broker asks for more.
        on_map: Called with what the broker says of who owns token shards.
    """

    def __init__(
        self,
        broker: Connection,
        *,
        run_id: str,
        generator_id: str,
        flush_interval_s: float,
        on_map: Callable[[broker_pb2.ShardMap], None] = lambda _map: None,
    ) -> None:
        self._stub = broker_pb2_grpc.BrokerServiceStub(broker.channel)
        self._run_id = run_id
        self._generator_id = generator_id
        self._flush_interval_s = flush_interval_s
        self._on_map = on_map
        self._stream = Reconnecting(broker.peer)
        self._patience: asyncio.Timeout | None = None
        """Of the current stream."""
        self.must_pass_on = False
        """Whether the broker must pass on chunks of shards that it does not own, however many."""
        self._asked_s = 0.0
        """The flush interval that the broker last asked for; 0 if it asked for none."""
        self._dirty: dict[SampleStream, float] = {}
        """Since when, oldest first."""
        self._buffered_bytes = 0
        self._unacknowledged: deque[_Sent] = deque()
        self._to_resend: deque[_Sent] = deque()
        """Those that are to be sent on the current stream before anything else."""
        self._is_flushing = False
        self._work = asyncio.Event()
        self._room = asyncio.Event()
        self._settled = asyncio.Event()
        self._room.set()
        self._settled.set()
        self.num_tokens_stored = 0
        """Tokens that the broker has acknowledged since the start."""

    def open(
        self, key: types_pb2.SampleKey, *, lease_id: str, offset: int, listener: StreamListener, token_shard: int = 0
    ) -> SampleStream:
        """Open a stream for the tokens of one lease, which follow `offset` accepted ones."""
        return SampleStream(
            key,
            lease_id=lease_id,
            offset=offset,
            listener=listener,
            on_change=self._note_change,
            token_shard=token_shard,
        )

    @property
    def flush_interval_s(self) -> float:
        """How long tokens are gathered now: for its own interval, or what the broker asks for, if that is longer."""
        return max(self._flush_interval_s, self._asked_s)

    @property
    def _most_waiting_bytes(self) -> int:
        """Buffered bytes that are sent before the interval is over."""
        return MAX_BUFFERED_BYTES // 2 if self._is_asked else TARGET_REQUEST_BYTES

    @property
    def _is_asked(self) -> bool:
        return self._asked_s > self._flush_interval_s

    @property
    def has_room(self) -> bool:
        """Whether tokens may be appended without `wait_for_room`."""
        return self._buffered_bytes < MAX_BUFFERED_BYTES

    async def wait_for_room(self) -> None:
        """Wait until the broker has taken enough of the buffered tokens."""
        await self._room.wait()

    async def flush(self, *, timeout_s: float) -> bool:
        """Send everything now; returns whether the broker acknowledged it all within `timeout_s` seconds."""
        self._is_flushing = True
        self._work.set()
        try:
            return await set_within(self._settled, timeout_s)
        finally:
            self._is_flushing = False

    async def run(self) -> None:
        """Send until cancelled. Raises PenstockError if a retry cannot help."""
        await self._stream.run(self._follow, self._on_end)

    async def run_until_lost(self) -> None:
        """Send until the stream ends with anything unacknowledged, for whatever reason, which is then raised.

        For one of several brokers: whether the run is closed is left to the others to say.
        """
        while True:
            try:
                await self._follow()
            except PenstockError:
                if self._unacknowledged:
                    raise
            if self._unacknowledged:
                raise ServiceUnavailableError(f"{self._stream.peer}: ended the stream")

    def _on_end(self, error: PenstockError | None) -> None:
        if error is None:
            self._void("RUN_CLOSED", "the broker ended the stream")
        elif isinstance(error, (RunClosedError, UnknownRunError)):
            self._void(error.reason, str(error))
        elif isinstance(error, PERMANENT_ERRORS):
            raise error
        elif self._unacknowledged and self._stream.is_news:
            _log.info("token stream lost", error=str(error), num_unacknowledged=len(self._unacknowledged))

    async def _follow(self) -> None:
        if not self._dirty and not self._unacknowledged:
            self._work.clear()
            await self._work.wait()
        for sent in self._unacknowledged:
            sent.request.sequence = 0
        call = self._stub.StreamTokens()
        try:
            async with asyncio.timeout(None) as self._patience:
                await self._stream.converse(call, self._requests(), self._acknowledge, max_silence_s=MAX_SILENCE_S)
        except TimeoutError:
            raise ServiceUnavailableError(f"{self._stream.peer}: left, as it does not answer") from None
        finally:
            self._patience = None

    async def _requests(self) -> AsyncGenerator[broker_pb2.StreamTokensRequest, None]:
        self._to_resend = self._unacknowledged.copy()
        for sequence in count(1):
            if not self._to_resend:
                await self._wait_until_due()
            sent = self._to_resend.popleft() if self._to_resend else self._take()
            sent.request.sequence = sequence
            yield sent.request

    async def _wait_until_due(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._to_resend:
            has_window = len(self._unacknowledged) < MAX_UNACKNOWLEDGED
            wait_s: float | None = None
            if self._dirty and has_window:
                wait_s = next(iter(self._dirty.values())) + self.flush_interval_s - loop.time()
                if wait_s <= 0 or self._is_flushing:
                    return
                if self._buffered_bytes >= self._most_waiting_bytes:
                    if self._is_asked:
                        # More than a request holds: all that waits now leaves.
                        self._dirty = dict.fromkeys(self._dirty, -math.inf)
                    return
            self._work.clear()
            await set_within(self._work, wait_s)

    def _take(self) -> _Sent:
        request = broker_pb2.StreamTokensRequest(
            run_id=self._run_id, generator_id=self._generator_id, must_pass_on=self.must_pass_on
        )
        streams: list[SampleStream] = []
        num_bytes = 0
        while self._dirty and num_bytes < TARGET_REQUEST_BYTES and len(streams) < MAX_CHUNKS_PER_REQUEST:
            stream = next(iter(self._dirty))
            before_bytes = stream.buffered_bytes
            chunk = stream.take_chunk()
            self._buffered_bytes += stream.buffered_bytes - before_bytes
            if not stream.is_dirty:
                del self._dirty[stream]
            num_bytes += chunk.ByteSize()
            streams.append(stream)
            request.chunks.append(chunk)
        sent = _Sent(request=request, streams=streams, taken_s=asyncio.get_running_loop().time())
        self._unacknowledged.append(sent)
        self._update_events()
        return sent

    def _acknowledge(self, response: broker_pb2.StreamTokensResponse) -> None:
        sent = next((item for item in self._unacknowledged if item.request.sequence == response.sequence), None)
        if sent is None or response.sequence == 0:
            raise InternalError(f"{self._stream.peer}: acknowledged request {response.sequence}, which was not sent")
        self._unacknowledged.remove(sent)
        self._asked_s = asked_s(response.flush_interval)
        errors = {error.lease_id: error for error in response.errors}
        for stream, chunk in zip(sent.streams, sent.request.chunks, strict=True):
            error = errors.get(chunk.lease_id)
            if error is not None:
                stream.refuse(error)
            elif not stream.is_closed:
                self.num_tokens_stored += len(chunk.token_ids) // 4
                stream.note_stored(chunk.offset + len(chunk.token_ids) // 4)
                if chunk.finish_reason != types_pb2.FINISH_REASON_UNSPECIFIED:
                    stream.settle()
        self._update_events()
        if response.HasField("shard_map"):
            self._on_map(response.shard_map)

    # -- samples that move between sessions ----------------------------------------------------------------------------

    @property
    def overdue_s(self) -> float:
        """How long ago the oldest request without an answer was taken; 0 if there is none."""
        oldest = self._unacknowledged[0] if self._unacknowledged else None
        return 0.0 if oldest is None else asyncio.get_running_loop().time() - oldest.taken_s

    def unacknowledged(self) -> set[SampleStream]:
        """The samples with chunks that the broker has not acknowledged: they must not move yet."""
        return {stream for sent in self._unacknowledged for stream in sent.streams}

    def reconnect(self) -> None:
        """Give the current stream up, and send what is unacknowledged again on another one."""
        if self._patience is not None:
            self._patience.reschedule(asyncio.get_running_loop().time())

    def release(self, stream: SampleStream) -> None:
        """Send nothing more of a sample without unacknowledged chunks."""
        self._dirty.pop(stream, None)
        self._buffered_bytes -= stream.buffered_bytes
        self._update_events()

    def adopt(self, stream: SampleStream) -> None:
        """Send a sample from now on."""
        stream.follow(self._note_change)
        self._note_change(stream, stream.buffered_bytes)

    def hand_over(self, streams: Iterable[SampleStream], other: TokenSession) -> None:
        """Give all of its samples to another session, which sends what is unacknowledged here before anything else.

        Call it once this one runs no more.
        """
        sent, self._unacknowledged = self._unacknowledged, deque()
        other._take_over(sent)
        for stream in streams:
            self.release(stream)
            other.adopt(stream)

    def _take_over(self, sent: deque[_Sent]) -> None:
        for item in sent:
            item.request.sequence = 0
            item.request.must_pass_on = True
        self._unacknowledged += sent
        self._to_resend += sent
        self._update_events()

    def _void(self, reason: str, message: str) -> None:
        """The run is gone: nothing buffered here can be stored."""
        sent_streams = [stream for sent in self._unacknowledged for stream in sent.streams]
        streams = dict.fromkeys([*sent_streams, *self._dirty])
        if streams:
            _log.info(
                "tokens given up: the run is closed", peer=self._stream.peer, num_samples=len(streams), reason=message
            )
        self._unacknowledged.clear()
        for stream in streams:
            stream.refuse(broker_pb2.ChunkError(lease_id=stream.lease_id, reason=reason, message=message))
        self._update_events()

    def _note_change(self, stream: SampleStream, change_bytes: int) -> None:
        if stream.is_dirty and stream not in self._dirty:
            if not self._dirty:
                self._work.set()
            self._dirty[stream] = asyncio.get_running_loop().time()
        elif not stream.is_dirty:
            self._dirty.pop(stream, None)
        if stream.is_urgent and stream.is_dirty:
            self._dirty = {stream: -math.inf} | self._dirty | {stream: -math.inf}
            self._work.set()
        before_bytes = self._buffered_bytes
        self._buffered_bytes += change_bytes
        if before_bytes < self._most_waiting_bytes <= self._buffered_bytes:
            self._work.set()
        self._update_room()

    def _update_events(self) -> None:
        self._work.set()
        self._update_room()

    def _update_room(self) -> None:
        if self.has_room:
            self._room.set()
        else:
            self._room.clear()
        if self._dirty or self._unacknowledged:
            self._settled.clear()
        else:
            self._settled.set()
