"""Groups of any size that a run's limits allow, through puts, scoring, microbatches and exports, unchanged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest

from penstock.clients.export import StepExport
from penstock.clients.trajectories import TrajectorySession
from penstock.errors import DeadlineError, InvalidFieldError
from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.pieces import MAX_WHOLE_BYTES
from services.broker.assembly import large_groups, microbatch_reader
from services.broker.records.store import Store
from services.broker.storage.memory_store import MemoryStore
from services.broker.streams import export_stream, request_reader, trajectory_parts, trajectory_stream
from tests.contract.broker.trajectories.test_put import ack, producing, receive, training
from tests.helpers.brokers.broker import (
    RUN,
    Duplex,
    Generator,
    RunningBroker,
    Trainer,
    Worker,
    chunk,
    error_of,
    eventually,
    prompt,
    serving,
)
from tests.helpers.brokers.trajectories import group, groups, pack_groups
from tests.helpers.stores.stores import RedisServers, opened_store

pytestmark = pytest.mark.slow

STOP = types_pb2.FINISH_REASON_STOP
MAX_CHUNK_TOKENS = 16_000


@pytest.fixture
async def broker(store: Store) -> AsyncIterator[RunningBroker]:
    async with serving(store) as running:
        yield running


async def sample(broker: RunningBroker, *, group_size: int, num_tokens: int, text: str = "2") -> None:
    """One group through generator and reward worker, each sample of `num_tokens` tokens."""
    most = num_tokens + 16
    sampling = types_pb2.SamplingParams(max_new_tokens=num_tokens)
    await broker.submit(prompt("a", group_size=group_size, sampling=sampling))
    generator = Generator.connect(broker.channel, max_context_tokens=most)
    generator.beat(credits=group_size)
    ids = range(num_tokens)
    for lease in await generator.leases(group_size):
        for start in range(0, num_tokens, MAX_CHUNK_TOKENS):
            is_last = start + MAX_CHUNK_TOKENS >= num_tokens
            part = chunk(lease, ids[start : start + MAX_CHUNK_TOKENS], offset=start, finish=STOP if is_last else 0)
            part.text = text if is_last else ""
            assert await generator.put(part) == []
    worker = Worker.connect(broker.channel)
    for number in range(group_size):
        await worker.score(1, float(number % 2))


async def exported(broker: RunningBroker) -> list[types_pb2.TrajectoryGroup]:
    """What a recorder gets."""
    steps = StepExport(broker.connection, run_id=RUN, follow=False)
    return [response.group async for response in steps.responses() if response.HasField("group")]


# Beside 64 x 36,000: as many tokens in few samples, so that a single sample is larger than a piece.
@pytest.mark.parametrize(("group_size", "num_tokens"), [(64, 36_000), (16, 131_072)])
async def test_a_sampled_group_that_fits_no_message_reaches_the_trainer_and_the_recorder(
    group_size: int, num_tokens: int
) -> None:
    async with serving(MemoryStore()) as broker:
        await broker.open(groups_per_step=1, group_size=group_size, max_completion_tokens=num_tokens)
        await sample(broker, group_size=group_size, num_tokens=num_tokens)
        async with training(broker) as trainer:
            [made] = await receive(trainer, 1)
            assert trainer.num_connects == 1
        assert len(made.trajectories) == group_size
        expected = np.arange(num_tokens, dtype=np.int32)
        for index, trajectory in enumerate(made.trajectories):
            assert trajectory.key.sample_index == index
            assert np.array_equal(np.frombuffer(trajectory.token_ids, np.int32), expected)
            assert len(trajectory.behavior_logprobs) == 4 * num_tokens
            assert trajectory.score.value == float(index % 2)
        assert (await ack(broker, ["a"], 1)).num_samples == group_size
        [recorded] = await exported(broker)
        for trajectory in recorded.trajectories:
            assert trajectory.text == "2"
            trajectory.text = ""
        assert recorded == made


async def test_a_put_of_1024_samples_of_8192_tokens_is_stored_trained_and_exported(servers: RedisServers) -> None:
    made = group("a", num_samples=1024, num_tokens=8192, prompt=prompt("a", group_size=1024))
    assert made.ByteSize() > 64 * 1024 * 1024
    async with opened_store("redis", servers) as store, serving(store) as broker:
        await broker.open(groups_per_step=2, group_size=1024, max_completion_tokens=8192)
        async with producing(broker) as producer, training(broker) as trainer:
            async with asyncio.timeout(120):
                receipt = await producer.store([made])
            assert (receipt.num_samples, receipt.refused, producer.num_refusals) == (1024, [], 0)
            assert await receive(trainer, 1) == [made]
            assert broker.run_registry.replica(RUN).receiving_bytes == 0
            assert (await ack(broker, ["a"], 1)).num_samples == 1024
        assert await exported(broker) == [made]


async def test_a_group_of_agents_above_4_mib_is_put_and_delivered(broker: RunningBroker) -> None:
    """16 samples x 32k tokens, the size at which long-context agents used to train on nothing."""
    await broker.open(groups_per_step=4, group_size=16, max_completion_tokens=32_768)
    large = group("a", num_samples=16, num_tokens=32_768, prompt=prompt("a", group_size=16))
    large.trajectories[0].text = "y" * 1024 * 1024
    small = group("b", prompt=prompt("b", group_size=16))
    assert large.ByteSize() > MAX_WHOLE_BYTES
    async with producing(broker) as producer, training(broker) as trainer:
        assert (await producer.store([small, large])).num_samples == 18
        received = await receive(trainer, 2)
        assert sorted(received, key=lambda one: one.prompt.group_id) == [large, small]
        assert (await producer.store([large])).num_samples == 0
        assert (await broker.audit()).submitted == 18


async def test_pieces_make_no_difference_whatever_their_size(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups around every limit, sampled and put, by one message and in pieces: a consumer sees the same."""
    await broker.open(groups_per_step=8, max_staleness=2, max_completion_tokens=2000)
    put_ones = groups("b", "c", num_tokens=40) + groups("d", num_tokens=2000) + groups("e", num_tokens=1)
    async with producing(broker) as producer:
        await producer.store(put_ones)
    await sample(broker, group_size=2, num_tokens=50, text="x" * 700)
    plain = Trainer.connect(broker.channel, "plain")
    expected = {one.prompt.group_id: one for one in await plain.groups(5)}
    plain.stream.call.cancel()
    monkeypatch.setattr(large_groups, "MAX_WHOLE_BYTES", 300)
    monkeypatch.setattr(large_groups, "PIECE_BYTES", 7)
    monkeypatch.setattr(large_groups, "READ_BYTES", 64)
    assert (await broker.open(groups_per_step=8, max_staleness=2, max_completion_tokens=2000)).existed
    # A stream of the same consumer that holds nothing gets everything once more.
    again = Trainer.connect(broker.channel, "plain")
    await again.waiting()
    again.stream.call.cancel()
    async with training(broker) as trainer:
        received = {one.prompt.group_id: one for one in await receive(trainer, 5)}
        assert received == expected
        await ack(broker, list(received), 1)
    recorded = {one.prompt.group_id: one for one in await exported(broker)}
    assert [trajectory.text for trajectory in recorded["a"].trajectories] == ["x" * 700] * 2
    for trajectory in recorded["a"].trajectories:
        trajectory.text = ""
    assert recorded == expected


