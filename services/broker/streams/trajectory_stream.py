"""Serves put streams: finished groups in, one answer per request, once stored."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import ExitStack, aclosing, suppress
from functools import partial

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError

from penstock.errors import InvalidFieldError
from penstock.names import check_run_id
from penstock.process.tasks import end
from penstock.process.time_limits import Wake
from penstock.security.access import current_caller
from penstock.v1 import broker_pb2, types_pb2
from penstock.wire import packed as packed_types
from penstock.wire.codec import Fields, field_prefix, field_span, fields_of
from penstock.wire.pieces import MAX_GROUP_BYTES
from services.broker.ingest.put_messages import PutMessages, parse_long
from services.broker.ingest.trajectory_decoder import read_put
from services.broker.ingest.validation import check_id
from services.broker.operations import append_trajectories
from services.broker.operations.append_trajectories import Put, PutOutcome
from services.broker.runtime.invariant_metrics import InvariantMetrics
from services.broker.runtime.run_registry import RunRegistry
from services.broker.runtime.run_replica import RunReplica
from services.broker.runtime.stream_listeners import Topic
from services.broker.state.run_state import RunState
from services.broker.streams.request_reader import answered
from services.broker.streams.trajectory_parts import PutParts

MAX_UNANSWERED = 16
"""Requests of a stream that are read ahead of their answers; they are stored in order, several by one commit."""
HOLD_S = 1.0
"""How long a request waits for capacity in the run before it is refused. The stream is not read meanwhile, so
a trainer that is merely slower than its producers paces them without a request being sent twice."""
MAX_COMING_BYTES = 64 * 1024 * 1024
"""Payload of a run that is being stored at once, over all streams; more is refused."""
HOLD_LARGE_S = 10.0
"""The same for a put in parts, which costs much more to send again; less than clients wait for an answer."""
RETRY_DELAY = Duration(nanos=100_000_000)
"""How long a producer waits if the run is full: a fraction of a small step."""

_Request = broker_pb2.PutTrajectoriesRequest
_Response = broker_pb2.PutTrajectoriesResponse


async def serve_puts(run_registry: RunRegistry, requests: AsyncIterator[bytes]) -> AsyncGenerator[_Response, None]:
    """Answer each request in turn; requests arrive serialized.

    The stream ends with OK when its run is closed and no answer is due, and with UNAVAILABLE when the process drains.
    """
    wake = Wake()
    with ExitStack() as listening:
        listening.enter_context(run_registry.listening(wake))
        stream = _PutStream(run_registry, wake, listening)
        try:
            async with aclosing(answered(requests, stream.handle, stream.answers, wake, stream.check)) as answers:
                async for answer in answers:
                    response = await answer
                    _count(run_registry.metrics.invariants, response)
                    yield response
        finally:
            # The client is gone: work under way finishes by itself, and its answer is not read.
            await end(*(stream.answers.get_nowait() for _ in range(stream.answers.qsize())))


class _PutStream:
    """One producer's stream: its run, the put that it receives in parts, and the answers it is due."""

    def __init__(self, run_registry: RunRegistry, wake: Wake, listening: ExitStack) -> None:
        self._run_registry, self._wake, self._listening = run_registry, wake, listening
        self._replica: RunReplica | None = None
        self.parts = PutParts()
        self.answers: asyncio.Queue[asyncio.Future[_Response]] = asyncio.Queue(MAX_UNANSWERED)
        listening.callback(self.parts.release)

    def check(self) -> bool:
        """Whether the stream is over: its run is closed and no answer is due; see `answered`."""
        self._run_registry.check_serving()
        self.parts.check()
        return self._replica is not None and self._replica.is_closed and self.answers.empty()

    async def handle(self, data: bytes) -> None:
        """Take a request and schedule its answer. Raises InvalidFieldError and ForbiddenError."""
        fields = fields_of(data)
        if any([number == _Request.TOTAL_BYTES_FIELD_NUMBER for number, _start, _end in fields]):
            part = _parsed(data)
            current_caller().check_message(part)
            answer = await _take_part(self._replica_of(part.run_id), self.parts, part)
            if answer is not None:
                await self.answers.put(answer)
            return
        request, put = read_request(data, fields)
        current_caller().check_message(request)
        replica = self._replica_of(request.run_id)
        await _wait_until(replica, partial(_has_room, replica, put), HOLD_S)
        await self.answers.put(store(replica, request.put_id, put))
        # The put is on its way to the store before the next request is asked for.
        await asyncio.sleep(0)

    def _replica_of(self, run_id: str) -> RunReplica:
        if self._replica is None:
            self._replica = self._run_registry.replica(run_id)
            self._listening.enter_context(self._replica.listening(self._wake, topic=Topic.END))
        if self._replica.run_id != run_id:
            raise InvalidFieldError(f"run_id: {run_id!r}; the stream is of {self._replica.run_id!r}", field="run_id")
        return self._replica


