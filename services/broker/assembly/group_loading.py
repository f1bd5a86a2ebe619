"""Records of groups with their payload, as they leave the broker."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from typing import TypeVar

import structlog

from penstock.v1 import types_pb2
from penstock.wire.codec import Packed
from services.broker.assembly.messages import kept_indices, trajectory_group
from services.broker.operations import drops
from services.broker.records_pb2 import GroupRecord, ParcelRecord
from services.broker.runtime.run_replica import RunHub
from services.broker.state.batch_index import slice_of

_log = structlog.get_logger()


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
            loaded[parcel.sequence] = b""
            await give_up(hub, parcel)
    return loaded


async def give_up(hub: RunHub, parcel: ParcelRecord) -> None:
    """Drop a parcel whose payload the store has lost."""
    _log.error("payload is lost", run_id=hub.run_id, payload_id=parcel.payload_id)
    await hub.transact(partial(drops.drop_groups, group_ids=list(parcel.group_ids), reason=drops.PAYLOAD_LOST))


_Record = TypeVar("_Record", bound=GroupRecord | ParcelRecord)


def copy_of(record: _Record) -> _Record:
    """A copy that later transactions do not change."""
    return deepcopy(record)
