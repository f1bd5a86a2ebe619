"""Reads the groups of a record: one submitted as a prompt, or several that arrived finished in one put. Pure.

Here: functions of one record that answer for both kinds, so that delivery, drops and counters need not distinguish
them. Not here: anything that changes a run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate, pairwise

from penstock.v1 import broker_pb2, types_pb2
from services.broker.records.store import PayloadSlice
from services.broker.records_pb2 import GroupHead, GroupRecord, ParcelRecord, PutColumns, SampleRecord
from services.broker.rules.staleness import group_version

_SCORED, _DELIVERED = broker_pb2.SAMPLE_STATE_SCORED, broker_pb2.SAMPLE_STATE_DELIVERED
_DROPPED = broker_pb2.SAMPLE_STATE_DROPPED
SAMPLE_BYTES = 350
"""What a sample takes in Redis besides its tokens: its part of the record, and its key."""
OLD_TOKEN_BYTES = 12
"""Of a token of a sample in whose record they are not counted."""


# -- reading -----------------------------------------------------------------------------------------------------------


def head_of(data: bytes) -> GroupHead:
    """The properties of a stored record known without reading its samples."""
    return GroupHead.FromString(data)


def read_record(name: str, data: bytes, head: GroupHead) -> GroupRecord:
    """Parse a stored record; converts a format 1 record of a put to the current format."""
    return GroupRecord.FromString(data) if head.sequence else _upgraded(name, ParcelRecord.FromString(data))


def _upgraded(name: str, old: ParcelRecord) -> GroupRecord:
    columns = PutColumns(**{field.name: getattr(old, field.name) for field in PutColumns.DESCRIPTOR.fields})
    record = GroupRecord(group_id=name, purpose=types_pb2.PURPOSE_TRAIN, put=columns)
    for field, value in old.ListFields():
        if field.name not in PutColumns.DESCRIPTOR.fields_by_name:
            setattr(record, field.name, value)
    return record


# -- groups ------------------------------------------------------------------------------------------------------------


def ids(record: GroupRecord) -> Sequence[str]:
    """The record's groups, in order of submission."""
    return record.put.group_ids if record.HasField("put") else (record.group_id,)


def num_groups(record: GroupRecord) -> int:
    """Number of groups in the record."""
    return len(record.put.group_ids) if record.HasField("put") else 1


def oldest_version(record: GroupRecord) -> int | None:
    """Oldest version among its samples, dropped ones left out; None if it is not started."""
    return min(record.put.sample_min_versions) if record.HasField("put") else group_version(record)


def older_than(record: GroupRecord, version: int) -> list[str]:
    """The record's groups with samples of an older version."""
    if not record.HasField("put"):
        oldest = group_version(record)
        return [] if oldest is None or oldest >= version else [record.group_id]
    columns = record.put
    return [
        group_id for group_id, versions in _by_group(columns, columns.sample_min_versions) if min(versions) < version
    ]


def newer_than(record: GroupRecord, version: int) -> list[str]:
    """Groups of a put with samples of a later version."""
    columns = record.put
    return [
        group_id for group_id, versions in _by_group(columns, columns.sample_max_versions) if max(versions) > version
    ]


def _by_group(columns: PutColumns, values: Sequence[int]) -> Iterator[tuple[str, Sequence[int]]]:
    """The samples' values of each group."""
    ends = accumulate(columns.num_samples)
    for group_id, end, count in zip(columns.group_ids, ends, columns.num_samples, strict=True):
        yield group_id, values[end - count : end]


# -- samples -----------------------------------------------------------------------------------------------------------


def kept_samples(record: GroupRecord) -> tuple[Sequence[int], Sequence[int]]:
    """Completion tokens of every sample that is not dropped, and its oldest version in a step that trains on it."""
    if record.HasField("put"):
        return record.put.sample_tokens, record.put.sample_min_versions
    kept = [sample for sample in record.samples if sample.state != _DROPPED]
    versions = [sample.min_version if sample.HasField("min_version") else sample.lease_version for sample in kept]
    return [sample.num_tokens for sample in kept], versions