def read_request(data: bytes, fields: Fields) -> tuple[_Request, Put]:
    """A serialized request of these fields, checked as far as possible without the run; the message omits its groups.

    Raises InvalidFieldError.
    """
    start, end = field_span(fields, _Request.GROUPS_FIELD_NUMBER)
    packed = memoryview(data)[start:end]
    prefix = field_prefix(_Request.GROUPS_FIELD_NUMBER, end - start)
    # What is not encoded in the usual way is left to protobuf.
    messages = parse_long(packed) if data[:start].endswith(prefix) else None
    try:
        if messages is None:
            parsed = packed_types.PutTrajectoriesRequest.FromString(data)
            messages = PutMessages.of(list(parsed.groups.groups))
        else:
            parsed = _Request.FromString(data[: start - len(prefix)] + data[end:])
    except DecodeError as error:
        read_put(packed)
        text = f"request: {len(data)} bytes that are no message of this method: {error}"
        raise InvalidFieldError(text, field="request") from error
    request = _Request(run_id=parsed.run_id, producer_id=parsed.producer_id, put_id=parsed.put_id)
    _check_names(request)
    groups = read_put(packed, messages)
    return request, Put(payload_id=secrets.token_hex(8), payload=packed, groups=groups)


def _parsed(data: bytes) -> _Request:
    """A request that is part of a put. Raises InvalidFieldError."""
    try:
        request = _Request.FromString(data)
    except DecodeError as error:
        text = f"request: {len(data)} bytes that are no message of this method: {error}"
        raise InvalidFieldError(text, field="request") from error
    _check_names(request)
    return request


def _check_names(request: _Request) -> None:
    check_run_id(request.run_id)
    check_id("producer_id", request.producer_id)
    check_id("put_id", request.put_id)


async def _wait_until(replica: RunReplica, condition: Callable[[], bool], hold_s: float) -> bool:
    """Wait up to `hold_s` for a condition that a change of the run can fulfil; returns whether it holds."""
    if condition():
        return True
    with replica.listening() as wake, suppress(TimeoutError):
        async with asyncio.timeout(hold_s):
            while not condition():
                await wake.wait()
                wake.clear()
    return condition()


def _is_full(replica: RunReplica, num_groups: int, size_bytes: int) -> bool:
    """Whether the run's copy, which may be behind, has no capacity for this much."""
    return replica.copy is not None and append_trajectories.is_full(replica.copy, num_groups, size_bytes)


def _has_room(replica: RunReplica, put: Put) -> bool:
    """Whether there is capacity for a request beside the puts being stored, or never will be."""
    if replica.copy is None or replica.is_closed:
        return True
    num_groups = replica.num_groups_coming + len(put.groups)
    return not _is_too_much(replica, put) and not _is_full(replica, num_groups, len(put.payload))