async def test_a_stream_that_ends_within_a_group_gets_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_groups, "MAX_WHOLE_BYTES", 300)
    monkeypatch.setattr(large_groups, "PIECE_BYTES", 100)
    async with serving(MemoryStore()) as broker:
        await broker.open(groups_per_step=2)
        made = groups("a", num_tokens=60)
        async with producing(broker) as producer:
            await producer.store(made)
        hello = broker_pb2.TrainerHello(
            run_id=RUN, consumer_id="rank-0", purpose=types_pb2.PURPOSE_TRAIN, accepts_group_pieces=True
        )
        stream = Duplex(
            broker.stub.StreamMicrobatches, broker_pb2.StreamMicrobatchesRequest(hello=hello, credit_total=2)
        )
        piece = (await stream.receive()).microbatch.piece
        assert (len(piece.data), piece.is_last) == (100, False)
        stream.call.cancel()
        async with training(broker) as trainer:
            assert await receive(trainer, 1) == made


async def test_a_consumer_that_takes_no_pieces_hears_which_group_fits_no_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As long as groups fit, it is served as ever; see `test_pieces_make_no_difference_whatever_their_size`."""
    monkeypatch.setattr(microbatch_reader, "MAX_MESSAGE_BYTES", 8192)
    monkeypatch.setattr(export_stream, "MAX_MESSAGE_BYTES", 8192)
    async with serving(MemoryStore()) as broker:
        await broker.open(groups_per_step=1, max_completion_tokens=2000)
        async with producing(broker) as producer:
            await producer.store(groups("a", num_tokens=2000))
        trainer = Trainer.connect(broker.channel, "rank-0")
        trainer.stream.send(broker_pb2.StreamMicrobatchesRequest(credit_total=1))
        error = await error_of(trainer.stream)
        assert isinstance(error, InvalidFieldError)
        assert str(error).startswith("broker: hello.accepts_group_pieces: group 'a' has 32")
        async with training(broker) as reader:
            await receive(reader, 1)
            await ack(broker, ["a"], 1)
        request = broker_pb2.ExportTrajectoriesRequest(run_id=RUN)
        with pytest.raises(grpc.aio.AioRpcError, match="accepts_group_pieces: group 'a' has 32"):
            await broker.stub.ExportTrajectories(request, timeout=20).read()


async def test_a_sample_of_the_longest_completion_is_continued_and_scored_with_its_text(broker: RunningBroker) -> None:
    num_tokens, text = 1 << 20, "w" * 8 * 1024 * 1024
    await broker.open(groups_per_step=1, group_size=1, max_completion_tokens=num_tokens)
    await broker.submit(prompt("a", group_size=1, sampling=types_pb2.SamplingParams(max_new_tokens=num_tokens)))
    generator = Generator.connect(broker.channel, max_context_tokens=num_tokens + 16)
    generator.beat(credits=1)
    [lease] = await generator.leases(1)
    for start in range(0, num_tokens - 1, 1 << 16):
        count = min(1 << 16, num_tokens - 1 - start)
        assert await generator.put(chunk(lease, range(count), offset=start)) == []
    aborted = chunk(lease, [], offset=num_tokens - 1, finish=types_pb2.FINISH_REASON_ABORTED, text="")
    assert await generator.put(aborted) == []
    generator.beat(credits=1)
    [lease] = await generator.leases(1)
    assert len(lease.prefix_token_ids) == 4 * (num_tokens - 1)
    assert await generator.put(chunk(lease, [5], offset=num_tokens - 1, finish=STOP, text=text)) == []
    [item] = [leased.item for leased in await Worker.connect(broker.channel).leases(1)]
    assert (item.completion_text, len(item.token_ids)) == (text, 4 * num_tokens)


async def test_limits_that_could_not_be_delivered_are_refused_when_the_run_is_opened(broker: RunningBroker) -> None:
    with pytest.raises(InvalidFieldError, match=r"limits.group_size: 1024 samples of 16385 tokens are 16778240 tokens"):
        await broker.open(group_size=1024, max_completion_tokens=16_385)
    with pytest.raises(InvalidFieldError, match=r"limits.groups_per_step: 65536 groups of 1024 samples cannot be"):
        await broker.open(groups_per_step=65_536, group_size=1024, max_completion_tokens=1024)
    await broker.open(groups_per_step=65_536, group_size=64, max_completion_tokens=16_384)


# -- parts of a put ----------------------------------------------------------------------------------------------------


def parts_of(packed: bytes, *, put_id: str = "one", size: int = 50) -> list[broker_pb2.PutTrajectoriesRequest]:
    """A put cut by hand."""
    return [
        broker_pb2.PutTrajectoriesRequest(
            run_id=RUN,
            producer_id="p",
            put_id=put_id,
            groups=packed[start : start + size],
            offset=start,
            total_bytes=len(packed),
        )
        for start in range(0, len(packed), size)
    ]


async def answer(stream: Duplex) -> Any:
    """The next answer that is more than a sign of life."""
    return await stream.expect(lambda response: None if response.received_bytes else response)


@pytest.fixture
async def open_broker() -> AsyncIterator[RunningBroker]:
    async with serving(MemoryStore()) as running:
        await running.open(groups_per_step=4)
        yield running


async def test_parts_are_received_answered_and_stored_as_one_put(open_broker: RunningBroker) -> None:
    made = groups("a", "b", "c")
    parts = parts_of(pack_groups(made))
    stream = Duplex(open_broker.stub.PutTrajectories, *parts)
    assert [(await stream.receive()).received_bytes for _ in parts[:-1]] == [50 * n for n in range(1, len(parts))]
    assert (await stream.receive()).num_samples == 6
    # Its answer was lost: sent again, whole, by another stream.
    again = Duplex(open_broker.stub.PutTrajectories, *parts)
    response = await answer(again)
    assert (response.num_samples, list(response.errors)) == (0, [])
    async with training(open_broker) as trainer:
        assert await receive(trainer, 3) == made


async def test_a_put_that_breaks_off_leaves_nothing_and_is_sent_again(open_broker: RunningBroker) -> None:
    replica = open_broker.run_registry.replica(RUN)
    parts = parts_of(pack_groups(groups("a", "b")))
    stream = Duplex(open_broker.stub.PutTrajectories, *parts[:3])
    assert [(await stream.receive()).received_bytes for _ in range(3)] == [50, 100, 150]
    assert replica.receiving_bytes == parts[0].total_bytes
    # Begun again on the same stream, it takes its own place.
    for part in parts[:2]:
        stream.send(part)
    assert [(await stream.receive()).received_bytes for _ in range(2)] == [50, 100]
    assert replica.receiving_bytes == parts[0].total_bytes
    stream.call.cancel()
    await eventually(lambda: _is(replica.receiving_bytes == 0))
    assert (await open_broker.audit()).submitted == 0
    assert (await answer(Duplex(open_broker.stub.PutTrajectories, *parts))).num_samples == 4


async def _is(value: bool) -> bool:
    return value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offset": 60}, "offset: 60; the next part of 'one' begins at 50"),
        ({"put_id": "other"}, "put_id: a part of 'other' without its first one"),
        ({"groups": b""}, "groups: bytes 50 to 50 of"),
        ({"groups": b"x" * 5000}, "groups: bytes 50 to 5050 of"),
        ({"total_bytes": (448 << 20) + 1}, "total_bytes: 469762049; a put has 1 to 469762048"),
        ({"total_bytes": 100_000}, "put_id: a part of 'one' without"),
    ],
)
async def test_parts_that_do_not_fit_together_are_refused(
    open_broker: RunningBroker, change: dict[str, Any], message: str
) -> None:
    first, second, *_ = parts_of(pack_groups(groups("a", "b")))
    for name, value in change.items():
        setattr(second, name, value)
    error = await error_of(Duplex(open_broker.stub.PutTrajectories, first, second))
    assert isinstance(error, InvalidFieldError)
    assert message in str(error)
    await eventually(lambda: _is(open_broker.run_registry.replica(RUN).receiving_bytes == 0))


async def test_a_put_for_which_there_is_no_room_is_refused_at_its_first_part(
    open_broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = parts_of(pack_groups(groups("a", "b")))
    monkeypatch.setattr(trajectory_parts, "MAX_RECEIVING_BYTES", parts[0].total_bytes + 10)
    monkeypatch.setattr(trajectory_stream, "HOLD_S", 0.05)
    other = Duplex(open_broker.stub.PutTrajectories, parts_of(pack_groups(groups("c", "d")))[0])
    await other.receive()
    stream = Duplex(open_broker.stub.PutTrajectories, *parts)
    assert (await stream.receive()).HasField("retry_delay")
    other.call.cancel()
    for part in parts:
        stream.send(part)
    assert (await answer(stream)).num_samples == 4


async def test_a_producer_that_goes_silent_within_a_put_loses_its_stream(
    open_broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trajectory_parts, "MAX_PART_SILENCE_S", 0.05)
    monkeypatch.setattr(request_reader, "CHECK_EVERY_S", 0.02)
    error = await error_of(Duplex(open_broker.stub.PutTrajectories, parts_of(pack_groups(groups("a")))[0]))
    assert isinstance(error, DeadlineError)
    assert "no part of put 'one' came" in str(error)
    await eventually(lambda: _is(open_broker.run_registry.replica(RUN).receiving_bytes == 0))


async def test_a_large_put_that_is_refused_on_its_way_is_sent_again_by_the_client(
    open_broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.clients.trajectories.MAX_BYTES_PER_PUT", 500)
    monkeypatch.setattr("penstock.wire.pieces.PIECE_BYTES", 64)
    monkeypatch.setattr(trajectory_parts, "MAX_RECEIVING_BYTES", 100)
    monkeypatch.setattr(trajectory_stream, "HOLD_S", 0.05)
    other = Duplex(open_broker.stub.PutTrajectories, parts_of(pack_groups(groups("x", "y")))[0])
    await other.receive()
    made = groups("a", num_tokens=60)
    async with TrajectorySession(open_broker.connection, run_id=RUN, producer_id="q") as producer:
        storing = asyncio.create_task(producer.store(made))
        await eventually(lambda: _is(producer.num_refusals > 0))
        other.call.cancel()
        assert (await storing).num_samples == 2
    async with training(open_broker) as trainer:
        assert await receive(trainer, 1) == made