def in_flight(record: GroupRecord) -> Iterator[tuple[broker_pb2.SampleState.ValueType, int]]:
    """State and completion tokens of each sample of a live record that is not dropped."""
    if record.HasField("put"):
        state = _DELIVERED if record.consumer_id else _SCORED
        yield from ((state, num_tokens) for num_tokens in record.put.sample_tokens)
    else:
        yield from ((each.state, each.num_tokens) for each in record.samples if each.state != _DROPPED)


def sample_states(record: GroupRecord) -> list[tuple[broker_pb2.SampleState.ValueType, int]]:
    """Number of samples of a live record in each state."""
    if record.HasField("put"):
        return [(_DELIVERED if record.consumer_id else _SCORED, len(record.put.sample_tokens))]
    return list(Counter([sample.state for sample in record.samples]).items())


def num_tokens(record: GroupRecord) -> int:
    """Prompt and completion tokens of all samples that wait for the trainer."""
    if record.HasField("put"):
        return sum(record.put.num_tokens)
    kept = [sample.num_tokens for sample in record.samples if sample.state == _SCORED]
    return sum(kept) + record.num_prompt_tokens * len(kept)


def stored_bytes(record: GroupRecord) -> int:
    """Bytes that a record's groups take in the store, with their prompts; the payload alone for a put."""
    if record.HasField("put"):
        return payload_bytes(record)
    return record.prompt_bytes + sum(SAMPLE_BYTES + sample_bytes(sample) for sample in record.samples)


def sample_bytes(sample: SampleRecord) -> int:
    """Bytes of a sample's tokens in the store."""
    if sample.state == _DROPPED:
        return 0
    return sample.stored_bytes or OLD_TOKEN_BYTES * sample.num_tokens


# -- payload of a put --------------------------------------------------------------------------------------------------


def payload_bytes(record: GroupRecord) -> int:
    """Length of the record's part of a put's payload."""
    return sum(record.put.group_bytes)


def slice_of(record: GroupRecord) -> PayloadSlice:
    """Where a put's groups are."""
    start = record.put.payload_start
    return PayloadSlice(payload_id=record.put.payload_id, start=start, end=start + payload_bytes(record))


# -- cutting -----------------------------------------------------------------------------------------------------------


def cuts_between(record: GroupRecord, wanted: Collection[str]) -> list[int]:
    """The positions where wanted groups of a record meet others; empty if all or none are wanted."""
    flags = [group_id in wanted for group_id in ids(record)]
    return [position for position, (before, after) in enumerate(pairwise(flags), 1) if before != after]


def cut_at(record: GroupRecord, cuts: Sequence[int]) -> list[GroupRecord]:
    """Split a put's record before the groups at `cuts` (including 0 and the number of groups); payload is unchanged.

    The first piece keeps the record's name; every other piece is named after its first group.
    """
    columns = record.put
    byte_at = [0, *accumulate(columns.group_bytes)]
    sample_at = [0, *accumulate(columns.num_samples)]
    pieces: list[GroupRecord] = []
    for start, end in pairwise(cuts):
        samples = slice(sample_at[start], sample_at[end])
        piece = GroupRecord(
            group_id=columns.group_ids[start] if start else record.group_id,
            sequence=record.sequence + start,
            purpose=record.purpose,
            submit_s=record.submit_s,
            submit_version=record.submit_version,
            consumer_id=record.consumer_id,
            trained_version=record.trained_version if record.HasField("trained_version") else None,
            put=PutColumns(
                payload_id=columns.payload_id,
                payload_start=columns.payload_start + byte_at[start],
                group_bytes=columns.group_bytes[start:end],
                group_ids=columns.group_ids[start:end],
                num_samples=columns.num_samples[start:end],
                num_tokens=columns.num_tokens[start:end],
                sample_tokens=columns.sample_tokens[samples],
                sample_min_versions=columns.sample_min_versions[samples],
                sample_max_versions=columns.sample_max_versions[samples],
            ),
        )
        pieces.append(piece)
    return pieces
