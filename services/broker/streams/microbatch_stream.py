"""Serves one trainer rank's microbatch stream."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from copy import deepcopy
from dataclasses import dataclass, field

from penstock.errors import InvalidFieldError
from penstock.names import check_run_id
from penstock.process.time_limits import Wake
from penstock.v1 import broker_pb2, types_pb2
from services.broker.assembly.large_groups import portions
from services.broker.assembly.microbatch_reader import forget_delivered, frames_at_hand, load_frames
from services.broker.ingest.validation import MAX_GROUP_IDS, check_count, check_id
from services.broker.operations import delivery, ownership
from services.broker.operations.delivery import Consumer
from services.broker.records_pb2 import GroupRecord
from services.broker.runtime.run_registry import RunRegistry
from services.broker.stalls import stall_report
from services.broker.state.batches import num_groups
from services.broker.state.run_state import RunState
from services.broker.streams.request_reader import Intake, wait_for_event

WAITING_EVERY_S = 1.0
DEFAULT_MAX_GROUPS = 8
MAX_MICROBATCHES = 4
"""Groups delivered by one commit, if that many are ready and there is credit for them."""

_Response = broker_pb2.StreamMicrobatchesResponse
_Frame = _Response | bytes
"""A response, possibly serialized already."""


@dataclass(slots=True, kw_only=True)
class _Delivery:
    microbatches: list[list[GroupRecord]]
    """Copies of the records of each microbatch, in the order of delivery."""
    policy_version: int
    frames: list[bytes] = field(default_factory=list)
    """Its messages, if they could be made while the store was committing it."""

    @property
    def chosen(self) -> list[GroupRecord]:
        return [record for members in self.microbatches for record in members]

    @property
    def num_groups(self) -> int:
        return sum(map(num_groups, self.chosen))


class MicrobatchStream:
    """Sends ready groups while the trainer has credit; otherwise reports why there are none."""

    def __init__(self, run_registry: RunRegistry, first: broker_pb2.StreamMicrobatchesRequest) -> None:
        hello = first.hello
        if not first.HasField("hello"):
            raise InvalidFieldError("hello: must be set in the first message", field="hello")
        check_run_id(hello.run_id)
        check_id("hello.consumer_id", hello.consumer_id)
        check_count("hello.held_group_ids", len(hello.held_group_ids), MAX_GROUP_IDS)
        if hello.purpose not in (types_pb2.PURPOSE_TRAIN, types_pb2.PURPOSE_EVALUATE):
            raise InvalidFieldError("hello.purpose: must be TRAIN or EVALUATE", field="hello.purpose")
        self._run_registry = run_registry
        self._replica = run_registry.replica(hello.run_id)
        self._hello = hello
        self._consumer = Consumer(consumer_id=hello.consumer_id, purpose=hello.purpose, stream_id=secrets.token_hex(8))
        self._credit_total = first.credit_total
        self._num_sent = 0
        self._wake = Wake()
        self._is_delivering = False
        """Whether a delivery is being committed, or is committed but not yet counted as sent."""
        self._followed: asyncio.Future[_Delivery] | None = None
        """The delivery made by another call's commit."""

    async def serve(
        self, requests: AsyncIterator[broker_pb2.StreamMicrobatchesRequest]
    ) -> AsyncGenerator[_Frame, None]:
        """All responses, until the run is closed or the client disconnects."""
        self._consumer = await self._replica.transact(self._attach)
        # Loop time, not the clock's: this paces the stream and decides nothing about the run.
        loop = asyncio.get_running_loop()
        last_sent_s = loop.time()
        with self._replica.listening(self._wake) as wake, self._replica.following(self._follow, self._take):
            async with Intake(requests, self._on_request, wake) as intake:
                while not intake.is_ended:
                    self._run_registry.check_serving()
                    handed_over = await self._next()
                    if handed_over is not None and handed_over.frames:
                        last_sent_s = loop.time()
                        forget_delivered(self._replica, handed_over.microbatches)
                        for frame in handed_over.frames:
                            yield frame
                        handed_over.frames = []
                    elif handed_over is not None:
                        version = handed_over.policy_version
                        loading = load_frames(
                            self._replica, self._hello, handed_over.microbatches, policy_version=version
                        )
                        async with aclosing(loading) as frames:
                            async for frame in frames:
                                last_sent_s = loop.time()
                                yield frame
                    if self._replica.is_closed:
                        return
                    if self._replica.copy is not None:
                        self._check_serving(self._replica.copy)
                    if loop.time() - last_sent_s >= WAITING_EVERY_S:
                        last_sent_s = loop.time()
                        yield await self._waiting()
                    await wait_for_event(wake, WAITING_EVERY_S)
                intake.check()

    def _attach(self, state: RunState) -> Consumer:
        state.check_open()
        ownership.admit(state, self._hello.owner, self._replica.clock.now_s())
        return delivery.attach(state, self._consumer, held=frozenset(self._hello.held_group_ids))

    def _check_serving(self, state: RunState) -> None:
        """Check that the stream may still deliver; raises FencedError and the errors of `check_attached`."""
        ownership.check_not_fenced(state.run, self._hello.owner)
        delivery.check_attached(state, self._consumer)

    async def _on_request(self, request: broker_pb2.StreamMicrobatchesRequest) -> None:
        if request.HasField("hello"):
            raise InvalidFieldError("hello: set in the first message only", field="hello")
        self._credit_total = request.credit_total or self._credit_total

    def _has_ready(self, state: RunState) -> bool:
        return bool(state.index.ready[self._consumer.purpose])

    def _next_delivery(self, state: RunState) -> Callable[[RunState], _Delivery] | None:
        """The delivery of ready groups, if there is credit for it."""
        credit, most = self._credit_total - self._num_sent, self._hello.max_groups or DEFAULT_MAX_GROUPS
        if credit <= 0 or not self._has_ready(state):
            return None

        def operation(state: RunState) -> _Delivery:
            self._check_serving(state)
            found = _Delivery(microbatches=[], policy_version=state.run.policy_version)
            while (
                len(found.microbatches) < MAX_MICROBATCHES
                and (room := min(most, credit - found.num_groups)) > 0
                and self._has_ready(state)
            ):
                names = delivery.deliver(
                    state, self._consumer, max_groups=room, target_tokens=self._hello.target_tokens
                )
                if not names:
                    break
                found.microbatches.append([part for name in names for part in portions(deepcopy(state.groups[name]))])
            return found

        return operation

    def _follow(self, state: RunState) -> Callable[[RunState], _Delivery] | None:
        """See `RunReplica.following`: groups that another call makes ready are delivered by the same commit."""
        operation = None if self._is_delivering else self._next_delivery(state)
        if operation is None:
            return None
        self._is_delivering = True

        def deliver(state: RunState) -> _Delivery:
            found = operation(state)
            asyncio.get_running_loop().call_soon(self._frame, found)
            return found

        return deliver

    def _frame(self, found: _Delivery) -> None:
        """Make the messages of a delivery that is being committed; they are sent only once it is."""
        found.frames = frames_at_hand(
            self._replica, self._hello, found.microbatches, policy_version=found.policy_version
        )

    def _take(self, answer: asyncio.Future[_Delivery]) -> None:
        self._followed = answer
        if not answer.cancelled():
            # Retrieved, so that an error after the stream's end is not reported as lost.
            answer.exception()
        self._wake.set()

    async def _next(self) -> _Delivery | None:
        """The delivery committed now; None if there is none."""
        if self._followed is not None:
            followed, self._followed, self._is_delivering = self._followed, None, False
            return self._counted(followed.result())
        if self._replica.copy is None:
            await self._replica.transact(lambda state: None, must_verify=False)
        copy = self._replica.copy
        operation = None if self._is_delivering or copy is None else self._next_delivery(copy)
        if operation is None:
            return None
        self._is_delivering = True
        try:
            handed_over = await self._replica.transact(operation, must_verify=False)
        finally:
            self._is_delivering = False
        return self._counted(handed_over)

    def _counted(self, handed_over: _Delivery) -> _Delivery:
        self._num_sent += handed_over.num_groups
        if handed_over.chosen:
            # There may be more, and no other commit may ever wake this stream.
            self._wake.set()
        return handed_over

    async def _waiting(self) -> _Response:
        now_s, present = self._replica.clock.now_s(), self._replica.peers.present()
        waiting = await self._replica.transact(
            lambda state: stall_report.waiting(state, present, now_s), must_verify=False
        )
        return _Response(waiting=waiting)
