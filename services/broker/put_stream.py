"""The put streams: finished groups in, one answer a request, after the store has it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, suppress

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError

from penstock import packed as packed_types
from penstock.codec import field_span
from penstock.errors import InvalidFieldError
from penstock.v1 import broker_pb2, types_pb2
from services.broker import putting
from services.broker.hub import RunHub
from services.broker.hubs import Hubs
from services.broker.intake import Intake, wait_for_event
from services.broker.invariant_metrics import InvariantMetrics
from services.broker.put_reading import read_put
from services.broker.putting import Put
from services.broker.run_state import RunState
from services.broker.validation import check_id, check_run_id

MAX_UNANSWERED = 16
"""Requests of a stream that are read ahead of their answers; they are stored in order, several by one commit."""
CHECK_EVERY_S = 5.0
HOLD_S = 1.0
"""How long a request waits for room in the run before it is refused. Nothing more is read from the stream meanwhile, so
a trainer that is merely slower than its producers paces them without a request being sent twice."""
MAX_COMING_BYTES = 64 * 1024 * 1024
"""Payload of a run that is being stored at once, over all streams; more is refused."""
RETRY_DELAY = Duration(nanos=100_000_000)
"""How long a producer waits when the run holds as much as it may: a fraction of a small step."""

_Request = broker_pb2.PutTrajectoriesRequest
_Response = broker_pb2.PutTrajectoriesResponse


async def serve_puts(hubs: Hubs, requests: AsyncIterator[bytes]) -> AsyncIterator[_Response]:
    """Answer each request in turn; they come serialized.

    A client that does not read its answers is not read from either once MAX_UNANSWERED of them wait. The stream ends
    with OK when its run is closed and nothing is asked of it, and with UNAVAILABLE when the process drains.
    """
    wake = asyncio.Event()
    answers: asyncio.Queue[asyncio.Task[_Response]] = asyncio.Queue(MAX_UNANSWERED)
    hub: RunHub | None = None
    with ExitStack() as listening:
        listening.enter_context(hubs.listening(wake))

        async def handle(data: bytes) -> None:
            nonlocal hub
            request, put = read_request(data)
            if hub is None:
                hub = hubs.hub(request.run_id)
                listening.enter_context(hub.listening(wake, only_end=True))
            if hub.run_id != request.run_id:
                raise InvalidFieldError(f"run_id: {request.run_id!r}; the stream is of {hub.run_id!r}", field="run_id")
            await _wait_for_room(hub, put)
            await answers.put(asyncio.create_task(store(hub, request.put_id, put)))

        async with Intake(requests, handle, wake) as intake:
            try:
                while True:
                    is_ended = intake.is_ended
                    while not answers.empty():
                        response = await answers.get_nowait()
                        _count(hubs.metrics.invariants, response)
                        yield response
                    if is_ended:
                        break
                    hubs.check_serving()
                    intake.check_begun()
                    if hub is not None and hub.copy is not None and hub.copy.run.is_closed and answers.empty():
                        return
                    await wait_for_event(wake, min(CHECK_EVERY_S, intake.patience_s))
                intake.check()
            finally:
                await _forget(answers)


def read_request(data: bytes) -> tuple[_Request, Put]:
    """A serialized request, checked as far as that can be done without the run; the message is without its groups.

    Raises InvalidFieldError.
    """
    start, end = field_span(data, _Request.GROUPS_FIELD_NUMBER)
    packed = memoryview(data)[start:end]
    try:
        parsed = packed_types.PutTrajectoriesRequest.FromString(data)
    except DecodeError as error:
        read_put(packed)
        text = f"request: {len(data)} bytes that are no message of this method: {error}"
        raise InvalidFieldError(text, field="request") from error
    request = _Request(run_id=parsed.run_id, producer_id=parsed.producer_id, put_id=parsed.put_id)
    check_run_id(request.run_id)
    check_id("producer_id", request.producer_id)
    check_id("put_id", request.put_id)
    groups = read_put(packed, list(parsed.groups.groups))
    return request, Put(payload_id=secrets.token_hex(8), payload=packed, groups=groups)


async def _wait_for_room(hub: RunHub, put: Put) -> None:
    """Until the copy of the run, which may be behind, has room for the request and what this process stores already."""
    if _has_room(hub, put):
        return
    with hub.listening() as wake, suppress(TimeoutError):
        async with asyncio.timeout(HOLD_S):
            while not _has_room(hub, put):
                await wake.wait()
                wake.clear()


def _has_room(hub: RunHub, put: Put) -> bool:
    """Whether there is room, or will never be."""
    if hub.copy is None or hub.copy.run.is_closed:
        return True
    num_groups = hub.num_groups_coming + len(put.groups)
    return not _is_too_much(hub, put) and not putting.is_full(hub.copy, num_groups, len(put.payload))


def _is_too_much(hub: RunHub, put: Put) -> bool:
    """Whether this process has too much in its hands; never because of one request alone."""
    return bool(hub.coming_bytes) and hub.coming_bytes + len(put.payload) > MAX_COMING_BYTES


async def store(hub: RunHub, put_id: str, put: Put) -> _Response:
    """Store a request and answer it."""

    def operation(state: RunState) -> putting.PutOutcome:
        return putting.put(state, put, hub.clock.now_s())

    if _is_too_much(hub, put):
        return _Response(put_id=put_id, retry_delay=RETRY_DELAY)
    hub.payloads.add(put.payload_id, put.payload)
    hub.num_groups_coming += len(put.groups)
    hub.coming_bytes += len(put.payload)
    try:
        outcome = await hub.transact(operation)
    except BaseException:
        hub.payloads.discard(put.payload_id)
        raise
    finally:
        hub.num_groups_coming -= len(put.groups)
        hub.coming_bytes -= len(put.payload)
    if not outcome.num_samples:
        hub.payloads.discard(put.payload_id)
    return _Response(
        put_id=put_id,
        num_samples=outcome.num_samples,
        errors=await _without_retired(hub, put, outcome.errors),
        retry_delay=RETRY_DELAY if outcome.is_full else None,
    )


async def _without_retired(
    hub: RunHub, put: Put, errors: Sequence[types_pb2.ItemError]
) -> Sequence[types_pb2.ItemError]:
    """Refusals of groups that the run had before and gave up are none: a repetition is accepted without effect."""
    refused = [put.groups.group_ids[error.index] for error in errors]
    retired = await hub.store.retired(hub.run_id, refused) if refused else frozenset()
    return [error for error in errors if put.groups.group_ids[error.index] not in retired]


def _count(invariants: InvariantMetrics, response: _Response) -> None:
    is_full = response.HasField("retry_delay")
    invariants.count_refusals("puts", int(is_full))
    if not is_full and not response.num_samples and not response.errors:
        invariants.count_duplicates("put", 1)


async def _forget(answers: asyncio.Queue[asyncio.Task[_Response]]) -> None:
    """The client went away: what was begun ends by itself, and nobody looks at its answer."""
    waiting = [answers.get_nowait() for _ in range(answers.qsize())]
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
