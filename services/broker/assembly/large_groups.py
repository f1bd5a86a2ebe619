"""Reads groups too large for one message from the store and sends them piece by piece.

Promise: a stream buffers at most about READ_BYTES of such a group at a time, or one sample if that is larger, however
large the group is. The pieces joined at the receiver are exactly the group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from itertools import accumulate

from penstock.errors import ServiceUnavailableError
from penstock.v1 import types_pb2
from penstock.wire.codec import Packed, prefix_size
from penstock.wire.pieces import MAX_WHOLE_BYTES, PIECE_BYTES, batched, spans
from services.broker.assembly.group_loading import give_up
from services.broker.assembly.messages import kept_indices, trajectory
from services.broker.records.store import PayloadSlice
from services.broker.records.stored_sample import read_sample
from services.broker.records_pb2 import GroupRecord
from services.broker.rules.staleness import group_version
from services.broker.runtime.run_replica import RunReplica
from services.broker.state.batches import cut_at, num_groups, payload_bytes, slice_of

BYTES_PER_TOKEN = 8
"""Size of a stored completion token: id and log-prob. Text, and versions that change often, come on top."""
READ_BYTES = 1024 * 1024
"""Bytes read from the store at once; more if one sample is larger."""


class GivenUpError(ServiceUnavailableError):
    """A group was dropped while it was being sent; its reader must start over."""


def size_bytes(record: GroupRecord, row_bytes: int) -> int:
    """Approximate size of a record's groups in a message, with routes of `row_bytes` a token."""
    if record.HasField("put"):
        return payload_bytes(record)
    return sum(_sample_bytes(record, index, row_bytes) for index in range(len(record.samples)))


def _sample_bytes(group: GroupRecord, index: int, row_bytes: int) -> int:
    num_tokens = group.samples[index].num_tokens
    return BYTES_PER_TOKEN * num_tokens + row_bytes * (num_tokens + group.num_prompt_tokens)


def is_large(record: GroupRecord, row_bytes: int) -> bool:
    """Whether a record from `portions` is one group that should be sent in pieces."""
    return size_bytes(record, row_bytes) > MAX_WHOLE_BYTES


def portions(record: GroupRecord) -> list[GroupRecord]:
    """The record itself; for a large put copies, each with groups of at most MAX_WHOLE_BYTES or with a single one."""
    if num_groups(record) == 1 or payload_bytes(record) <= MAX_WHOLE_BYTES:
        return [record]
    batches = batched(record.put.group_bytes, int, MAX_WHOLE_BYTES)
    return cut_at(record, [0, *accumulate(map(len, batches))])


def single_groups(record: GroupRecord) -> list[GroupRecord]:
    """One record for each group of a record."""
    return [record] if num_groups(record) == 1 else cut_at(record, range(num_groups(record) + 1))


async def read_pieces(
    replica: RunReplica, record: GroupRecord, *, has_text: bool = False, left_out: Counter[str] | None = None
) -> AsyncGenerator[types_pb2.GroupPiece, None]:
    """The one group of a record in pieces of PIECE_BYTES; the last one may be smaller.

    Args:
        replica: The run's replica.
        record: A copy; see `single_groups` and `portions`.
        has_text: Whether to include the completions' text.
        left_out: If given, samples whose payload is lost are left out and counted here by group; a group without any
            other sample is not sent.

    Raises:
        GivenUpError: The group was dropped meanwhile or, without `left_out`, some of its payload is lost.
    """
    if record.HasField("put"):
        parts = _put_parts(replica, record, left_out)
    else:
        parts = _group_parts(replica, record, has_text, left_out)
    waiting: bytearray | None = None
    async with aclosing(parts):
        async for part in parts:
            waiting = waiting if waiting is not None else bytearray()
            waiting += part
            while len(waiting) > PIECE_BYTES:
                yield types_pb2.GroupPiece(data=bytes(waiting[:PIECE_BYTES]))
                del waiting[:PIECE_BYTES]
    if waiting is not None:
        yield types_pb2.GroupPiece(data=bytes(waiting), is_last=True)


def cut_group(group: types_pb2.TrajectoryGroup) -> Iterator[types_pb2.GroupPiece]:
    """Split a group that is in memory already into pieces."""
    data = group.SerializeToString()
    for start, end in spans(len(data)):
        yield types_pb2.GroupPiece(data=data[start:end], is_last=end == len(data))


async def _group_parts(
    replica: RunReplica, group: GroupRecord, has_text: bool, left_out: Counter[str] | None
) -> AsyncGenerator[bytes, None]:
    """Serialized messages whose concatenation is one message of all: protobuf appends repeated fields."""
    prompts = await replica.payloads.prompts([group.group_id])
    if group.group_id not in prompts:
        _note_lost(group.group_id, len(kept_indices(group)), left_out)
        return
    head = types_pb2.TrajectoryGroup(prompt=prompts[group.group_id], min_policy_version=group_version(group) or 0)
    row_bytes = replica.row_bytes
    for indices in batched(kept_indices(group), lambda index: _sample_bytes(group, index, row_bytes), READ_BYTES):
        samples = [(group.group_id, index) for index in indices]
        stored = await replica.chunks(samples, [group.token_shard] * len(samples))
        if not all(stored):
            _note_lost(group.group_id, sum(not parts for parts in stored), left_out)
        read = {index: read_sample(parts) for index, parts in zip(indices, stored, strict=True) if parts}
        head.trajectories.extend(trajectory(group, index, tokens, has_text=has_text) for index, tokens in read.items())
        await replica.compactor.offer(group, read, replica.transact)
        if head.trajectories:
            yield head.SerializeToString()
            head = types_pb2.TrajectoryGroup()


async def _put_parts(
    replica: RunReplica, record: GroupRecord, left_out: Counter[str] | None
) -> AsyncGenerator[Packed, None]:
    """The bytes of the group itself, without the tag and the length that precede it in the payload."""
    whole = slice_of(record)
    # The end first: a payload stored whole is present whole or not at all.
    if not await _load(replica, whole.payload_id, whole.end - 1, whole.end):
        if left_out is None:
            await give_up(replica, record)
        _note_lost(record.put.group_ids[0], len(record.put.sample_tokens), left_out)
        return
    for start in range(whole.start, whole.end, READ_BYTES):
        end = min(whole.end, start + READ_BYTES)
        data = await _load(replica, whole.payload_id, start, end)
        if len(data) < end - start:
            raise _given_up(record.put.group_ids[0])
        yield data[prefix_size(data) :] if start == whole.start else data


async def _load(replica: RunReplica, payload_id: str, start: int, end: int) -> Packed:
    [data] = await replica.payloads.load([PayloadSlice(payload_id=payload_id, start=start, end=end)])
    return data


def _note_lost(group_id: str, num_samples: int, left_out: Counter[str] | None) -> None:
    """Count samples without payload. Raises GivenUpError unless they are to be left out."""
    if left_out is None:
        raise _given_up(group_id)
    left_out[group_id] += num_samples


def _given_up(group_id: str) -> GivenUpError:
    return GivenUpError(f"group {group_id!r} was given up while it was sent: reconnect")
