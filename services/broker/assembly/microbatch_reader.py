"""Loads delivered groups and puts them into frames as the consumer reads them.

Promise: apart from a large group, which `large_groups` bounds, at most about MAX_READ_AHEAD_BYTES are loaded at once:
a slow consumer costs no more memory than that.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from itertools import islice

from penstock.errors import InvalidFieldError
from penstock.network.rpc import MAX_MESSAGE_BYTES
from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.codec import Packed
from penstock.wire.pieces import MAX_WHOLE_BYTES, batched
from services.broker.assembly.group_loading import load_records
from services.broker.assembly.large_groups import cut_group, is_large, read_pieces, size_bytes
from services.broker.assembly.microbatch_frames import Frames
from services.broker.records_pb2 import GroupRecord
from services.broker.runtime.run_replica import RunReplica
from services.broker.state.batches import slice_of

MAX_READ_AHEAD_BYTES = 8 * 1024 * 1024
ENVELOPE_BYTES = 4096
"""Upper bound of a response's overhead beyond its group."""


def frames_at_hand(
    replica: RunReplica,
    hello: broker_pb2.TrainerHello,
    microbatches: Sequence[Sequence[GroupRecord]],
    *,
    policy_version: int,
) -> list[bytes]:
    """What `load_frames` yields, if it is all of puts that this process still has; otherwise nothing.

    Takes no time of the store's, so that it may be done before it is known whether the groups are delivered.
    """
    records = [record for members in microbatches for record in members]
    if not (hello.accepts_packed_groups and all(record.HasField("put") for record in records)):
        return []
    parts = [slice_of(record) for record in records]
    sizes = [part.size_bytes for part in parts]
    if max(sizes, default=0) > MAX_WHOLE_BYTES or sum(sizes) > MAX_READ_AHEAD_BYTES:
        return []
    # All are found before the first is copied into a message.
    found = [packed for part in parts if (packed := replica.payloads.at_hand(part)) is not None]
    if len(found) < len(parts):
        return []
    frames, payloads = Frames(policy_version), iter(found)
    for members in microbatches:
        for packed in islice(payloads, len(members)):
            frames.add_packed(packed)
        frames.close()
    return frames.take()


def forget_delivered(replica: RunReplica, microbatches: Sequence[Sequence[GroupRecord]]) -> None:
    """Keep what `frames_at_hand` used no longer."""
    for members in microbatches:
        for record in members:
            replica.payloads.note_delivered(slice_of(record))


async def load_frames(
    replica: RunReplica,
    hello: broker_pb2.TrainerHello,
    microbatches: Sequence[Sequence[GroupRecord]],
    *,
    policy_version: int,
) -> AsyncGenerator[bytes, None]:
    """Serialized StreamMicrobatchesResponses with all groups whose payload is present.

    Raises:
        InvalidFieldError: A group does not fit a message, and the consumer accepts no pieces.
        ServiceUnavailableError: A large group was dropped meanwhile.
    """
    frames, number, row_bytes = Frames(policy_version), 0, replica.row_bytes
    numbered = ((number, record) for number, members in enumerate(microbatches) for record in members)
    for batch in batched(numbered, partial(_read_ahead_bytes, row_bytes=row_bytes), MAX_READ_AHEAD_BYTES):
        _microbatch, first = batch[0]
        if is_large(first, row_bytes) and hello.accepts_group_pieces:
            async with aclosing(read_pieces(replica, first)) as pieces:
                async for piece in pieces:
                    frames.add_piece(piece)
                    for frame in frames.take():
                        yield frame
            continue
        records = [record for _microbatch, record in batch]
        by_id, packed = await load_records(replica, records)
        for microbatch, record in batch:
            if microbatch != number:
                frames.close()
                number = microbatch
            _add(frames, hello, record, by_id, packed)
        for frame in frames.take():
            yield frame


def _read_ahead_bytes(numbered: tuple[int, GroupRecord], *, row_bytes: int) -> float:
    """The size of a record with the number of its microbatch; a large one is read alone."""
    _number, record = numbered
    return math.inf if is_large(record, row_bytes) else size_bytes(record, row_bytes)


def _add(
    frames: Frames,
    hello: broker_pb2.TrainerHello,
    record: GroupRecord,
    groups: Mapping[str, types_pb2.TrajectoryGroup],
    packed: Mapping[str, Packed],
) -> None:
    """Add a record's groups to the frame being filled; those whose payload is gone are left out."""
    if not record.HasField("put"):
        if record.group_id in groups:
            _add_group(frames, hello, groups[record.group_id])
        return
    data = packed[record.group_id]
    if hello.accepts_packed_groups and len(data) <= MAX_MESSAGE_BYTES - ENVELOPE_BYTES:
        frames.add_packed(data)
    else:
        for group in types_pb2.TrajectoryGroups.FromString(bytes(data)).groups:
            _add_group(frames, hello, group)


def _add_group(frames: Frames, hello: broker_pb2.TrainerHello, group: types_pb2.TrajectoryGroup) -> None:
    if group.ByteSize() <= MAX_MESSAGE_BYTES - ENVELOPE_BYTES:
        frames.add_group(group)
        return
    if not hello.accepts_group_pieces:
        raise too_large(group, field="hello.accepts_group_pieces")
    for piece in cut_group(group):
        frames.add_piece(piece)


def too_large(group: types_pb2.TrajectoryGroup, *, field: str) -> InvalidFieldError:
    """The error for a client that accepts no pieces and is due a group that does not fit a message."""
    return InvalidFieldError(
        f"{field}: group {group.prompt.group_id!r} has {group.ByteSize()} bytes, and a message holds "
        f"{MAX_MESSAGE_BYTES}; read such groups in pieces and set this, or lower the run's group_size or "
        "max_completion_tokens",
        field=field,
    )
