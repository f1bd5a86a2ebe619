"""What stores promise of token shards beyond what holds for any document."""

from __future__ import annotations

from services.broker.records.shard_ids import shard_id
from services.broker.records.store import Delta, Replacement, Store
from services.broker.records_pb2 import ShardGroup
from tests.helpers.brokers.broker import RUN


async def test_a_token_shard_is_no_run_and_its_records_name_its_payload(store: Store) -> None:
    shard, sample = shard_id("a", 3), ("g", 1)
    await store.commit("a", None, Delta(run=b"a"))
    group = ShardGroup(group_id="g", num_samples=2).SerializeToString()
    mark = await store.commit(shard, None, Delta(run=b"s", groups={"g": group}, chunks=[(sample, b"c")]))
    assert await store.run_ids() == ["a"]
    assert await store.chunks(shard, [sample]) == [[b"c"]]
    assert await store.chunks("a", [sample]) == [[]]
    assert sum([count async for count in store.purge(shard, mark)]) >= 2
    assert await store.chunks(shard, [sample]) == [[]]
    await store.delete(shard, mark)
    assert await store.roots([shard, "a"]) == [None, (await store.roots(["a"]))[0]]


async def test_chunks_are_replaced_while_their_record_is_the_given_one(store: Store) -> None:
    document = shard_id(RUN, 1)
    chunks = [(("a", 0), b"x"), (("a", 0), b"y"), (("a", 1), b"z"), (("b", 0), b"w")]
    mark = await store.commit(document, None, Delta(run=b"", groups={"a": b"A", "b": b"B"}, chunks=chunks))
    replacements = [
        Replacement(name="a", record=b"A", chunks={("a", 0): b"xy", ("a", 1): b"\0z"}),
        Replacement(name="b", record=b"before", chunks={("b", 0): b"never"}),
        Replacement(name="gone", record=b"", chunks={("gone", 0): b"never"}),
    ]
    samples = [("a", 0), ("a", 1), ("b", 0), ("gone", 0)]
    for _ in range(2):
        assert await store.replace_chunks(document, replacements) == [True, False, False]
        assert await store.chunks(document, samples) == [[b"xy"], [b"\0z"], [b"w"], []]
    [root] = await store.roots([document])
    assert root is not None
    assert root.mark == mark
    assert await store.replace_chunks(document, []) == []
    assert await store.replace_chunks(shard_id(RUN, 2), replacements[:1]) == [False]
