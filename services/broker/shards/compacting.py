"""Replaces the chunks of finished samples in a token shard by compact ones.

It is done beside the commits of the shard: the broker that delivers a sample needs no copy of the shard and does not
conflict with its owner. A list of a finished sample changes only with its group's record, which is compared.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.broker.operations.compaction import CompactSample
from services.broker.records.shard_ids import shard_id
from services.broker.records.store import Replacement, Store
from services.broker.records_pb2 import ShardGroup
from services.broker.shards.shard_state import is_complete


async def compact(store: Store, run_id: str, shard: int, samples: Sequence[CompactSample]) -> list[bool]:
    """Replace the chunks of finished samples; for each, whether it was as it was read. Any broker may do it."""
    document = shard_id(run_id, shard)
    by_group: dict[str, list[CompactSample]] = {}
    for sample in samples:
        by_group.setdefault(sample.sample[0], []).append(sample)
    names = list(by_group)
    replacements: list[Replacement] = []
    for name, record in zip(names, await store.records(document, names), strict=True):
        group = ShardGroup.FromString(record or b"")
        chunks = {each.sample: each.payload for each in by_group[name] if _is_whole(group, each)}
        if chunks:
            replacements.append(Replacement(name=name, record=record or b"", chunks=chunks))
    flags = await store.replace_chunks(document, replacements)
    replaced = {
        sample
        for replacement, is_replaced in zip(replacements, flags, strict=True)
        if is_replaced
        for sample in replacement.chunks
    }
    return [each.sample in replaced for each in samples]


def _is_whole(group: ShardGroup, sample: CompactSample) -> bool:
    """Whether the sample ended as it was read."""
    tail = group.tails.get(sample.sample[1])
    return tail is not None and is_complete(tail) and tail.attempt == sample.attempt
