"""Carries out what belongs to a part of a run at the part's owner: here, or at another broker.

Promises:
- A call moves with ownership: while its owner does not answer, it is repeated at the broker that owns the part by then.
- An owner that lives but cannot be reached from here for UNREACHABLE_S is passed over for a while, and the call carried
  out here: brokers then conflict, which costs time and no exactness.
- A process that has not heard who lives for as long as makes it silent itself refuses, so that clients go elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import structlog

from penstock.clock import Clock
from penstock.errors import (
    InvalidFieldError,
    PenstockError,
    RunClosedError,
    ServiceUnavailableError,
    UnknownRunError,
    UnknownSampleError,
)
from penstock.network.rpc import backoff_s
from penstock.process.tasks import end
from penstock.security import Security
from services.broker.brokers.membership import Membership
from services.broker.brokers.other_brokers import OtherBroker, OtherBrokers
from services.broker.brokers.sharded_runs import ShardedRuns
from services.broker.ingest.token_chunk import ChunkFacts
from services.broker.operations.chunk_rules import Accepted
from services.broker.records.roll import SILENT_S, Broker
from services.broker.records.token_tails import SealRequest, TailReport
from services.broker.records_pb2 import SampleTail
from services.broker.shards.shard_interfaces import Core, TokenShards

LOOK_EVERY_S = 0.25
"""Interval at which a call under way looks whether its part has moved."""
UNREACHABLE_S = SILENT_S + 2.0
"""An owner that is dead is struck off before this."""
PASSED_OVER_S = 30.0
TIDY_EVERY_S = 60.0
_ANSWERS = (InvalidFieldError, RunClosedError, UnknownRunError, UnknownSampleError)
"""Errors that are the owner's answer."""

_T = TypeVar("_T")
_log = structlog.get_logger()


class Router:
    """See the module.

    Args:
        membership: Who lives, and which of them is this process.
        security: Credentials for calls to the others.
        clock: This process's clock.
    """

    def __init__(self, membership: Membership, *, security: Security, clock: Clock) -> None:
        self._membership, self._clock = membership, clock
        self._others = OtherBrokers(security)
        self._passed_over: dict[str, float] = {}
        """Until when, by address."""

    async def at_owner(
        self, find: Callable[[], Broker | None], here: Callable[[], Awaitable[_T]], there: _There[_T]
    ) -> _T:
        """The result of `here` if this process is the owner that `find` names, else of `there` at that broker."""
        give_up_s = self._clock.monotonic_s() + UNREACHABLE_S
        for delay_s in backoff_s(first_s=0.05, most_s=0.5):
            owner = find()
            if owner is None:
                raise ServiceUnavailableError(
                    f"this broker has not heard from the others through its store for {SILENT_S:.0f} s: reconnect"
                )
            if owner.name == self._membership.name or self._is_passed_over(owner.address):
                return await here()
            try:
                return await self._while_owner(owner, find, there(self._others.at(owner.address)))
            except _ANSWERS:
                raise
            except PenstockError as error:
                if self._clock.monotonic_s() > give_up_s:
                    self._pass_over(owner, error)
            await asyncio.sleep(delay_s)
        raise AssertionError("unreachable: backoff_s never ends")

    async def run(self) -> None:
        """Tidy up now and then, until cancelled."""
        while True:
            await asyncio.sleep(TIDY_EVERY_S)
            self.tidy()

    def tidy(self) -> None:
        """Close channels to brokers that are gone."""
        roll = self._membership.roll
        if roll is not None:
            self._others.keep_only({broker.address for broker in roll.brokers.values()})

    async def close(self) -> None:
        """Close all channels."""
        await self._others.close()

    async def _while_owner(self, owner: Broker, find: Callable[[], Broker | None], call: Awaitable[_T]) -> _T:
        """The result of a call, given up once another broker is the owner. Raises ServiceUnavailableError then."""
        task = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait([task], timeout=LOOK_EVERY_S))[0]:
                present = find()
                if present is None or present.name != owner.name:
                    raise ServiceUnavailableError(f"broker {owner.name} is not the owner any more")
            return task.result()
        finally:
            await end(task)

    def _is_passed_over(self, address: str) -> bool:
        until_s = self._passed_over.get(address)
        if until_s is not None and self._clock.monotonic_s() > until_s:
            del self._passed_over[address]
        return address in self._passed_over

    def _pass_over(self, owner: Broker, error: PenstockError) -> None:
        self._passed_over[owner.address] = self._clock.monotonic_s() + PASSED_OVER_S
        _log.warning(
            "a broker lives but does not answer here; what it owns is carried out here, at the price of conflicts: set "
            "its `advertise` to an address that is reached from this machine",
            broker=owner.name,
            address=owner.address,
            error=str(error),
        )


_There = Callable[[OtherBroker], Awaitable[_T]]


class RoutedShards:
    """`TokenShards` of all brokers; `local` are those of this one."""

    def __init__(self, local: TokenShards, router: Router, membership: Membership, runs: ShardedRuns) -> None:
        self._local, self._router, self._membership, self._runs = local, router, membership, runs

    async def accept(self, run_id: str, shard: int, generator_id: str, chunks: Sequence[ChunkFacts]) -> Accepted:
        """See `TokenShards.accept`; chunks of a shard that the run does not have are refused one by one."""
        num_shards = await self._runs.num_shards(run_id)
        if not 1 <= shard <= num_shards:
            text = f"token_shard: {shard}, but run {run_id!r} has {num_shards or 'no'} token shards"
            return Accepted(errors=[chunk.refuse("UNKNOWN_SAMPLE", 0, text) for chunk in chunks], repeated=[])
        return await self._router.at_owner(
            self._owner(run_id, shard, num_shards),
            lambda: self._local.accept(run_id, shard, generator_id, chunks),
            lambda other: other.accept(run_id, shard, generator_id, chunks),
        )

    async def seal(self, run_id: str, shard: int, samples: Sequence[SealRequest]) -> list[SampleTail]:
        """See `TokenShards.seal`."""
        num_shards = await self._runs.num_shards(run_id)
        if not 1 <= shard <= num_shards:
            raise UnknownSampleError(f"token_shard: {shard}, but run {run_id!r} has {num_shards or 'no'} token shards")
        return await self._router.at_owner(
            self._owner(run_id, shard, num_shards),
            lambda: self._local.seal(run_id, shard, samples),
            lambda other: other.seal(run_id, shard, samples),
        )

    def _owner(self, run_id: str, shard: int, num_shards: int) -> Callable[[], Broker | None]:
        return partial(self._membership.shard_owner, run_id, shard, num_shards)


class RoutedCore:
    """`Core` of all brokers; `local` is that of this one."""

    def __init__(self, local: Core, router: Router, membership: Membership) -> None:
        self._local, self._router, self._membership = local, router, membership

    async def report(self, run_id: str, shard: int, reports: Sequence[TailReport]) -> None:
        """See `Core.report`."""
        await self._router.at_owner(
            lambda: self._membership.core_owner(run_id),
            lambda: self._local.report(run_id, shard, reports),
            lambda other: other.report(run_id, shard, reports),
        )
