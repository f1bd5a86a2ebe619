"""One trainer rank's microbatch stream, and the loading of groups with their payload."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import structlog

from penstock.codec import Packed
from penstock.errors import InvalidFieldError, RunClosedError
from penstock.v1 import broker_pb2, types_pb2
from services.broker import delivery, drops, ownership, waits
from services.broker.delivery import Consumer
from services.broker.hub import RunHub
from services.broker.hubs import Hubs
from services.broker.intake import Intake, first_request, wait_for_event
from services.broker.microbatch_frames import Frames
from services.broker.parcel_shelf import is_parcel, slice_of
from services.broker.payload import kept_indices, trajectory_group
from services.broker.records_pb2 import GroupRecord, ParcelRecord
from services.broker.run_state import RunState
from services.broker.validation import MAX_GROUP_IDS, check_count, check_id, check_run_id

WAITING_EVERY_S = 1.0
DEFAULT_MAX_GROUPS = 8
MAX_MICROBATCHES = 4
"""Handed over by one commit, where that many are ready and there is credit for them."""

_Response = broker_pb2.StreamMicrobatchesResponse
_Frame = _Response | bytes
"""A response, or one that is serialized already."""
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Delivery:
    microbatches: list[list[GroupRecord | ParcelRecord]]
    """Copies of the records of each, in the order of delivery."""
    policy_version: int

    @property
    def chosen(self) -> list[GroupRecord | ParcelRecord]:
        return [record for members in self.microbatches for record in members]

    @property
    def num_groups(self) -> int:
        return _num_groups(self.chosen)


def _num_groups(records: Sequence[GroupRecord | ParcelRecord]) -> int:
    return sum(len(record.group_ids) if isinstance(record, ParcelRecord) else 1 for record in records)


async def load_groups(
    hub: RunHub, groups: Sequence[GroupRecord], *, has_text: bool = False
) -> list[types_pb2.TrajectoryGroup]:
    """Groups with their payload, the completions' text if asked for; those given up meanwhile are left out."""
    prompts = await hub.prompts([group.group_id for group in groups])
    samples = [(group.group_id, index) for group in groups for index in kept_indices(group)]
    stored = dict(zip(samples, await hub.store.chunks(hub.run_id, samples), strict=True))
    loaded: list[types_pb2.TrajectoryGroup] = []
    for group in groups:
        parts = [stored[(group.group_id, index)] for index in kept_indices(group)]
        if group.group_id in prompts and all(parts):
            loaded.append(trajectory_group(group, prompts[group.group_id], parts, has_text=has_text))
    return loaded


async def load_parcels(hub: RunHub, parcels: Sequence[ParcelRecord]) -> dict[int, Packed]:
    """The groups of parcels, packed, by the parcel's sequence; empty where the payload is lost, and given up then."""
    slices = [slice_of(parcel) for parcel in parcels]
    loaded: dict[int, Packed] = {}
    for parcel, part, packed in zip(parcels, slices, await hub.payloads.load(slices), strict=True):
        loaded[parcel.sequence] = packed
        if len(packed) < part.size_bytes:
            _log.error("payload is lost", run_id=hub.run_id, payload_id=part.payload_id, num_bytes=len(packed))
            loaded[parcel.sequence] = b""
            await hub.transact(partial(drops.drop_groups, group_ids=list(parcel.group_ids), reason=drops.PAYLOAD_LOST))
    return loaded


_Record = TypeVar("_Record", bound=GroupRecord | ParcelRecord)


def copy_of(record: _Record) -> _Record:
    """A copy that later transactions do not change."""
    return deepcopy(record)


