"""Says which broker owns which token shard of a run, in the form that clients get."""

from __future__ import annotations

from penstock.errors import ServiceUnavailableError
from penstock.v1 import broker_pb2
from services.broker.brokers.membership import Membership
from services.broker.brokers.sharded_runs import ShardedRuns
from services.broker.records.roll import Roll

MAX_MAPS = 256
"""Runs whose maps are remembered until the roll changes."""


class ShardMaps:
    """See the module."""

    def __init__(self, membership: Membership, runs: ShardedRuns) -> None:
        self._membership, self._runs = membership, runs
        self._roll: Roll | None = None
        self._maps: dict[tuple[str, int], broker_pb2.ShardMap] = {}

    async def of(self, run_id: str) -> broker_pb2.ShardMap:
        """The map of a run.

        Raises:
            UnknownRunError: no such run.
            ServiceUnavailableError: this broker has not heard from the others lately: its clients should leave it.
        """
        num_shards = await self._runs.num_shards(run_id)
        roll = self._membership.roll
        if roll is None:
            raise ServiceUnavailableError("this broker does not hear from the others through its store: reconnect")
        if self._roll is None or self._roll.epoch != roll.epoch or len(self._maps) >= MAX_MAPS:
            self._roll = roll
            self._maps.clear()
        found = self._maps.get((run_id, num_shards))
        if found is None:
            found = self._maps[run_id, num_shards] = self._made(run_id, num_shards, roll)
        return found

    def _made(self, run_id: str, num_shards: int, roll: Roll) -> broker_pb2.ShardMap:
        owners = self._membership.shard_owners(run_id, num_shards) if num_shards else []
        numbers = {name: number for number, name in enumerate(dict.fromkeys(owner.name for owner in owners))}
        return broker_pb2.ShardMap(
            epoch=roll.epoch,
            addresses=[roll.brokers[name].address for name in numbers],
            owners=[numbers[owner.name] for owner in owners],
            here=self._membership.address,
        )
