"""A run with token shards over three brokers: any of them takes anything, and each shard is written by its owner."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from penstock.clients.leases import LeaseSession
from penstock.clients.sharding import core_connection
from penstock.errors import UnknownRunError, WrongOwnerError, from_rpc_error
from penstock.process.tasks import end
from penstock.v1 import broker_pb2, types_pb2
from services.broker.brokers.joining import JoinedBrokers
from services.broker.records.store import Store
from services.broker.storage.memory_store import MemoryStore
from services.broker.streams import core_hints, shard_hints
from tests.helpers.brokers.broker import (
    RUN,
    Generator,
    RunningBroker,
    Trainer,
    Worker,
    chunk,
    eventually,
    prompt,
    serving,
)
from tests.helpers.brokers.steps import ack_step
from tests.helpers.waiting import until

pytestmark = pytest.mark.slow

NUM_SHARDS = 3
STOP = types_pb2.FINISH_REASON_STOP


def joined(broker: RunningBroker) -> JoinedBrokers:
    assert broker.brokers is not None
    return broker.brokers


@asynccontextmanager
async def three_brokers(store: Store) -> AsyncIterator[list[RunningBroker]]:
    """They know each other; a run with shards is open."""
    async with AsyncExitStack() as stack:
        brokers = [await stack.enter_async_context(serving(store, is_joined=True)) for _ in range(3)]
        for broker in brokers:
            await joined(broker).membership.answer()
        await brokers[0].open(policy=broker_pb2.RunPolicy(token_shards=NUM_SHARDS), groups_per_step=4)
        yield brokers


async def map_at(broker: RunningBroker) -> broker_pb2.ShardMap:
    response = await broker.call("GetShardMap", broker_pb2.GetShardMapRequest(run_id=RUN))
    shard_map: broker_pb2.ShardMap = response.shard_map
    return shard_map


def owner_of(brokers: list[RunningBroker], shard: int) -> RunningBroker:
    owner = joined(brokers[0]).membership.shard_owner(RUN, shard, NUM_SHARDS)
    return next(broker for broker in brokers if owner is not None and joined(broker).membership.name == owner.name)


async def test_chunks_at_any_broker_are_written_by_their_owners_and_the_step_is_trained(store: Store) -> None:
    async with three_brokers(store) as brokers:
        core = brokers[0]
        await core.submit(*(prompt(name) for name in "abcd"))
        worker, trainer = Worker.connect(core.channel), Trainer.connect(core.channel)
        # Of as many home shards as possible: whatever broker its tokens go to.
        generators = [Generator.connect(core.channel, f"gen-{number}") for number in range(4)]
        shards: set[int] = set()
        for number, generator in enumerate(generators):
            generator.tokens = Generator.connect(brokers[number % 3].channel).tokens
            generator.beat(credits=2, version=0)
            leases = await generator.leases(2)
            shards |= {lease.token_shard for lease in leases}
            assert await generator.put(*(chunk(lease, [1, 2]) for lease in leases), must_pass_on=True) == []
            assert await generator.put(*(chunk(lease, [3], offset=2, finish=STOP) for lease in leases)) == []
        await worker.score(8)
        await ack_step(trainer, 4, version=0)
        audit = await core.audit()
        assert audit.trained == 8
        for shard in shards:
            for broker in brokers:
                has_written = broker.run_registry.own_shards.replica(RUN, shard).copy is not None
                assert has_written == (broker is owner_of(brokers, shard))
        assert sum(broker.run_registry.own_shards.num_conflicts for broker in brokers) == 0


async def test_all_brokers_say_the_same_and_a_stream_says_it_first_and_when_it_changes() -> None:
    async with three_brokers(MemoryStore()) as brokers:
        maps = [await map_at(broker) for broker in brokers]
        assert len({shard_map.epoch for shard_map in maps}) == 1
        assert sorted(maps[0].owners) == [0, 1, 2]
        assert {shard_map.here for shard_map in maps} == set(maps[0].addresses)
        await brokers[0].submit(prompt("a"))
        generator = Generator.connect(brokers[0].channel)
        generator.beat(credits=2, version=0)
        leases = await generator.leases(2)
        said = []
        for offset in range(3):
            generator.tokens.send(
                broker_pb2.StreamTokensRequest(
                    run_id=RUN, generator_id="gen-1", sequence=offset + 1, chunks=[chunk(leases[0], [7], offset=offset)]
                )
            )
            said.append(await generator.tokens.receive())
            if offset == 1:
                await joined(brokers[2]).leave()
                await joined(brokers[0]).membership.answer()
        assert [response.HasField("shard_map") for response in said] == [True, False, True]
        assert said[0].shard_map == maps[0]
        assert said[2].shard_map.epoch > maps[0].epoch


async def test_a_sender_that_never_listens_is_refused_with_the_owners_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shard_hints, "MAX_MISDIRECTED", 4)
    async with three_brokers(MemoryStore()) as brokers:
        await brokers[0].submit(prompt("a"))
        generator = Generator.connect(brokers[0].channel)
        generator.beat(credits=1, version=0)
        [lease] = await generator.leases(1)
        # Where generators lease is announced once, and would be news between the requests below.
        for broker in brokers:
            await joined(broker).membership.answer()
        right = owner_of(brokers, lease.token_shard)
        wrong = next(broker for broker in brokers if broker is not right)
        stubborn, patient = Generator.connect(wrong.channel), Generator.connect(wrong.channel)
        for offset in range(8):
            assert await patient.put(chunk(lease, [7], offset=offset), must_pass_on=True) == []
        for offset in range(8, 13):
            assert await stubborn.put(chunk(lease, [7], offset=offset)) == []
        with pytest.raises(Exception, match=r"4 requests of 'gen-1' in a row") as refused:
            await stubborn.put(chunk(lease, [7], offset=13))
        error = from_rpc_error(refused.value, peer="broker")  # type: ignore[arg-type]
        assert isinstance(error, WrongOwnerError)
        assert error.metadata["owner"] == joined(right).membership.address


async def test_unknown_runs_and_shards_are_refused_by_name() -> None:
    async with three_brokers(MemoryStore()) as brokers:
        with pytest.raises(UnknownRunError, match="'other'"):
            await brokers[1].call("GetShardMap", broker_pb2.GetShardMapRequest(run_id="other"))
        await brokers[0].submit(prompt("a"))
        generator = Generator.connect(brokers[0].channel)
        generator.beat(credits=1, version=0)
        [lease] = await generator.leases(1)
        every = [chunk(lease, [1], token_shard=shard) for shard in range(4, 1025)]
        errors = await generator.put(*every)
        assert {error.reason for error in errors} == {"UNKNOWN_SAMPLE"}
        assert errors[0].message.endswith("run 'run-1' has 3 token shards")


async def test_a_run_that_is_closed_is_forgotten_by_all() -> None:
    async with three_brokers(MemoryStore()) as brokers:
        await map_at(brokers[1])
        membership = joined(brokers[2]).membership

        async def is_noted(is_so: bool) -> bool:
            await membership.answer()
            return membership.roll is not None and (RUN in membership.roll.sharded) == is_so

        await eventually(lambda: is_noted(True))
        await brokers[0].call("CloseRun", broker_pb2.CloseRunRequest(run_id=RUN))
        await joined(brokers[2])._runs.look()
        await eventually(lambda: is_noted(False))


class Holder:
    """Takes whatever leases come."""

    def __init__(self) -> None:
        self.lease_ids: list[str] = []

    def num_free_slots(self) -> int:
        return 2 - len(self.lease_ids)

    def beat(self) -> broker_pb2.GeneratorBeat:
        return broker_pb2.GeneratorBeat(policy_version=0, active_lease_ids=self.lease_ids)

    def lease(self, lease: broker_pb2.Lease) -> None:
        self.lease_ids.append(lease.lease_id)

    def revoke(self, revocation: broker_pb2.LeaseRevocation) -> None:
        self.lease_ids.remove(revocation.lease_id)

    def owned_by(self, owner: broker_pb2.RunOwner) -> None:
        pass

    def run_closed(self) -> None:
        pass


def lease_streams(broker: RunningBroker) -> int:
    """Generators that have their stream here."""
    return len(broker.run_registry.replica(RUN).lease_rounds.seats)


async def is_core_owner(broker: RunningBroker) -> bool:
    """Whether a broker knows that it owns the run's core."""
    await joined(broker).membership.answer()
    owner = joined(broker).membership.core_owner(RUN)
    return owner is not None and owner.name == joined(broker).membership.name