class MicrobatchStream:
    """Sends ready groups while the trainer has credit; otherwise says why there are none."""

    def __init__(self, hubs: Hubs, first: broker_pb2.StreamMicrobatchesRequest) -> None:
        hello = first.hello
        if not first.HasField("hello"):
            raise InvalidFieldError("hello: must be set in the first message", field="hello")
        check_run_id(hello.run_id)
        check_id("hello.consumer_id", hello.consumer_id)
        check_count("hello.held_group_ids", len(hello.held_group_ids), MAX_GROUP_IDS)
        if hello.purpose not in (types_pb2.PURPOSE_TRAIN, types_pb2.PURPOSE_EVALUATE):
            raise InvalidFieldError("hello.purpose: must be TRAIN or EVALUATE", field="hello.purpose")
        self._hubs = hubs
        self._hub = hubs.hub(hello.run_id)
        self._hello = hello
        self._consumer = Consumer(consumer_id=hello.consumer_id, purpose=hello.purpose, stream_id=secrets.token_hex(8))
        self._credit_total = first.credit_total
        self._num_sent = 0
        self._wake = asyncio.Event()
        self._is_delivering = False
        """Whether a hand-over is being committed, or is committed and not counted as sent yet."""
        self._followed: asyncio.Future[_Delivery] | None = None
        """The hand-over that a commit of another call brought."""

    @classmethod
    async def open(cls, hubs: Hubs, requests: AsyncIterator[broker_pb2.StreamMicrobatchesRequest]) -> MicrobatchStream:
        """Read the first message."""
        return cls(hubs, await first_request(requests))

    async def serve(self, requests: AsyncIterator[broker_pb2.StreamMicrobatchesRequest]) -> AsyncIterator[_Frame]:
        """Everything the stream sends, until the run is closed or the client goes."""
        self._consumer = await self._hub.transact(self._attach)
        # Loop time, not the clock's: this paces the stream and decides nothing about the run.
        loop = asyncio.get_running_loop()
        last_sent_s = loop.time()
        with self._hub.listening(self._wake) as wake, self._hub.following(self._follow, self._take):
            async with Intake(requests, self._on_request, wake) as intake:
                while not intake.is_ended:
                    self._hubs.check_serving()
                    for frame in await self._microbatches():
                        last_sent_s = loop.time()
                        yield frame
                    if self._hub.copy is not None:
                        if self._hub.copy.run.is_closed:
                            return
                        self._check_serving(self._hub.copy)
                    if loop.time() - last_sent_s >= WAITING_EVERY_S:
                        last_sent_s = loop.time()
                        yield await self._waiting()
                    await wait_for_event(wake, WAITING_EVERY_S)
                intake.check()

    def _attach(self, state: RunState) -> Consumer:
        if state.run.is_closed:
            raise RunClosedError(f"run {state.run.run_id!r} is closed", run_id=state.run.run_id)
        ownership.admit(state, self._hello.owner, self._hub.clock.now_s())
        return delivery.attach(state, self._consumer, held=frozenset(self._hello.held_group_ids))

    def _check_serving(self, state: RunState) -> None:
        """Whether the stream may still hand anything out; raises FencedError and what `check_attached` raises."""
        ownership.check_not_fenced(state.run, self._hello.owner)
        delivery.check_attached(state, self._consumer)

    async def _on_request(self, request: broker_pb2.StreamMicrobatchesRequest) -> None:
        if request.HasField("hello"):
            raise InvalidFieldError("hello: set in the first message only", field="hello")
        self._credit_total = request.credit_total or self._credit_total

    def _has_ready(self, state: RunState) -> bool:
        purpose = self._consumer.purpose
        return bool(state.ready[purpose]) or (purpose == types_pb2.PURPOSE_TRAIN and bool(state.shelf.ready))

    def _next_delivery(self, state: RunState) -> Callable[[RunState], _Delivery] | None:
        """The hand-over of what is ready, where there is credit for it."""
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
                found.microbatches.append(
                    [
                        copy_of(state.shelf.records[name]) if is_parcel(name) else copy_of(state.groups[name])
                        for name in names
                    ]
                )
            return found

        return operation

    def _follow(self, state: RunState) -> Callable[[RunState], _Delivery] | None:
        """See `RunHub.following`: what somebody else's call makes ready is handed over by the same commit."""
        operation = None if self._is_delivering else self._next_delivery(state)
        self._is_delivering = self._is_delivering or operation is not None
        return operation

    def _take(self, answer: asyncio.Future[_Delivery]) -> None:
        self._followed = answer
        if not answer.cancelled():
            # Looked at, so that an error after the stream's end is not reported as lost.
            answer.exception()
        self._wake.set()

    async def _microbatches(self) -> list[bytes]:
        if self._followed is not None:
            followed, self._followed, self._is_delivering = self._followed, None, False
            return await self._send(followed.result())
        if self._hub.copy is None:
            await self._hub.transact(lambda state: None, must_verify=False)
        copy = self._hub.copy
        operation = None if self._is_delivering or copy is None else self._next_delivery(copy)
        if operation is None:
            return []
        self._is_delivering = True
        try:
            handed_over = await self._hub.transact(operation, must_verify=False)
        finally:
            self._is_delivering = False
        return await self._send(handed_over)

    async def _send(self, handed_over: _Delivery) -> list[bytes]:
        self._num_sent += handed_over.num_groups
        if handed_over.chosen:
            # There may be more, and nobody else's commit need ever come to say so.
            self._wake.set()
        return await self._load(handed_over)

    async def _load(self, handed_over: _Delivery) -> list[bytes]:
        """The payload of what is handed over, in frames."""
        chosen = handed_over.chosen
        groups = await load_groups(self._hub, [record for record in chosen if isinstance(record, GroupRecord)])
        by_id = {group.prompt.group_id: group for group in groups}
        parcels = [record for record in chosen if isinstance(record, ParcelRecord)]
        packed = await load_parcels(self._hub, parcels)
        frames = Frames(handed_over.policy_version)
        for members in handed_over.microbatches:
            for record in members:
                self._add(frames, record, by_id, packed)
            frames.close()
        return frames.responses

    def _add(
        self,
        frames: Frames,
        record: GroupRecord | ParcelRecord,
        groups: Mapping[str, types_pb2.TrajectoryGroup],
        packed: Mapping[int, Packed],
    ) -> None:
        """Add a record's groups to the frame being filled; those whose payload is gone are left out."""
        if isinstance(record, GroupRecord):
            if record.group_id in groups:
                frames.add_group(groups[record.group_id])
        elif self._hello.accepts_packed_groups:
            frames.add_packed(packed[record.sequence])
        else:
            for group in types_pb2.TrajectoryGroups.FromString(bytes(packed[record.sequence])).groups:
                frames.add_group(group)

    async def _waiting(self) -> _Response:
        now_s, present = self._hub.clock.now_s(), self._hub.peers.present()
        waiting = await self._hub.transact(lambda state: waits.waiting(state, present, now_s), must_verify=False)
        return _Response(waiting=waiting)
