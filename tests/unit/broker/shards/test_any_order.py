"""Whatever owners, generators, the run and the store do, in any order: no acknowledged token is lost or doubled."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest

from penstock.errors import ServiceUnavailableError
from penstock.v1 import broker_pb2
from services.broker.operations import drops
from services.broker.records.store import SampleId
from services.broker.shards.shard_registry import ShardRegistry
from services.broker.state.run_state import RunState
from services.broker.storage.memory_store import MemoryStore
from tests.helpers.brokers.sharded_run import ABORTED, STOP, DyingStore, ShardedRun, chunk_of, reasons, seal_request

pytestmark = pytest.mark.slow

NAMES = ("a", "b", "c")
NUM_EVENTS = 150
QUEUED, LEASED = broker_pb2.SAMPLE_STATE_QUEUED, broker_pb2.SAMPLE_STATE_LEASED
SEALING, FINISHED = broker_pb2.SAMPLE_STATE_SEALING, broker_pb2.SAMPLE_STATE_FINISHED


class Play:
    """One random run of events."""

    def __init__(self, seed: int) -> None:
        self.numbers = random.Random(seed)
        self.run = ShardedRun(MemoryStore())
        self.owners: list[ShardRegistry] = []
        self.leases: list[broker_pb2.Lease] = []
        """Every lease ever granted."""
        self.acknowledged: dict[tuple[SampleId, int], dict[int, int]] = {}
        """Tokens by offset, for each sample and attempt."""
        self.num_tokens = 0

    async def begin(self) -> None:
        await self.run.open(*NAMES, max_leases_per_sample=1000, max_completion_tokens=4096)
        self.owners = [self._owner(), self._owner()]

    def _owner(self) -> ShardRegistry:
        fates = [self.numbers.choice(["", "", "", "before", "after"]) for _ in range(NUM_EVENTS)]
        return self.run.process(DyingStore(self.run.store, fates))

    async def lease(self) -> None:
        self.leases += await self.run.lease(1, self.numbers.choice(["gen-1", "gen-2"]))

    async def expire(self) -> None:
        await self.run.expire()

    async def seal(self) -> None:
        """Ask about a sample that is sealing, or late about any lease."""
        for lease in self.leases:
            sample = self.run.sample(_sample(lease))
            is_asked = sample.lease_id == lease.lease_id and sample.state == SEALING
            if is_asked or self.numbers.random() < 0.05:
                with suppress(ServiceUnavailableError):
                    if is_asked:
                        await self.run.seal(self.numbers.choice(self.owners), lease)
                    else:
                        await self.numbers.choice(self.owners).seal("run-1", lease.token_shard, [seal_request(lease)])

    async def send(self) -> None:
        """Send one chunk under some lease, mostly the last, where its generator believes to be."""
        if not self.leases:
            return
        lease = self.leases[-1] if self.numbers.random() < 0.5 else self.numbers.choice(self.leases)
        key = _sample(lease), lease.key.attempt
        known = self.acknowledged.setdefault(key, {})
        stored = await self.run.tokens(lease)
        offset = self.numbers.choice([len(stored), len(known), max(0, len(known) - 1)])
        self.num_tokens += 1
        tokens = [known.get(offset, self.num_tokens)]
        finish = self.numbers.choice([{}] * 8 + [{"finish": STOP}, {"finish": ABORTED}])
        sent = chunk_of(lease, tokens, offset=offset, **finish)
        holder = self.run.holders[lease.lease_id]
        self.run.is_away = self.numbers.random() < 0.1
        for _ in range(self.numbers.choice([1, 1, 2])):
            with suppress(ServiceUnavailableError):
                accepted = await self.numbers.choice(self.owners).accept("run-1", lease.token_shard, holder, [sent])
                if not reasons(accepted) and not accepted.repeated:
                    assert offset not in known, "stored twice"
                    known[offset] = tokens[0]
                    break
        self.run.is_away = False

    async def look(self) -> None:
        self.run.clock.advance(6.0)
        await self.numbers.choice(self.owners).look()

    async def die(self) -> None:
        self.owners[self.numbers.randrange(2)] = self._owner()

    async def restart(self) -> None:
        name = self.numbers.choice(NAMES)

        def operation(state: RunState) -> None:
            if self.numbers.random() < 0.3:
                with state.edit(name) as group:
                    drops.reset_sample(state, group, 0)

        await self.run.core.transact(operation)

    async def check(self) -> None:
        """Every acknowledged token of the present attempt is where it was put."""
        for lease in self.leases:
            attempt = self.run.sample(_sample(lease)).attempt
            if lease.key.attempt != attempt:
                continue
            stored = await self.run.tokens(lease)
            for offset, token in self.acknowledged.get((_sample(lease), attempt), {}).items():
                assert stored[offset : offset + 1] == [token]

    async def finish(self) -> None:
        """Everything ends, and then the run and the shards agree."""
        self.owners = [self.run.process(), self.run.process()]
        for _ in range(50):
            await self.expire()
            for lease in self.leases:
                sample = self.run.sample(_sample(lease))
                if sample.lease_id == lease.lease_id and sample.state == SEALING:
                    await self.run.seal(self.owners[0], lease)
            held = await self.run.lease(len(NAMES))
            self.leases += held
            for lease in held:
                num_tokens = self.run.sample(_sample(lease)).num_tokens
                sent = chunk_of(lease, [7], offset=num_tokens, finish=STOP)
                assert reasons(await self.owners[1].accept("run-1", lease.token_shard, "gen-1", [sent])) == []
                assert len(await self.run.tokens(lease)) == num_tokens + 1
            if all(self.run.sample((name, 0)).state == FINISHED for name in NAMES):
                return
        raise AssertionError("the samples never end")


def _sample(lease: broker_pb2.Lease) -> SampleId:
    return lease.key.group_id, lease.key.sample_index


@pytest.mark.parametrize("seed", range(12))
async def test_no_order_of_events_loses_or_doubles_a_token(seed: int) -> None:
    play = Play(seed)
    await play.begin()
    events = [play.lease, play.expire, play.seal, play.look, play.die, play.restart, *([play.send] * 8)]
    for _ in range(NUM_EVENTS):
        await play.numbers.choice(events)()
        await play.check()
    await play.finish()
    await play.check()
    await play.run.settled()