async def _take_part(replica: RunReplica, parts: PutParts, request: _Request) -> asyncio.Future[_Response] | None:
    """Receive a part of a put; returns the immediate answer, if any. Raises InvalidFieldError."""
    total_bytes = request.total_bytes
    if parts.begins(request):
        if not await _wait_until(
            replica,
            lambda: parts.has_room(replica, total_bytes) and not _is_full(replica, 1, total_bytes),
            HOLD_S,
        ):
            parts.refuse(request)
            return _answered(_Response(put_id=request.put_id, retry_delay=RETRY_DELAY))
        parts.begin(replica, request)
    elif parts.is_refused(request):
        return None
    received_bytes, whole = parts.add(request)
    if whole is None:
        return _answered(_Response(put_id=request.put_id, received_bytes=received_bytes))
    try:
        put = Put(
            payload_id=secrets.token_hex(8),
            payload=whole,
            groups=read_put(whole, max_bytes=MAX_GROUP_BYTES),
            is_stored_ahead=True,
        )
    except BaseException:
        parts.give_back(replica, len(whole))
        raise
    storing = asyncio.create_task(_store_ahead(replica, request.put_id, put))
    storing.add_done_callback(lambda _task: parts.give_back(replica, len(whole)))
    return storing


async def _store_ahead(replica: RunReplica, put_id: str, put: Put) -> _Response:
    """Store a large put: first its payload, without delaying the run's other calls, then the rest."""
    await replica.store.put_payload(replica.run_id, put.payload_id, put.payload)
    await _wait_until(replica, lambda: not _is_full(replica, len(put.groups), len(put.payload)), HOLD_LARGE_S)
    return await _answer(replica, put_id, put, _enqueue(replica, put))


def _answered(response: _Response) -> asyncio.Future[_Response]:
    answer: asyncio.Future[_Response] = asyncio.get_running_loop().create_future()
    answer.set_result(response)
    return answer


def _is_too_much(replica: RunReplica, put: Put) -> bool:
    """Whether this process is storing too much; never because of one request alone."""
    return bool(replica.coming_bytes) and replica.coming_bytes + len(put.payload) > MAX_COMING_BYTES


def store(replica: RunReplica, put_id: str, put: Put) -> asyncio.Future[_Response]:
    """Begin to store a request; returns its answer."""
    if _is_too_much(replica, put):
        return _answered(_Response(put_id=put_id, retry_delay=RETRY_DELAY))
    replica.num_groups_coming += len(put.groups)
    replica.coming_bytes += len(put.payload)

    def note_end(_stored: asyncio.Future[PutOutcome]) -> None:
        replica.num_groups_coming -= len(put.groups)
        replica.coming_bytes -= len(put.payload)

    stored = _enqueue(replica, put)
    stored.add_done_callback(note_end)
    return asyncio.create_task(_answer(replica, put_id, put, stored))


def _enqueue(replica: RunReplica, put: Put) -> asyncio.Future[PutOutcome]:
    payloads = replica.payloads

    def operation(state: RunState) -> PutOutcome:
        return append_trajectories.put(state, put, replica.clock.now_s())

    def forget_unless_stored(stored: asyncio.Future[PutOutcome]) -> None:
        if stored.cancelled() or stored.exception() is not None or not stored.result().num_samples:
            payloads.discard(put.payload_id)

    payloads.add(put.payload_id, put.payload)
    stored = replica.enqueue(operation)
    stored.add_done_callback(forget_unless_stored)
    return stored


async def _answer(replica: RunReplica, put_id: str, put: Put, stored: asyncio.Future[PutOutcome]) -> _Response:
    outcome = await replica.answered(stored)
    return _Response(
        put_id=put_id,
        num_samples=outcome.num_samples,
        errors=await _without_retired(replica, put, outcome.errors),
        retry_delay=RETRY_DELAY if outcome.is_full else None,
    )


async def _without_retired(
    replica: RunReplica, put: Put, errors: Sequence[types_pb2.ItemError]
) -> Sequence[types_pb2.ItemError]:
    """Accept groups that the run had before and dropped: a repetition is accepted without effect."""
    refused = [put.groups.group_ids[error.index] for error in errors]
    retired = await replica.store.retired(replica.run_id, refused) if refused else frozenset()
    return [error for error in errors if put.groups.group_ids[error.index] not in retired]


def _count(invariants: InvariantMetrics, response: _Response) -> None:
    if response.received_bytes:
        return
    is_full = response.HasField("retry_delay")
    invariants.refusals.labels("puts").inc(is_full)
    if not is_full and not response.num_samples and not response.errors:
        invariants.duplicates.labels("put").inc()
