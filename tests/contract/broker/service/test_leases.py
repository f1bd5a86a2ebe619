"""Leases to generators and scorers over real gRPC, on every store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.process.time_limits import Wake
from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.codec import int32_array, int32_bytes
from services.broker.assembly.messages import MAX_FRAME_BYTES
from services.broker.streams import lease_stream, scoring_stream
from tests.helpers.brokers.broker import (
    RUN,
    Generator,
    RunningBroker,
    Worker,
    chunk,
    duration,
    eventually,
    prompt,
    result,
)
from tests.helpers.waiting import until

STOP = types_pb2.FINISH_REASON_STOP


async def test_never_more_leases_than_credits(broker: RunningBroker) -> None:
    await broker.open()
    await broker.submit(prompt("a"), prompt("b"))
    generator = Generator.connect(broker.channel)
    generator.beat(credits=1)
    await generator.leases(1)
    assert "slot" in await generator.idle_reason()
    generator.beat(credits=2)
    await generator.leases(2)
    assert (await broker.audit()).in_flight_by_state["leased"] == 3


async def test_leases_granted_together_come_in_one_message_to_who_accepts_that(broker: RunningBroker) -> None:
    await broker.open()
    await broker.submit(prompt("a"), prompt("b"))
    generator = Generator.connect(broker.channel, accepts_lease_batches=True)
    generator.beat(credits=3)
    batch = await generator.stream.expect(lambda response: response.leases.leases)
    assert [(lease.key.group_id, lease.key.sample_index) for lease in batch] == [("a", 0), ("a", 1), ("b", 0)]
    generator.beat(credits=1)
    (last,) = await generator.stream.expect(lambda response: response.leases.leases)
    assert await generator.put(*(chunk(lease, [7], finish=STOP) for lease in (*batch, last))) == []


async def test_large_leases_share_no_message(broker: RunningBroker) -> None:
    await broker.open()
    await broker.submit(prompt("a", token_ids=int32_bytes(range(MAX_FRAME_BYTES // 4 // 2))))
    generator = Generator.connect(broker.channel, max_context_tokens=1 << 20, accepts_lease_batches=True)
    generator.beat(credits=2)
    for index in range(2):
        (lease,) = await generator.stream.expect(lambda response: response.leases.leases)
        assert lease.key.sample_index == index


async def test_a_generator_without_leases_learns_why(broker: RunningBroker) -> None:
    await broker.open(groups_per_step=1)
    generator = Generator.connect(broker.channel)
    assert "heartbeat" in await generator.idle_reason()
    generator.beat(credits=9)
    assert "empty" in await generator.idle_reason()
    await broker.submit(prompt("a"), prompt("b"))
    await generator.leases(2)
    assert "admission" in await generator.idle_reason()


async def test_the_time_between_heartbeats_is_measured_for_each_stream(broker: RunningBroker) -> None:
    await broker.open()
    registry = broker.run_registry.metrics.registry

    def is_counted(number: int) -> Callable[[], bool]:
        return lambda: registry.get_sample_value("penstock_broker_heartbeat_gap_seconds_count") == number

    # The first heartbeat of a stream follows none.
    for generator_id, number in (("gen-1", 2), ("gen-2", 4)):
        generator = Generator.connect(broker.channel, generator_id)
        for _ in range(3):
            generator.beat(credits=1)
        await until(is_counted(number))
    longest_s = registry.get_sample_value("penstock_broker_heartbeat_longest_gap_seconds")
    total_s = registry.get_sample_value("penstock_broker_heartbeat_gap_seconds_sum")
    assert longest_s is not None
    assert total_s is not None
    assert 0.0 < longest_s <= total_s


async def test_a_busy_broker_asks_for_fewer_heartbeats_until_it_is_calm(broker: RunningBroker) -> None:
    await broker.open(generation_lease=duration(12.0))
    registry, interval = broker.run_registry.metrics.registry, broker.run_registry.heartbeat_interval
    generator = Generator.connect(broker.channel)
    generator.beat(credits=1)
    assert not (await _idle(generator)).HasField("heartbeat_interval")
    for _ in range(9):
        interval.note_beat()
        interval.update(1.0, 1e-3)
    # A quarter of a lease, less than what is asked of generators with longer ones.
    while (idle := await _idle(generator)).heartbeat_interval != duration(3.0):
        assert not idle.HasField("heartbeat_interval")
    assert "empty" in idle.reason
    run = await broker.call("GetRun", broker_pb2.GetRunRequest(run_id=RUN))
    assert run.heartbeat_interval == duration(3.0)
    generator.beat(credits=1)
    for _ in range(99):
        interval.update(0.0, 1.0)
    while (await _idle(generator)).HasField("heartbeat_interval"):
        pass
    assert not (await broker.call("GetRun", broker_pb2.GetRunRequest(run_id=RUN))).HasField("heartbeat_interval")
    # None came later than it was to.
    assert registry.get_sample_value("penstock_broker_heartbeat_longest_delay_seconds") == 0.0


@pytest.mark.parametrize(
    ("module", "connect"), [(lease_stream, Generator.connect), (scoring_stream, Worker.connect)], ids=["lease", "score"]
)
async def test_a_busy_broker_gives_fewer_signs_of_life_and_is_never_silent_for_long(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch, module: Any, connect: Callable[..., Generator | Worker]
) -> None:
    waits: list[float] = []

    async def wait(event: Wake, timeout_s: float) -> bool:
        waits.append(timeout_s)
        return await event.take_within(timeout_s)

    monkeypatch.setattr(module, "wait_for_event", wait)
    await broker.open()
    stream = connect(broker.channel).stream
    await until(lambda: waits[-1:] == [module.IDLE_EVERY_S])
    interval = broker.run_registry.heartbeat_interval
    for _ in range(9):
        interval.note_beat()
        interval.update(1.0, 1e-3)
    await until(lambda: waits[-1] == pytest.approx(2.25 * module.IDLE_EVERY_S))
    # Whatever wakes it in between.
    monkeypatch.setattr(module, "IDLE_EVERY_S", 3600.0)
    monkeypatch.setattr(module, "MAX_SILENCE_S", 0.2)
    broker.run_registry.replica(RUN).wake()
    for _ in range(10):
        await stream.receive()
    assert waits[-1] <= 0.2


async def _idle(generator: Generator) -> broker_pb2.LeaseIdle:
    return await generator.stream.expect(lambda response: response.idle if response.HasField("idle") else None)


async def test_leases_expire_and_another_generator_goes_on_from_the_last_chunk(broker: RunningBroker) -> None:
    await broker.open(generation_lease=duration(0.5))
    await broker.submit(prompt("a"))
    lost = Generator.connect(broker.channel, "gen-lost")
    lost.beat(credits=2)
    leases = await lost.leases(2)
    assert await lost.put(chunk(leases[0], [7, 8])) == []
    other = Generator.connect(broker.channel, "gen-2")
    other.beat(credits=2)
    again = {lease.key.sample_index: lease for lease in await other.leases(2)}
    assert again[0].prefix_token_ids == b"\7\0\0\0\x08\0\0\0"
    revoked = {await lost.stream.expect(lambda response: response.revocation.lease_id or None) for _ in range(2)}
    assert revoked == {lease.lease_id for lease in leases}
    assert [error.reason for error in await lost.put(chunk(leases[0], [9], offset=2))] == ["LEASE_LOST"]
    assert await other.put(chunk(again[0], [9], offset=2, finish=STOP)) == []


async def test_heartbeats_keep_leases_alive(broker: RunningBroker) -> None:
    await broker.open(generation_lease=duration(0.6))
    await broker.submit(prompt("a"))
    generator = Generator.connect(broker.channel)
    generator.beat(credits=2)
    kept, lost = await generator.leases(2)

    async def is_other_expired() -> bool:
        generator.beat(active=[kept.lease_id])
        return (await broker.audit()).in_flight_by_state["queued"] == 1

    await eventually(is_other_expired)
    assert await generator.put(chunk(kept, [7], finish=STOP)) == []
    assert [error.reason for error in await generator.put(chunk(lost, [7], finish=STOP))] == ["LEASE_LOST"]


async def test_a_generator_that_reconnects_keeps_its_leases(broker: RunningBroker) -> None:
    await broker.open()
    await broker.submit(prompt("a"))
    generator = Generator.connect(broker.channel)
    generator.beat(credits=2)
    leases = await generator.leases(2)
    generator.stream.call.cancel()
    again = Generator.connect(broker.channel)
    again.beat(active=[lease.lease_id for lease in leases])
    assert "slot" in await again.idle_reason()
    await again.finish(leases)
    assert (await broker.audit()).in_flight_by_state["finished"] == 2


async def test_a_process_that_replaces_another_frees_its_leases_at_once(broker: RunningBroker) -> None:
    await broker.open(generation_lease=duration(3600))
    await broker.submit(prompt("a"))
    killed = Generator.connect(broker.channel, "gen-1")
    killed.beat(credits=2)
    first = await killed.leases(2)
    await killed.put(chunk(first[0], [7, 8]))
    successor = Generator.connect(broker.channel, "gen-2", replaces="gen-1")
    successor.beat(credits=2)
    leases = await successor.leases(2)
    assert [int32_array(lease.prefix_token_ids, "prefix").tolist() for lease in leases] == [[7, 8], []]
    # What the former one sends late is refused.
    assert [error.reason for error in await killed.put(chunk(first[0], [9], offset=2))] == ["LEASE_LOST"]
    assert (
        await successor.put(*(chunk(lease, [9], finish=STOP, offset=2 * (lease is leases[0])) for lease in leases))
        == []
    )


async def test_a_dropped_group_is_revoked(broker: RunningBroker) -> None:
    await broker.open()
    await broker.submit(prompt("a"))
    generator = Generator.connect(broker.channel)
    generator.beat(credits=1)
    [lease] = await generator.leases(1)
    request = broker_pb2.DropGroupsRequest(run_id=RUN, group_ids=["a", "nobody"], reason="poisoned")
    assert (await broker.call("DropGroups", request)).num_samples == 2
    assert (await broker.call("DropGroups", request)).num_samples == 0
    assert await generator.stream.expect(lambda response: response.revocation.lease_id or None) == lease.lease_id
    assert [error.reason for error in await generator.put(chunk(lease, [7]))] == ["UNKNOWN_SAMPLE"]
    assert dict((await broker.audit()).dropped) == {"poisoned": 2}
    assert (await broker.submit(prompt("a"))).num_queued_groups == 0


async def test_scores_expire_and_go_to_another_worker(broker: RunningBroker) -> None:
    await broker.open(scoring_lease=duration(0.3))
    await broker.submit(prompt("a"))
    generator = Generator.connect(broker.channel)
    generator.beat(credits=2)
    await generator.finish(await generator.leases(2))
    slow, other = Worker.connect(broker.channel, "slow"), Worker.connect(broker.channel, "other")
    late = await slow.leases(2)
    await other.score(2)
    receipt = await slow.report(*(result(lease) for lease in late))
    assert set(receipt.lost_lease_ids) == {lease.lease_id for lease in late}
    assert (await broker.audit()).in_flight_by_state["scored"] == 2
