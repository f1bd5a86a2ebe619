"""The loop of lengths over real gRPC: prompts asked about, samples finished, lengths reported, forecasts corrected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry

from penstock.clock import SystemClock
from penstock.errors import InvalidFieldError, ServiceUnavailableError
from penstock.network import rpc
from penstock.security import NO_SECURITY
from penstock.v1 import broker_pb2, scheduler_pb2, scheduler_pb2_grpc, types_pb2
from services.broker.runtime import length_reports
from services.broker.runtime.length_reports import LengthReporter
from services.broker.storage.memory_store import MemoryStore
from services.scheduler.config import LengthsConfig
from services.scheduler.server import make_forecaster
from services.scheduler.service import SchedulerServicer
from tests.helpers.brokers.broker import RUN, Generator, chunk, eventually, prompt, serving

STOP = types_pb2.FINISH_REASON_STOP


class Listener(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Takes lengths, or fails to."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, int]] = []
        self.calls = 0
        self.error: Exception | None = None

    async def ForecastLengths(self, request, context):
        """See the proto."""
        return scheduler_pb2.ForecastLengthsResponse(
            forecasts=[scheduler_pb2.LengthForecast() for _ in request.queries]
        )

    async def ReportLengths(self, request, context):
        """See the proto."""
        self.calls += 1
        if self.error is not None:
            raise self.error
        self.seen += [(request.run_id, o.query.group_id, o.num_completion_tokens) for o in request.observations]
        return scheduler_pb2.ReportLengthsResponse()


@asynccontextmanager
async def listening(servicer: scheduler_pb2_grpc.SchedulerServiceServicer) -> AsyncIterator[str]:
    """The address of a scheduler."""
    server = rpc.Server(listen="127.0.0.1:0", services=[rpc.service_of(servicer)])
    port = await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(grace_s=0.0)


async def holds(condition) -> None:
    async def check() -> bool:
        return bool(condition())

    await eventually(check)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length_reports, "REPORT_EVERY_S", 0.02)
    monkeypatch.setattr(length_reports, "MAX_BACKOFF_S", 0.05)


async def test_finished_samples_come_back_as_forecasts_of_their_prompt() -> None:
    lengths = make_forecaster(LengthsConfig(), clock=SystemClock(), registry=CollectorRegistry())
    scheduler = SchedulerServicer(clock=SystemClock(), heartbeat_interval_s=5.0, lengths=lengths)
    async with listening(scheduler) as target, serving(MemoryStore(), scheduler=target) as broker:
        await broker.open(groups_per_step=4, group_size=2)
        await broker.submit(prompt("step-1", group_size=2))
        generator = Generator.connect(broker.channel)
        generator.beat(credits=2)
        first, second = await generator.leases(2)
        last = chunk(first, [4, 5, 6], offset=2, finish=STOP)
        assert await generator.put(chunk(first, [1, 2])) == []
        # The last chunk is sent again, as after a lost answer: its length counts once.
        assert await generator.put(last) == []
        assert await generator.put(last) == []
        assert await generator.put(chunk(second, [7], finish=STOP)) == []
        await holds(lambda: RUN in lengths._runs and lengths.describe(RUN).num_observations == 2)
        assert lengths.describe(RUN).num_prompts == 1
        # The same prompt in a later step, under another group's name.
        await broker.submit(prompt("step-2", group_size=2))
        generator.beat(credits=1)
        (lease,) = await generator.leases(1)
        assert lease.predicted_tokens == pytest.approx(3.0)
        await broker.audit()


async def test_aborted_and_refused_chunks_tell_no_length() -> None:
    listener = Listener()
    async with listening(listener) as target, serving(MemoryStore(), scheduler=target) as broker:
        await broker.open(groups_per_step=4, group_size=2)
        await broker.submit(prompt("a", group_size=2))
        generator = Generator.connect(broker.channel)
        generator.beat(credits=2)
        first, second = await generator.leases(2)
        assert await generator.put(chunk(first, [1, 2], finish=types_pb2.FINISH_REASON_ABORTED)) == []
        (refused,) = await generator.put(chunk(second, [1], offset=5, finish=STOP))
        assert refused.reason == "OFFSET_MISMATCH"
        assert await generator.put(chunk(second, [1, 2, 3, 4], finish=STOP)) == []
        await holds(lambda: listener.seen)
        assert listener.seen == [(RUN, "a", 4)]


async def test_lengths_wait_for_a_scheduler_that_is_away_and_come_once() -> None:
    listener = Listener()
    listener.error = ServiceUnavailableError("away")
    outcomes: dict[str, int] = {}
    async with listening(listener) as target:
        reporter = LengthReporter(
            target,
            security=NO_SECURITY,
            on_report=lambda outcome, count: outcomes.update({outcome: outcomes.get(outcome, 0) + count}),
        )
        running = asyncio.create_task(reporter.run())
        reporter.note("r", "a", 1)
        reporter.note("other", "b", 2)
        reporter.note("r", "c", 3)
        await holds(lambda: listener.calls >= 2)
        assert not listener.seen
        listener.error = None
        await holds(lambda: len(listener.seen) == 3)
        assert sorted(listener.seen) == [("other", "b", 2), ("r", "a", 1), ("r", "c", 3)]
        # What is refused for good is let go of; the rest goes on.
        listener.error = InvalidFieldError("no", field="run_id")
        reporter.note("r", "d", 4)
        await holds(lambda: outcomes.get("refused"))
        listener.error = None
        reporter.note("r", "e", 5)
        # The reporter's own count: it must have the answer before it is cancelled.
        await holds(lambda: outcomes.get("reported") == 4)
        running.cancel()
        await asyncio.wait([running])
        reporter.note("r", "last", 6)
        await reporter.close()
        assert listener.seen[-1] == ("r", "last", 6)
        assert outcomes == {"reported": 5, "refused": 1}


async def test_of_too_many_lengths_the_newest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length_reports, "MAX_KEPT", 4)
    monkeypatch.setattr(length_reports, "MAX_PER_CALL", 3)
    listener = Listener()
    listener.error = ServiceUnavailableError("away")
    async with listening(listener) as target:
        reporter = LengthReporter(target, security=NO_SECURITY)
        for number in range(6):
            reporter.note("r", str(number), number)
        assert not await reporter._report()
        listener.error = None
        await reporter.close()
        assert [number for _, _, number in listener.seen] == [2, 3, 4, 5]


async def test_a_broker_without_a_scheduler_keeps_no_lengths() -> None:
    async with serving(MemoryStore()) as broker:
        await broker.open(group_size=1)
        await broker.submit(prompt("a", group_size=1))
        generator = Generator.connect(broker.channel)
        generator.beat(credits=1)
        await generator.finish(await generator.leases(1))
        assert not broker.run_registry.length_reporter._kept
        run = await broker.call("GetRun", broker_pb2.GetRunRequest(run_id=RUN))
        assert run.audit.in_flight_by_state["finished"] == 1
