"""Dispatch over real gRPC: forecasts, who gets what, and work that moves between two scripted generators."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from penstock.errors import ServiceUnavailableError
from penstock.network import rpc
from penstock.process.time_limits import Wake
from penstock.v1 import broker_pb2, scheduler_pb2, scheduler_pb2_grpc, types_pb2
from penstock.wire.codec import int32_array
from services.broker.fleet import dispatcher
from services.broker.operations import leasing
from services.broker.runtime import forecasts
from services.broker.storage.memory_store import MemoryStore
from services.broker.streams import lease_stream
from services.broker.streams.request_reader import wait_for_event
from tests.helpers.brokers.broker import RUN, Generator, RunningBroker, chunk, eventually, prompt, serving

FAST = broker_pb2.GeneratorProfile(max_concurrent_samples=8, step_base_s=0.05, step_per_sample_s=0.0001)
SLOW = broker_pb2.GeneratorProfile(max_concurrent_samples=8, step_base_s=0.5, step_per_sample_s=0.001)
STOP = types_pb2.FINISH_REASON_STOP
PATIENCE_S = 3600.0
"""No machine is so slow."""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generators played by hand beat once, and a scheduler in the same busy process answers when it gets to it."""
    monkeypatch.setattr(dispatcher, "MAX_BEAT_AGE_S", PATIENCE_S)
    monkeypatch.setattr(forecasts, "TIMEOUT_S", PATIENCE_S)


class Scheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Forecasts what it is told to, or fails, or hangs."""

    def __init__(self) -> None:
        self.expected: dict[str, float] = {}
        self.queries: list[scheduler_pb2.LengthQuery] = []
        self.is_away = False
        self.time_left_s = 0.0
        """What the last question gave it."""
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def ForecastLengths(self, request, context):
        """See the proto."""
        await self.may_answer.wait()
        if self.is_away:
            raise ServiceUnavailableError("away")
        self.queries += request.queries
        self.time_left_s = context.time_remaining()
        return scheduler_pb2.ForecastLengthsResponse(
            forecasts=[
                scheduler_pb2.LengthForecast(expected_tokens=self.expected.get(query.group_id))
                for query in request.queries
            ],
            model_version=3,
        )


@asynccontextmanager
async def scheduling() -> AsyncIterator[tuple[Scheduler, str]]:
    """A scheduler and its address."""
    scheduler = Scheduler()
    service = rpc.service_of(scheduler)
    server = rpc.Server(listen="127.0.0.1:0", services=[service])
    port = await server.start()
    try:
        yield scheduler, f"127.0.0.1:{port}"
    finally:
        await server.stop(grace_s=0.0)


@pytest.fixture
async def broker() -> AsyncIterator[RunningBroker]:
    async with serving(MemoryStore()) as running:
        yield running


async def _dispatch_state(broker: RunningBroker) -> str:
    run: broker_pb2.GetRunResponse = await broker.call("GetRun", broker_pb2.GetRunRequest(run_id=RUN))
    return run.dispatch_state


async def test_forecasts_come_with_the_leases_and_the_longest_goes_first() -> None:
    async with scheduling() as (scheduler, target), serving(MemoryStore(), scheduler=target) as broker:
        scheduler.expected = {"a": 10.0, "b": 50.0}
        await broker.open(groups_per_step=4, group_size=1, policy=broker_pb2.RunPolicy(dispatch="lpt"))
        await broker.submit(*(prompt(name, group_size=1) for name in ("a", "b", "c")))
        assert {query.group_id for query in scheduler.queries} == {"a", "b", "c"}
        assert scheduler.queries[0].num_prompt_tokens == 3
        # The deadline is the forecaster's own, which a submission waits for at most, and no default; gRPC rounds it up.
        assert 0.5 * PATIENCE_S < scheduler.time_left_s < 1.1 * PATIENCE_S
        generator = Generator.connect(broker.channel, profile=FAST)
        generator.beat(credits=2)
        leases = await generator.leases(2)
        assert [lease.key.group_id for lease in leases] == ["b", "a"]
        assert leases[0].predicted_tokens == pytest.approx(50.0)
        generator.beat(credits=1)
        (unknown,) = await generator.leases(1)
        assert not unknown.HasField("predicted_tokens")
        assert await _dispatch_state(broker) == "lpt: forecasts of the scheduler (model 3)"


async def test_a_submission_does_not_need_a_scheduler_that_is_away() -> None:
    async with scheduling() as (scheduler, target), serving(MemoryStore(), scheduler=target) as broker:
        scheduler.is_away = True
        await _submits_without_forecasts(broker)
        # It is left alone for a while, then asked again.
        scheduler.is_away = False
        await eventually(lambda: _is_back(broker))


async def test_a_submission_does_not_wait_for_a_scheduler_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scheduling() as (scheduler, target), serving(MemoryStore(), scheduler=target) as broker:
        monkeypatch.setattr(forecasts, "TIMEOUT_S", 0.05)
        scheduler.may_answer.clear()
        await _submits_without_forecasts(broker)
        monkeypatch.setattr(forecasts, "TIMEOUT_S", PATIENCE_S)
        scheduler.may_answer.set()
        await eventually(lambda: _is_back(broker))


async def _submits_without_forecasts(broker: RunningBroker) -> None:
    await broker.open(group_size=1)
    response = await broker.submit(prompt("a", group_size=1))
    assert not response.errors
    assert await _dispatch_state(broker) == "auto: the scheduler is away, lengths unknown"
    generator = Generator.connect(broker.channel)
    generator.beat(credits=1)
    assert (await generator.leases(1))[0].key.group_id == "a"


async def _is_back(broker: RunningBroker) -> bool:
    await broker.submit(prompt("b", group_size=1))
    return "forecasts of the scheduler" in await _dispatch_state(broker)


async def test_a_broker_without_a_scheduler_says_so(broker: RunningBroker) -> None:
    await broker.open()
    assert await _dispatch_state(broker) == "auto: no scheduler is configured, lengths unknown"


async def test_profile_and_measured_rate_show_in_the_run(broker: RunningBroker) -> None:
    await broker.open()
    generator = Generator.connect(broker.channel, profile=FAST)
    generator.beat(num_running=2, tokens_per_second=20.0)

    async def is_measured() -> bool:
        run = await broker.call("GetRun", broker_pb2.GetRunRequest(run_id=RUN))
        return bool(run.generators and run.generators[0].measured_tokens_per_second)

    await eventually(is_measured)
    run = await broker.call("GetRun", broker_pb2.GetRunRequest(run_id=RUN))
    view = run.generators[0]
    assert view.hello.profile == FAST
    # A step of two samples takes 0.1 s, the profile says 0.0502 s.
    assert view.measured_step_factor == pytest.approx(0.1 / 0.0502)


async def test_a_slow_generator_leaves_the_work_to_a_faster_idle_one(broker: RunningBroker) -> None:
    await broker.open(group_size=1, groups_per_step=4)
    slow = Generator.connect(broker.channel, "a-slow", profile=SLOW)
    fast = Generator.connect(broker.channel, "b-fast", profile=FAST)
    fast.beat(credits=4)
    slow.beat(credits=4)
    await eventually(lambda: _are_connected(broker, 2))
    await broker.submit(*(prompt(name, group_size=1) for name in ("a", "b", "c", "d")))
    assert {lease.key.group_id for lease in await fast.leases(4)} == {"a", "b", "c", "d"}
    assert (await broker.call("GetRun", broker_pb2.GetRunRequest(run_id=RUN))).generators[0].num_leases == 0


async def _are_connected(broker: RunningBroker, count: int) -> bool:
    run = await broker.call("GetRun", broker_pb2.GetRunRequest(run_id=RUN))
    return sum(view.HasField("beat") for view in run.generators) == count


async def test_a_lease_that_waits_in_a_full_engine_is_revoked_and_given_to_an_idle_generator(
    broker: RunningBroker,
) -> None:
    await broker.open(group_size=1, groups_per_step=4, max_completion_tokens=4096)
    await broker.submit(prompt("a", group_size=1))
    full = Generator.connect(broker.channel, "full", profile=FAST)
    full.beat(credits=1)
    (waiting,) = await full.leases(1)
    full.beat(active=[waiting.lease_id], num_running=8, num_waiting=1)
    idle = Generator.connect(broker.channel, "idle", profile=FAST)
    idle.beat(credits=1)
    (moved,) = await idle.leases(1)
    assert moved.key == waiting.key
    assert moved.prefix_token_ids == b""
    revoked = await full.stream.expect(lambda response: response.revocation.lease_id or None)
    assert revoked == waiting.lease_id
    (refused,) = await full.put(chunk(waiting, [1, 2]))
    assert refused.reason == "LEASE_LOST"
    await idle.finish([moved])
    await broker.audit()


async def test_a_long_sample_moves_with_its_prefix_and_no_token_is_stored_twice(broker: RunningBroker) -> None:
    await broker.open(group_size=1, groups_per_step=4, max_completion_tokens=4096)
    await broker.submit(prompt("a", group_size=1))
    slow = Generator.connect(broker.channel, "slow", profile=SLOW)
    slow.beat(credits=1)
    (lease,) = await slow.leases(1)
    assert await slow.put(chunk(lease, [11, 12, 13])) == []
    slow.beat(active=[lease.lease_id], num_running=1, tokens_per_second=2.0)
    fast = Generator.connect(broker.channel, "fast", profile=FAST)
    fast.beat(credits=1)
    (moved,) = await fast.leases(1)
    assert int32_array(moved.prefix_token_ids, "prefix").tolist() == [11, 12, 13]
    revoked = await slow.stream.expect(lambda response: response.revocation.lease_id or None)
    assert revoked == lease.lease_id
    # What the slow one decoded beyond its last stored chunk comes late: refused, it is decoded by the fast one alone.
    (refused,) = await slow.put(chunk(lease, [14, 15], offset=3))
    assert (refused.reason, refused.next_offset) == ("LEASE_LOST", 3)
    assert await fast.put(chunk(moved, [24, 25], offset=3, finish=STOP)) == []
    run = await broker.call("GetRun", broker_pb2.GetRunRequest(run_id=RUN))
    assert run.audit.in_flight_by_state["finished"] == 1
    await broker.audit()


async def test_an_idle_stream_speaks_while_the_commits_of_others_wake_it(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_stream, "MAX_SILENCE_S", 0.3)
    monkeypatch.setattr(lease_stream, "IDLE_EVERY_S", 60.0)
    await broker.open()
    idle = Generator.connect(broker.channel)
    idle.beat(credits=1)
    replica = broker.run_registry.replica(RUN)

    async def wake() -> None:
        while True:
            replica.wake()
            await asyncio.sleep(0.01)

    waking = asyncio.create_task(wake())
    assert "empty" in await idle.idle_reason()
    waking.cancel()


async def _leave_to_a_faster_one(broker: RunningBroker, monkeypatch: pytest.MonkeyPatch) -> tuple[Generator, Generator]:
    """A slow generator that found work which is left to a fast one without a free slot; both."""
    reasons: list[str] = []

    def recording(*args: Any, **more: Any) -> str:
        reasons.append(why_none(*args, **more))
        return reasons[-1]

    async def is_left() -> bool:
        return leasing.LEFT_TO_OTHERS in reasons

    why_none = dispatcher.Dispatcher.why_none
    monkeypatch.setattr(dispatcher.Dispatcher, "why_none", recording)
    await broker.open(group_size=1, groups_per_step=4)
    slow = Generator.connect(broker.channel, "a-slow", profile=SLOW)
    fast = Generator.connect(broker.channel, "b-fast", profile=FAST)
    fast.beat()
    await eventually(lambda: _are_connected(broker, 1))
    slow.beat(credits=1)
    await eventually(lambda: _are_connected(broker, 2))
    await broker.submit(prompt("a", group_size=1))
    await eventually(is_left)
    return slow, fast


async def test_work_left_to_a_faster_generator_is_asked_for_again_though_nothing_is_committed(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_stream, "IDLE_EVERY_S", PATIENCE_S)
    monkeypatch.setattr(lease_stream, "IDLE_BEFORE_MOVE_S", PATIENCE_S)
    slow, fast = await _leave_to_a_faster_one(broker, monkeypatch)
    fast.stream.done_writing()
    (granted,) = await slow.leases(1)
    assert granted.key.group_id == "a"


async def test_a_stream_that_may_not_ask_yet_does_not_look_again_and_again(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits_s: list[float] = []

    async def waiting(event: Wake, timeout_s: float) -> bool:
        waits_s.append(timeout_s)
        return await wait_for_event(event, timeout_s)

    async def has_waited() -> bool:
        return len(waits_s) >= 8

    monkeypatch.setattr(lease_stream, "wait_for_event", waiting)
    monkeypatch.setattr(lease_stream, "ASK_AGAIN_S", PATIENCE_S)
    monkeypatch.setattr(lease_stream, "IDLE_BEFORE_MOVE_S", 0.05)
    monkeypatch.setattr(lease_stream, "IDLE_EVERY_S", 0.1)
    await _leave_to_a_faster_one(broker, monkeypatch)
    # Meanwhile the time at which it might have taken work over passes.
    waits_s.clear()
    await eventually(has_waited)
    assert min(waits_s) == pytest.approx(0.1)
