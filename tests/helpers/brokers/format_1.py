"""A run's records as format 1 of the store kept them."""

from __future__ import annotations

from services.broker.records_pb2 import GroupRecord, ParcelRecord


def as_format_1(record: GroupRecord) -> tuple[str, bytes]:
    """Name and bytes of a record; groups of a put had a name and a message of their own."""
    if not record.HasField("put"):
        return record.group_id, record.SerializeToString()
    old = ParcelRecord(
        **{field.name: value for field, value in record.put.ListFields()},
        sequence=record.sequence,
        submit_version=record.submit_version,
        submit_s=record.submit_s,
        consumer_id=record.consumer_id,
    )
    if record.HasField("trained_version"):
        old.trained_version = record.trained_version
    return f"\n{record.sequence}", old.SerializeToString()
