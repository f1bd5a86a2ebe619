"""Joins this process's runs and shards to the other brokers of its store."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from penstock.network import rpc
from penstock.security import Security
from services.broker.brokers.attendance import Attendance
from services.broker.brokers.membership import Membership
from services.broker.brokers.routing import RoutedCore, RoutedShards, Router
from services.broker.brokers.shard_maps import ShardMaps
from services.broker.brokers.shard_service import ShardService
from services.broker.brokers.sharded_runs import ShardedRuns
from services.broker.runtime.run_registry import RunRegistry


class JoinedBrokers:
    """From its making on, what the registry asks of shards and cores goes to their owners.

    Args:
        run_registry: The runs and shards of this process, not in use yet.
        name: Its name among the brokers.
        address: Where they reach it, host:port.
        security: Credentials for calls to them.
    """

    def __init__(self, run_registry: RunRegistry, *, name: str, address: str, security: Security) -> None:
        store, clock, shards = run_registry.store, run_registry.clock, run_registry.own_shards
        self.membership = Membership(store, name=name, address=address, clock=clock, serves=run_registry.served_runs)
        self._runs = ShardedRuns(store, self.membership, clock)
        self._router = Router(self.membership, security=security, clock=clock)
        self._attendance = Attendance(
            shards, self.membership, keeping=lambda run_id: run_registry.replica(run_id).kept()
        )
        self.shard_maps = ShardMaps(self.membership, self._runs)
        run_registry.shards = RoutedShards(shards, self._router, self.membership, self._runs)
        shards.core = RoutedCore(run_registry, self._router, self.membership)
        shards.is_ours = self.membership.owns
        run_registry.owns_core = self.membership.owns_core
        self.service = rpc.service_of(ShardService(shards, run_registry))
        """To be served beside the broker's own."""

    @property
    def loops(self) -> Sequence[Callable[[], Coroutine[Any, Any, None]]]:
        """What runs as long as the process does."""
        return self.membership.run, self._runs.run, self._attendance.run, self._router.run

    async def leave(self) -> None:
        """Tell the others that this process stops."""
        await self.membership.leave()
        await self._router.close()
