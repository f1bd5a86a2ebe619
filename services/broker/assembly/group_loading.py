"""Loads records of groups with their payload, as the broker sends them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import structlog

from penstock.v1 import types_pb2
from penstock.wire.codec import Packed
from services.broker.assembly.messages import kept_indices, trajectory_group
from services.broker.operations import drops
from services.broker.records.stored_sample import read_sample
from services.broker.records_pb2 import GroupRecord
from services.broker.runtime.run_replica import RunReplica
from services.broker.state.batches import slice_of

_log = structlog.get_logger()


async def load_records(
    replica: RunReplica, records: Sequence[GroupRecord], *, has_text: bool = False
) -> tuple[dict[str, types_pb2.TrajectoryGroup], dict[str, Packed]]:
    """Submitted groups, with the completions' text if requested, and packed groups of puts; by record.

    Submitted groups dropped meanwhile are left out. A put whose payload is lost is dropped, and empty.
    """
    groups = await _load_submitted(
        replica, [record for record in records if not record.HasField("put")], has_text=has_text
    )
    packed = await _load_puts(replica, [record for record in records if record.HasField("put")])
    return {group.prompt.group_id: group for group in groups}, packed


async def _load_submitted(
    replica: RunReplica, groups: Sequence[GroupRecord], *, has_text: bool
) -> list[types_pb2.TrajectoryGroup]:
    prompts = await replica.payloads.prompts([group.group_id for group in groups])
    wanted = {(group.group_id, index): group.token_shard for group in groups for index in kept_indices(group)}
    stored = dict(zip(wanted, await replica.chunks(list(wanted), list(wanted.values())), strict=True))
    loaded: list[types_pb2.TrajectoryGroup] = []
    for group in groups:
        parts = {index: stored[(group.group_id, index)] for index in kept_indices(group)}
        if group.group_id in prompts and all(parts.values()):
            samples = {index: read_sample(chunks) for index, chunks in parts.items()}
            loaded.append(trajectory_group(group, prompts[group.group_id], list(samples.values()), has_text=has_text))
            await replica.compactor.offer(group, samples, replica.transact)
    return loaded


async def _load_puts(replica: RunReplica, records: Sequence[GroupRecord]) -> dict[str, Packed]:
    slices = [slice_of(record) for record in records]
    loaded: dict[str, Packed] = {}
    for record, part, packed in zip(records, slices, await replica.payloads.load(slices), strict=True):
        loaded[record.group_id] = packed
        if len(packed) < part.size_bytes:
            loaded[record.group_id] = b""
            await give_up(replica, record)
    return loaded


async def give_up(replica: RunReplica, record: GroupRecord) -> None:
    """Drop the groups of a put whose payload the store has lost."""
    _log.error("payload is lost", run_id=replica.run_id, payload_id=record.put.payload_id)
    await replica.transact(partial(drops.drop_groups, group_ids=list(record.put.group_ids), reason=drops.PAYLOAD_LOST))