async def test_generators_move_to_the_broker_of_the_trainer_and_back_when_it_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(core_connection, "CONNECT_TIMEOUT_S", 0.2)
    monkeypatch.setattr(core_hints, "MOVE_S", 0.5)
    async with three_brokers(MemoryStore()) as brokers, AsyncExitStack() as stack:
        home = brokers[1]
        Trainer.connect(home.channel)
        await eventually(lambda: is_core_owner(home))
        await home.submit(prompt("a"), prompt("b"), prompt("c"))
        holders = [Holder() for _ in brokers]
        for number, (broker, holder) in enumerate(zip(brokers, holders, strict=True)):
            hello = broker_pb2.GeneratorHello(run_id=RUN, generator_id=f"gen-{number}", max_context_tokens=128)
            session = LeaseSession(broker.connection, hello=hello, handler=holder)
            stack.push_async_callback(end, asyncio.create_task(session.run()))
        await until(lambda: [lease_streams(broker) for broker in brokers] == [0, 3, 0])
        await until(lambda: [len(holder.lease_ids) for holder in holders] == [2, 2, 2])
        await home.server.stop(grace_s=0)
        await until(lambda: lease_streams(brokers[0]) + lease_streams(brokers[2]) == 2)
        assert [len(holder.lease_ids) for holder in holders] == [2, 2, 2]
