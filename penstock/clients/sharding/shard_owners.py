"""Reads what brokers say of who owns a run's token shards."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.targets import checked_address
from penstock.v1 import broker_pb2

MAX_SHARDS = 1_024
MAX_ADDRESSES = 256


class BadShardMapError(ValueError):
    """A map that is malformed; the message names the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOwners:
    """A checked map."""

    epoch: int = 0
    by_shard: list[str] = field(default_factory=list)
    """Address of the owner of each shard, from shard 1 on."""
    here: str = ""
    """Address of the generator's own broker; empty if it is unknown."""

    @classmethod
    def of(cls, shard_map: broker_pb2.ShardMap) -> ShardOwners:
        """What a map says. Raises BadShardMapError."""
        addresses, owners = list(shard_map.addresses), shard_map.owners
        if len(addresses) > MAX_ADDRESSES or len(owners) > MAX_SHARDS:
            raise BadShardMapError(
                f"shard_map: {len(addresses)} addresses and {len(owners)} shards; must be at most {MAX_ADDRESSES} and "
                f"{MAX_SHARDS}"
            )
        if owners and max(owners) >= len(addresses):
            raise BadShardMapError(f"shard_map.owners: {max(owners)}, but there are {len(addresses)} addresses")
        try:
            checked = [checked_address(address) for address in addresses]
            here = checked_address(shard_map.here) if shard_map.here else ""
        except ValueError as error:
            raise BadShardMapError(f"shard_map.addresses: {error}") from error
        return cls(
            epoch=shard_map.epoch,
            by_shard=[checked[number] for number in owners],
            here=here,
        )

    def of_shard(self, shard: int) -> str:
        """The address of a shard's owner; empty if it is unknown."""
        return self.by_shard[shard - 1] if 1 <= shard <= len(self.by_shard) else ""
