"""Deletes the token shards of a run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

from services.broker.records.shard_ids import shard_id
from services.broker.records.store import Root, Store
from services.broker.records_pb2 import RunRecord, ShardRecord


async def remove_shards(store: Store, run_id: str, shards: Iterable[int]) -> AsyncIterator[int]:
    """Delete these shards slice by slice; yields how many keys and records each slice took.

    May be repeated and interrupted. Raises ConflictError if one of them was changed meanwhile.
    """
    documents = [shard_id(run_id, shard) for shard in shards]
    for document, root in zip(documents, await store.roots(documents), strict=True):
        if root is not None:
            async for num_cut in _remove(store, document, root):
                yield num_cut


async def remove_stale(store: Store, run_id: str, shard: int) -> bool:
    """Delete a shard unless it is the present run's; returns whether there was nothing to keep.

    Raises ConflictError if it was changed meanwhile.
    """
    document = shard_id(run_id, shard)
    # The shard first: what is read of the run later tells whether that shard's run is gone, however late it is used.
    [root] = await store.roots([document])
    if root is None:
        return True
    [run] = await store.roots([run_id])
    if run is not None:
        record = RunRecord.FromString(run.run)
        if not record.payload_gone and record.open_s == ShardRecord.FromString(root.run).open_s:
            return False
    async for _num_cut in _remove(store, document, root):
        pass
    return True


async def _remove(store: Store, document: str, root: Root) -> AsyncIterator[int]:
    async for num_cut in store.purge(document, root.mark):
        yield num_cut
    await store.delete(document, root.mark)
