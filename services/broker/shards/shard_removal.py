"""Deletes the token shards of a run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

from services.broker.records.shard_ids import shard_id
from services.broker.records.store import Store


async def remove_shards(store: Store, run_id: str, shards: Iterable[int]) -> AsyncIterator[int]:
    """Delete these shards slice by slice; yields how many keys and records each slice took.

    May be repeated and interrupted. Raises ConflictError if one of them was changed meanwhile.
    """
    documents = [shard_id(run_id, shard) for shard in shards]
    for document, root in zip(documents, await store.roots(documents), strict=True):
        if root is not None:
            async for num_cut in store.purge(document, root.mark):
                yield num_cut
            await store.delete(document, root.mark)
