"""What belongs to a shard or a core is carried out at its owner, wherever it was asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest

from penstock.clock import ManualClock
from penstock.errors import ForbiddenError, InvalidFieldError, RunClosedError, ServiceUnavailableError, UnknownRunError
from penstock.network import rpc
from penstock.security import Security
from penstock.v1 import broker_pb2, shards_pb2, shards_pb2_grpc, types_pb2
from services.broker.brokers import routing
from services.broker.brokers.other_brokers import OtherBroker
from services.broker.ingest.token_chunk import ChunkFacts, read_chunks
from services.broker.records.roll import SILENT_S
from services.broker.records.token_tails import SealRequest, TailReport
from services.broker.records_pb2 import SampleTail
from services.broker.storage.memory_store import MemoryStore
from tests.helpers.brokers.broker import RUN, chunk
from tests.helpers.brokers.members import Member, members
from tests.helpers.certificates import issue, make_authority
from tests.helpers.waiting import until

pytestmark = pytest.mark.slow

NUM_SHARDS = 12
LEASE = SealRequest(group_id="g", sample_index=0, lease_id="l", attempt=1)


def facts(*offsets: int) -> list[ChunkFacts]:
    lease = broker_pb2.Lease(lease_id="l", key=types_pb2.SampleKey(group_id="g", sample_index=1, attempt=2))
    return read_chunks([chunk(lease, [7, 8], offset=offset) for offset in offsets])


def owner_of(brokers: list[Member], shard: int) -> Member:
    owner = brokers[0].membership.shard_owners(RUN, NUM_SHARDS)[shard - 1]
    return next(each for each in brokers if each.membership.name == owner.name)


def shard_of(brokers: list[Member], owner: Member) -> int:
    return next(shard for shard in range(1, NUM_SHARDS + 1) if owner_of(brokers, shard) is owner)


async def test_chunks_are_accepted_by_their_owner_whichever_broker_gets_them() -> None:
    async with members(MemoryStore(), 3) as brokers:
        for shard in range(1, NUM_SHARDS + 1):
            chunks = facts(0, 3, 102)
            accepted = await brokers[0].shards.accept(RUN, shard, "gen-1", chunks)
            assert [error.next_offset for error in accepted.errors] == [0]
            assert accepted.errors[0].key.attempt == 2
            assert accepted.repeated == [chunks[2]]
            kind, asked, said = owner_of(brokers, shard).local.calls.pop()
            assert (kind, asked, said) == ("accept", shard, ("gen-1", chunks))
        assert not any(each.local.calls for each in brokers)


async def test_seals_and_reports_go_to_their_owners() -> None:
    async with members(MemoryStore(), 2) as brokers:
        here, there = brokers
        there.serves.add(RUN)
        for each in (there, here):
            await each.membership.answer()
        samples = [SealRequest(group_id="g", sample_index=index, lease_id=f"l{index}", attempt=1) for index in range(3)]
        shard = shard_of(brokers, there)
        tails = await here.shards.seal(RUN, shard, samples)
        assert [(tail.lease_id, tail.num_tokens) for tail in tails] == [("l0", 0), ("l1", 1), ("l2", 2)]
        report = TailReport(group_id="g", sample_index=1, tail=SampleTail(lease_id="l", num_tokens=5), token_shard=7)
        await here.core.report(RUN, shard, [report])
        assert there.local.calls == [("seal", shard, samples), ("report", shard, [report])]
        assert here.local.calls == []


async def test_a_call_moves_with_ownership_even_if_its_owner_never_answers() -> None:
    clock = ManualClock()
    async with members(MemoryStore(clock), 2, clock=clock) as brokers:
        here, there = brokers
        there.local.hangs = True
        call = asyncio.create_task(here.shards.accept(RUN, shard_of(brokers, there), "gen-1", facts(0)))
        await until(lambda: there.local.calls)
        clock.advance(SILENT_S + 0.1)
        await here.membership.answer()
        assert (await call).errors == []
        assert len(here.local.calls) == 1


async def test_a_broker_that_refuses_connections_is_waited_for_until_it_is_struck_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, seal, attempts = ManualClock(), OtherBroker.seal, list[str]()

    async def counted(self: OtherBroker, run_id: str, shard: int, samples: Sequence[SealRequest]) -> list[SampleTail]:
        attempts.append(self.peer)
        return await seal(self, run_id, shard, samples)

    monkeypatch.setattr(OtherBroker, "seal", counted)
    async with members(MemoryStore(clock), 2, clock=clock) as brokers:
        here, there = brokers
        shard = shard_of(brokers, there)
        await there.server.stop(grace_s=0)
        call = asyncio.create_task(here.shards.seal(RUN, shard, [LEASE]))
        await until(lambda: len(attempts) > 1)
        assert here.local.calls == []
        clock.advance(SILENT_S + 0.1)
        await here.membership.answer()
        assert [tail.lease_id for tail in await call] == ["l"]
        assert here.local.calls == [("seal", shard, [LEASE])]


async def test_a_broker_that_lives_but_is_out_of_reach_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "UNREACHABLE_S", 0.2)
    async with members(MemoryStore(), 2) as brokers:
        here, there = brokers
        shard = shard_of(brokers, there)
        there.local.error = ServiceUnavailableError("its way to the store is cut")
        for _ in range(2):
            assert (await here.shards.accept(RUN, shard, "gen-1", facts(0))).errors == []
        assert len(here.local.calls) == 2
        assert not any(call[0] != "accept" for call in there.local.calls)


async def test_channels_to_brokers_that_are_gone_are_closed() -> None:
    async with members(MemoryStore(), 3) as brokers:
        here, stays, leaves = brokers
        for other in (stays, leaves):
            await here.shards.seal(RUN, shard_of(brokers, other), [LEASE])
        await leaves.membership.leave()
        await here.membership.answer()
        others = here.router._others
        left = others.at(leaves.membership.address)
        here.router.tidy()
        assert set(others._brokers) == {stays.membership.address}
        await until(lambda: left.channel.get_state() == grpc.ChannelConnectivity.SHUTDOWN)


async def test_an_owners_refusal_is_its_answer() -> None:
    async with members(MemoryStore(), 2) as brokers:
        here, there = brokers
        there.local.error = RunClosedError("closed")
        with pytest.raises(RunClosedError, match="closed"):
            await here.shards.accept(RUN, shard_of(brokers, there), "gen-1", facts(0))
        assert here.local.calls == []


async def test_a_broker_that_has_not_heard_who_lives_sends_its_clients_elsewhere() -> None:
    clock = ManualClock()
    async with members(MemoryStore(clock), 1, clock=clock) as [alone]:
        clock.advance(SILENT_S + 0.1)
        with pytest.raises(ServiceUnavailableError, match="reconnect"):
            await alone.shards.accept(RUN, 1, "gen-1", facts(0))
        with pytest.raises(ServiceUnavailableError, match="reconnect"):
            await alone.core.report(RUN, 1, [])


@pytest.mark.parametrize("shard", [NUM_SHARDS + 1, 4_000_000_000])
async def test_shards_that_a_run_does_not_have_are_refused_by_name(shard: int) -> None:
    async with members(MemoryStore(), 2) as brokers:
        accepted = await brokers[0].shards.accept(RUN, shard, "gen-1", facts(0, 2))
        assert [error.reason for error in accepted.errors] == ["UNKNOWN_SAMPLE"] * 2
        assert accepted.errors[0].message == f"token_shard: {shard}, but run 'run-1' has 12 token shards"
        with pytest.raises(UnknownRunError):
            await brokers[0].shards.accept("other", 1, "gen-1", facts(0))


TOKENS = ("broker:0123456789abcdef", "generator:0123456789abcdef")


async def test_only_brokers_may_call_it() -> None:
    security = Security(token=TOKENS[0], accepted_tokens=TOKENS[1:], allows_plain=True)
    async with members(MemoryStore(), 2, security=security) as brokers:
        here, there = brokers
        assert len(await here.shards.seal(RUN, shard_of(brokers, there), [LEASE])) == 1
        generator = Security(token=TOKENS[1], allows_plain=True)
        async with rpc.open_channel(there.membership.name, generator) as channel:
            stub = shards_pb2_grpc.ShardServiceStub(channel)
            for method, request in (
                (stub.AcceptChunks, shards_pb2.AcceptChunksRequest(run_id=RUN, token_shard=1)),
                (stub.SealLeases, shards_pb2.SealLeasesRequest(run_id=RUN, token_shard=1)),
                (stub.ReportTails, shards_pb2.ReportTailsRequest(run_id=RUN, token_shard=1)),
            ):
                with pytest.raises(ForbiddenError, match="is not open to generator"):
                    await rpc.call(method, request, peer="broker")


async def test_brokers_call_each_other_by_their_certificates(tmp_path: Path) -> None:
    authority = make_authority(tmp_path)
    security = issue(authority, roles=("broker",), name="broker-1")
    async with members(MemoryStore(), 2, security=security) as brokers:
        here, there = brokers
        # The sender is no name of the certificate's holder.
        accepted = await here.shards.accept(RUN, shard_of(brokers, there), "gen-1", facts(0))
        assert accepted.errors == []
        assert [call[0] for call in there.local.calls] == ["accept"]
        of_another_run = issue(authority, roles=("broker",), run="other", name="broker-2")
        async with rpc.open_channel(there.membership.name, of_another_run) as channel:
            with pytest.raises(ForbiddenError, match="run_id"):
                await rpc.call(shards_pb2_grpc.ShardServiceStub(channel).SealLeases, sealing(), peer="broker")


def sealing(
    *, shard: int = 1, group_id: str = "g", lease_id: str = "l", count: int = 1
) -> shards_pb2.SealLeasesRequest:
    lease = shards_pb2.EndedLease(key=types_pb2.SampleKey(group_id=group_id), lease_id=lease_id)
    return shards_pb2.SealLeasesRequest(run_id=RUN, token_shard=shard, leases=[lease] * count)


async def test_nonsense_is_refused_by_name() -> None:
    async with members(MemoryStore(), 1) as [broker], rpc.open_channel(broker.membership.name) as channel:
        stub = shards_pb2_grpc.ShardServiceStub(channel)
        bad = shards_pb2.SampleReport(key=types_pb2.SampleKey(group_id="g"), tail=b"\xff")
        far = shards_pb2.SampleReport(key=types_pb2.SampleKey(group_id="g"), token_shard=1025)
        for method, request, message in (
            (stub.SealLeases, sealing(shard=0), "token_shard: 0"),
            (stub.SealLeases, sealing(shard=1025), "token_shard: 1025"),
            (stub.SealLeases, sealing(lease_id=""), "lease_id"),
            (stub.SealLeases, sealing(group_id=""), "group_id"),
            (stub.SealLeases, sealing(count=4097), "leases: 4097"),
            (stub.AcceptChunks, shards_pb2.AcceptChunksRequest(run_id=RUN, token_shard=1), "sender_id"),
            (
                stub.ReportTails,
                shards_pb2.ReportTailsRequest(run_id=RUN, token_shard=1, reports=[bad]),
                "tail: 1 bytes",
            ),
            (
                stub.ReportTails,
                shards_pb2.ReportTailsRequest(run_id=RUN, token_shard=1, reports=[far]),
                "reports.token_shard: 1025",
            ),
        ):
            with pytest.raises(InvalidFieldError, match=message):
                await rpc.call(method, request, peer="broker")
        assert broker.local.calls == []
