"""What brokers say of who owns token shards is checked before it is believed."""

from __future__ import annotations

import pytest

from penstock.clients.sharding.shard_owners import BadShardMapError, ShardOwners
from penstock.v1 import broker_pb2


def test_it_names_the_owner_of_each_shard() -> None:
    owners = ShardOwners.of(broker_pb2.ShardMap(epoch=3, addresses=["a:1", "b:2"], owners=[1, 0, 1], here="c:3"))
    assert [owners.of_shard(shard) for shard in range(5)] == ["", "b:2", "a:1", "b:2", ""]
    assert (owners.epoch, owners.here) == (3, "c:3")


@pytest.mark.parametrize(
    ("shard_map", "message"),
    [
        (broker_pb2.ShardMap(addresses=["a:1"], owners=[0, 1]), "owners: 1, but there are 1 addresses"),
        (broker_pb2.ShardMap(addresses=["a:1"], owners=[0] * 1025), "1 addresses and 1025 shards"),
        (broker_pb2.ShardMap(addresses=["a:1"] * 257), "257 addresses and 0 shards"),
        (broker_pb2.ShardMap(addresses=["a:1,b:1"], owners=[0]), "addresses: must be host:port"),
        (broker_pb2.ShardMap(addresses=["http://a:1"], owners=[0]), "addresses: must be host:port"),
        (broker_pb2.ShardMap(here="a"), "addresses: must be host:port"),
    ],
)
def test_what_is_malformed_is_refused(shard_map: broker_pb2.ShardMap, message: str) -> None:
    with pytest.raises(BadShardMapError, match=message):
        ShardOwners.of(shard_map)
