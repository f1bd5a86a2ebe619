"""Answers the roll for this process, and knows by it who lives and who owns what; see `roll`."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress

import structlog

from penstock.clock import Clock
from penstock.errors import PenstockError
from services.broker.brokers.owners import core_owner, shard_owners
from services.broker.records.roll import SILENT_S, Broker, Roll
from services.broker.records.store import Store

ANSWER_EVERY_S = 0.5
MAX_OWNERS = 256
"""Runs whose owners are remembered until the roll changes."""
WARN_EVERY_S = 60.0

_log = structlog.get_logger()


class Membership:
    """This process among the brokers of its store.

    Args:
        store: Where the roll is.
        name: This process's name.
        address: Where others reach it, host:port.
        clock: This process's clock.
        serves: Runs with shards whose trainers or reward workers have streams here, and those whose generators have.
    """

    def __init__(
        self,
        store: Store,
        *,
        name: str,
        address: str,
        clock: Clock,
        serves: Callable[[], tuple[frozenset[str], frozenset[str]]] = lambda: (frozenset(), frozenset()),
    ) -> None:
        self.name = name
        self.address = address
        self._store, self._clock, self._serves = store, clock, serves
        self._process = f"{socket.gethostname()}, pid {os.getpid()}, {secrets.token_hex(4)}"
        self._roll: Roll | None = None
        self._heard_s = self._warned_s = -math.inf
        self._shard_owners: dict[tuple[str, int], list[str]] = {}
        self._core_owners: dict[tuple[str, bool], str] = {}
        self.num_rivals_met = 0
        """How often another process had answered by this one's name."""

    async def run(self) -> None:
        """Answer the roll until cancelled. While the store is away the roll ages, and this process owns nothing."""
        while True:
            with suppress(PenstockError):
                await self.answer()
            await asyncio.sleep(ANSWER_EVERY_S)

    async def answer(self) -> None:
        """Answer the roll once. Raises ServiceUnavailableError."""
        serves, leases = self._serves()
        me = Broker(name=self.name, address=self.address, serves=serves, leases=leases)
        # The others count from when the store hears it, which is later.
        asked_s, is_first = self._clock.monotonic_s(), self._roll is None
        roll = await self._store.answer_roll(me, self._process)
        if self._roll is None or roll.epoch != self._roll.epoch:
            self._shard_owners.clear()
            self._core_owners.clear()
            _log.info("brokers", epoch=roll.epoch, names=sorted(roll.brokers))
        self._roll, self._heard_s = roll, asked_s
        if roll.rival and not is_first:
            self._note_rival(roll.rival)

    async def leave(self) -> None:
        """Tell the others that this process stops; if that fails they notice by its silence."""
        me = Broker(name=self.name, address=self.address)
        with suppress(PenstockError):
            await self._store.answer_roll(me, self._process, is_leaving=True)
        self._roll = None

    @property
    def roll(self) -> Roll | None:
        """Who lives, if this process has heard it lately; otherwise it is taken for dead itself, and owns nothing."""
        return self._roll if self._clock.monotonic_s() - self._heard_s <= SILENT_S else None

    def shard_owners(self, run_id: str, num_shards: int) -> list[Broker]:
        """The owner of each shard, from shard 1 on; none if this process has not heard who lives."""
        roll = self.roll
        return [] if roll is None else [roll.brokers[name] for name in self._owner_names(roll, run_id, num_shards)]

    def shard_owner(self, run_id: str, shard: int, num_shards: int) -> Broker | None:
        """The owner of one of them."""
        roll = self.roll
        names = [] if roll is None else self._owner_names(roll, run_id, num_shards)
        return roll.brokers[names[shard - 1]] if roll is not None and names else None

    def owns(self, run_id: str, shard: int) -> bool:
        """Whether this process owns a shard of a run that is noted with the roll."""
        num_shards = 0 if self.roll is None else self.roll.sharded.get(run_id, 0)
        owner = self.shard_owner(run_id, shard, num_shards) if 1 <= shard <= num_shards else None
        return owner is not None and owner.name == self.name

    def core_owner(self, run_id: str, *, leases_here: bool = False) -> Broker | None:
        """The owner of a run's core: where its trainer and reward workers have streams, or else its generators.

        Of several it is one, to which the generators move. With `leases_here` this process counts as one that has
        their streams, though the roll may not say so yet.
        """
        roll = self.roll
        if roll is None or not roll.brokers:
            return None
        name = self._core_owners.get((run_id, leases_here))
        if name is None:
            if len(self._core_owners) >= MAX_OWNERS:
                self._core_owners.clear()
            serving = [name for name, broker in roll.brokers.items() if run_id in broker.serves]
            leasing = {name for name, broker in roll.brokers.items() if run_id in broker.leases}
            leasing |= {self.name} & roll.brokers.keys() if leases_here and leasing else set()
            name = self._core_owners[run_id, leases_here] = core_owner(serving or leasing or roll.brokers, run_id)
        return roll.brokers[name]

    def owns_core(self, run_id: str) -> bool:
        """Whether this process owns a run's core, or cannot tell who does."""
        owner = self.core_owner(run_id)
        return owner is None or owner.name == self.name

    def _owner_names(self, roll: Roll, run_id: str, num_shards: int) -> list[str]:
        names = self._shard_owners.get((run_id, num_shards))
        if names is None:
            if len(self._shard_owners) >= MAX_OWNERS:
                self._shard_owners.clear()
            names = shard_owners(roll.brokers, run_id, num_shards) if roll.brokers else []
            self._shard_owners[run_id, num_shards] = names
        return names

    def _note_rival(self, rival: str) -> None:
        self.num_rivals_met += 1
        now_s = self._clock.monotonic_s()
        if now_s - self._warned_s >= WARN_EVERY_S:
            self._warned_s = now_s
            _log.error(
                f"advertise: two brokers of this Redis are named {self.name}: this one ({self._process}) and another "
                f"({rival}); start only one, or set `advertise` of each to an address of its own"
            )
