"""PutTrajectories through a served broker, on the memory store and on a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from penstock.clients.training import MicrobatchSession, ReceivedMicrobatch
from penstock.clients.trajectories import TrajectorySession
from penstock.errors import InvalidFieldError, RunClosedError, from_rpc_error
from penstock.network import rpc
from penstock.network.connection import Connection
from penstock.v1 import broker_pb2, types_pb2
from services.broker.records.store import Store
from services.broker.storage.memory_store import MemoryStore
from services.broker.streams import microbatch_stream, trajectory_stream
from tests.helpers.brokers.broker import RUN, Duplex, RunningBroker, Trainer, eventually, prompt, serving
from tests.helpers.brokers.trajectories import group, groups, pack_groups

TIMEOUT_S = 20.0


@asynccontextmanager
async def producing(broker: RunningBroker, producer_id: str = "p") -> AsyncIterator[TrajectorySession]:
    async with TrajectorySession(broker.connection, run_id=RUN, producer_id=producer_id) as session:
        yield session


@asynccontextmanager
async def training(broker: RunningBroker, *, max_groups: int = 8) -> AsyncIterator[MicrobatchSession]:
    hello = broker_pb2.TrainerHello(
        run_id=RUN, consumer_id="rank-0", purpose=types_pb2.PURPOSE_TRAIN, max_groups=max_groups
    )
    async with MicrobatchSession(broker.connection, hello, max_held_groups=64) as session:
        yield session


async def receive(session: MicrobatchSession, count: int) -> list[types_pb2.TrajectoryGroup]:
    found: list[types_pb2.TrajectoryGroup] = []
    async with asyncio.timeout(TIMEOUT_S):
        while len(found) < count:
            microbatch: ReceivedMicrobatch | None = await session.next(timeout_s=TIMEOUT_S)
            assert microbatch is not None
            found += microbatch.groups
    return found


async def ack(broker: RunningBroker, group_ids: list[str], version: int) -> broker_pb2.AckStepResponse:
    request = broker_pb2.AckStepRequest(run_id=RUN, consumer_id="rank-0", group_ids=group_ids, policy_version=version)
    response: broker_pb2.AckStepResponse = await broker.call("AckStep", request)
    return response


async def test_groups_are_put_handed_out_as_they_were_and_trained(store: Store) -> None:
    async with serving(store) as broker:
        await broker.open(groups_per_step=4)
        made = groups("a", "b", "c", "d")
        async with producing(broker) as producer, training(broker) as trainer:
            receipt = await producer.store(made)
            assert (receipt.num_samples, receipt.refused) == (8, [])
            assert await receive(trainer, 4) == made
            assert (await broker.audit()).in_flight_by_state == {"delivered": 8}
            acked = await ack(broker, ["a", "b", "c", "d"], 1)
            assert (acked.num_samples, acked.max_staleness_seen) == (8, 0)
            books = await broker.audit()
            assert (books.submitted, books.trained, books.in_flight) == (8, 8, 0)
            assert await ack(broker, ["d", "c", "b", "a"], 1) == acked


async def test_a_repetition_of_a_group_that_was_given_up_meanwhile_is_no_error(store: Store) -> None:
    """Its answer was lost; that the run would take no more groups now does not make it a refusal."""
    async with serving(store) as broker:
        await broker.open(groups_per_step=1)
        [first, second] = groups("a", "b")
        async with producing(broker) as producer:
            assert (await producer.store([first])).num_samples == 2
            dropped = broker_pb2.DropGroupsRequest(run_id=RUN, group_ids=["a"], reason="unwanted")
            await broker.call("DropGroups", dropped)
            assert (await producer.store([second])).num_samples == 2
            again = await producer.store([first])
            assert (again.num_samples, again.refused) == (0, [])
            [third] = groups("c")
            assert len((await producer.store([third])).refused) == 1


async def answer(broker: RunningBroker, *requests: broker_pb2.PutTrajectoriesRequest) -> list[Any]:
    """The answers to requests of one stream, sent one after the other."""
    stream = Duplex(broker.stub.PutTrajectories)
    found = []
    for request in requests:
        stream.send(request)
        found.append(await stream.receive())
    return found


def request(put_id: str, *made: types_pb2.TrajectoryGroup, run_id: str = RUN) -> broker_pb2.PutTrajectoriesRequest:
    return broker_pb2.PutTrajectoriesRequest(run_id=run_id, producer_id="p", put_id=put_id, groups=pack_groups(made))


async def test_a_request_sent_again_is_answered_and_stored_once_also_by_another_broker(store: Store) -> None:
    async with serving(store) as one:
        await one.open(groups_per_step=4)
        first, again = await answer(one, request("1", *groups("a", "b")), request("1", *groups("a", "b")))
        assert (first.put_id, first.num_samples, again.num_samples, len(again.errors)) == ("1", 4, 0, 0)
    async with serving(store) as two:
        (late,) = await answer(two, request("1", *groups("a", "b")))
        assert late.num_samples == 0
        async with training(two) as trainer:
            assert [made.prompt.group_id for made in await receive(trainer, 2)] == ["a", "b"]
        books = await two.audit()
        assert (books.submitted, books.in_flight) == (4, 4)


async def test_a_group_that_was_dropped_is_never_stored_again(store: Store) -> None:
    async with serving(store) as broker:
        await broker.open(groups_per_step=4)
        await answer(broker, request("1", *groups("a", "b")))
        await broker.call("DropGroups", broker_pb2.DropGroupsRequest(run_id=RUN, group_ids=["a"], reason="poisoned"))
        (again,) = await answer(broker, request("2", *groups("a", "c")))
        assert again.num_samples == 2
        books = await broker.audit()
        assert (books.submitted, dict(books.dropped)) == (6, {"poisoned": 2})


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b"\xff", "request"),
        (b"\x0a\x05run", "request"),
        (b"\x22\x01a" * 2, "request"),
        (request("1").SerializeToString(), "groups"),
        (broker_pb2.PutTrajectoriesRequest(run_id=RUN, groups=b"\x0a\x02\x0a\x7f").SerializeToString(), "groups"),
        (broker_pb2.PutTrajectoriesRequest(run_id=RUN, groups=bytes(5 << 20)).SerializeToString(), "groups"),
    ],
    ids=["no message", "cut", "groups twice", "no groups", "bad groups", "too large"],
)
async def test_bytes_that_are_no_request_are_refused_and_nothing_is_stored(data: bytes, field: str) -> None:
    async with serving(MemoryStore()) as broker:
        await broker.open(groups_per_step=4)
        method: Any = broker.channel.stream_stream("/penstock.v1.BrokerService/PutTrajectories")
        stream = Duplex(method)
        stream.send(data)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.receive()
        error = from_rpc_error(caught.value, peer="broker")
        assert isinstance(error, InvalidFieldError)
        assert f"{field}: " in str(error)
        assert (await broker.audit()).submitted == 0


async def test_malformed_groups_are_named_and_the_others_stored(store: Store) -> None:
    async with serving(store) as broker:
        await broker.open(groups_per_step=4)
        bad, future = group("bad"), group("future", version=3)
        bad.trajectories[0].ClearField("behavior_logprobs")
        async with producing(broker) as producer:
            receipt = await producer.store([group("a"), bad, group("b"), future], max_groups=3)
        assert receipt.num_samples == 4
        assert [(error.index, error.reason) for error in receipt.refused] == [
            (1, "INVALID_FIELD"),
            (3, "INVALID_FIELD"),
        ]
        assert "ahead of the run's 0" in receipt.refused[1].message


@pytest.mark.parametrize(
    "bad",
    [
        broker_pb2.PutTrajectoriesRequest(run_id=RUN, producer_id="p", put_id="1", groups=b"\x0a\x7f"),
        broker_pb2.PutTrajectoriesRequest(run_id=RUN, producer_id="p", groups=pack_groups(groups("a"))),
        request("1", *groups("a", "b", "c", "d", "e")),
        request("1", *groups("a"), run_id="../up"),
    ],
    ids=["no groups", "no put id", "more than a step", "run id"],
)
async def test_a_request_that_cannot_be_read_ends_the_stream_and_stores_nothing(
    bad: broker_pb2.PutTrajectoriesRequest,
) -> None:
    async with serving(MemoryStore()) as broker:
        await broker.open(groups_per_step=4)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answer(broker, bad)
        assert isinstance(from_rpc_error(caught.value, peer="broker"), InvalidFieldError)
        assert (await broker.audit()).submitted == 0


async def test_a_stalled_trainer_slows_its_producers_down_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trajectory_stream, "HOLD_S", 0.05)
    async with serving(MemoryStore()) as broker:
        await broker.open(groups_per_step=4, max_queued_groups=4, max_staleness=9)
        async with producing(broker) as producer:
            sending = asyncio.create_task(producer.store(groups(*(f"g{n}" for n in range(12))), max_groups=4))
            await eventually(lambda: _has_been_refused(producer))
            assert (await broker.audit()).in_flight == 8
            async with training(broker) as trainer:
                for version in (1, 2, 3):
                    names = [made.prompt.group_id for made in await receive(trainer, 4)]
                    assert (await ack(broker, names, version)).num_samples == 8
                    trainer.release(names)
            assert (await sending).num_samples == 24
        assert (await broker.audit()).trained == 24


async def _has_been_refused(producer: TrajectorySession) -> bool:
    return producer.num_refusals > 0


async def test_a_trainer_that_reads_no_packed_groups_gets_messages() -> None:
    async with serving(MemoryStore()) as broker:
        await broker.open(groups_per_step=4)
        made = groups("a", "b", "c", "d")
        async with producing(broker) as producer:
            await producer.store(made)
        trainer = Trainer.connect(broker.channel)
        assert await trainer.groups(1) == made[:1]
        assert await trainer.groups(3) == made[1:]
        assert (await trainer.ack(["a", "b", "c", "d"], 1)).num_samples == 8


async def test_microbatches_hold_as_many_groups_as_asked_for() -> None:
    async with serving(MemoryStore()) as broker:
        await broker.open(groups_per_step=8)
        made = groups(*"abcdefgh")
        async with producing(broker) as producer, training(broker, max_groups=3) as trainer:
            await producer.store(made)
            sizes, found = [], []
            while len(found) < 8:
                microbatch = await trainer.next(timeout_s=TIMEOUT_S)
                assert microbatch is not None
                sizes.append(len(microbatch.groups))
                found += microbatch.groups
            assert max(sizes) <= 3
            assert found == made


async def test_put_streams_end_with_the_run() -> None:
    async with serving(MemoryStore()) as broker:
        await broker.open(groups_per_step=4)
        async with producing(broker) as producer:
            await producer.store(groups("a"))
            await broker.call("CloseRun", broker_pb2.CloseRunRequest(run_id=RUN))
            with pytest.raises(RunClosedError):
                await producer.store(groups("b"))
        assert (await broker.audit()).submitted == 2


async def test_what_is_left_when_a_run_is_over_is_given_up_by_name(store: Store) -> None:
    async with serving(store) as broker:
        await broker.open(groups_per_step=4, max_staleness=1)
        async with producing(broker) as producer, training(broker, max_groups=4) as trainer:
            await producer.store(groups("a", "b", "c", "d"))
            await ack(broker, [trained.prompt.group_id for trained in await receive(trainer, 4)], 1)
            assert (await producer.store(groups("left"))).num_samples == 2
        assert not (await broker.submit(prompt("prompted"))).errors
        request = broker_pb2.CloseRunRequest(run_id=RUN, drop_reason="run_complete")
        for _ in range(2):
            await broker.call("CloseRun", request)
            books = await broker.audit()
            assert (books.submitted, books.trained, books.in_flight, books.balanced) == (12, 8, 0, True)
            assert books.dropped == {"run_complete": 4}
        with pytest.raises(InvalidFieldError, match="drop_reason"):
            await broker.call("CloseRun", broker_pb2.CloseRunRequest(run_id=RUN, drop_reason="Run complete"))


async def test_unanswered_puts_are_sent_again_to_the_broker_that_comes_back() -> None:
    store = MemoryStore()
    names = [f"g{number}" for number in range(40)]
    async with serving(store) as broker:
        await broker.open(groups_per_step=64)
        listen = f"127.0.0.1:{broker.server.port}"
    async with (
        rpc.open_channel(listen) as channel,
        TrajectorySession(Connection(channel), run_id=RUN, producer_id="p") as producer,
    ):
        sending = asyncio.create_task(producer.store(groups(*names), max_groups=4))
        await asyncio.sleep(0)
        async with serving(store, listen=listen) as again:
            assert (await sending).num_samples == 80
            assert (await again.audit()).submitted == 80


async def test_a_broker_with_too_much_in_its_hands_asks_for_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trajectory_stream, "HOLD_S", 0.02)
    async with serving(MemoryStore()) as broker:
        await broker.open(groups_per_step=4)
        replica = broker.run_registry.replica(RUN)
        replica.coming_bytes = trajectory_stream.MAX_COMING_BYTES
        (refused,) = await answer(broker, request("1", *groups("a")))
        assert (refused.num_samples, refused.HasField("retry_delay")) == (0, True)
        replica.coming_bytes = 0
        (stored,) = await answer(broker, request("1", *groups("a")))
        assert (stored.num_samples, stored.HasField("retry_delay")) == (2, False)
        assert (replica.coming_bytes, replica.num_groups_coming) == (0, 0)


async def test_microbatches_follow_one_another_without_anybody_else_doing_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each would come a waiting interval late if the stream only looked when somebody else changes the run."""
    monkeypatch.setattr(microbatch_stream, "WAITING_EVERY_S", 5.0)
    async with serving(MemoryStore()) as broker:
        await broker.open(groups_per_step=64)
        async with training(broker, max_groups=1) as trainer, producing(broker) as producer:
            await producer.store(groups(*(f"g{number}" for number in range(40))))
            async with asyncio.timeout(4.0):
                assert len(await receive(trainer, 40)) == 40
