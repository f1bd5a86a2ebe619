"""How busy the broker's event loop is."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from penstock.clock import ManualClock
from penstock.process.tasks import end
from services.broker import load_watch
from services.broker.load_watch import thread_busy_s, watch_load
from services.broker.rules.flush_pacing import BUSY, UPDATE_EVERY_S, FlushInterval
from services.broker.rules.heartbeat_pacing import FEW_PER_S, HeartbeatInterval
from services.broker.rules.saturation import Saturation
from services.broker.runtime.metrics import BrokerMetrics
from tests.helpers.waiting import until


async def test_a_busy_loop_is_measured_and_what_it_asks_for_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    registry, clock, interval, beats = CollectorRegistry(), ManualClock(), FlushInterval(), HeartbeatInterval()
    monkeypatch.setattr(load_watch, "UPDATE_EVERY_S", 0.0)

    def busy_s() -> float:
        # Each reading is half a second after the last.
        for _ in range(round(FEW_PER_S)):
            beats.note_beat()
        clock.advance(UPDATE_EVERY_S)
        return 0.95 * clock.monotonic_s()

    watch = asyncio.create_task(
        watch_load(interval, beats, Saturation(), BrokerMetrics(registry), clock, busy_s=busy_s)
    )
    await until(lambda: interval.asked_s > 1.0)
    await end(watch)
    assert BUSY < interval.load < 1.0
    assert registry.get_sample_value("penstock_broker_load_ratio") == interval.load
    assert registry.get_sample_value("penstock_broker_flush_interval_seconds") == interval.asked_s
    assert registry.get_sample_value("penstock_broker_heartbeat_interval_seconds") == beats.asked_s(math.inf) > 2.0


async def test_a_thread_that_waits_for_a_core_all_the_time_makes_the_broker_hold_leases(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry, clock, saturation = CollectorRegistry(), ManualClock(), Saturation()
    monkeypatch.setattr(load_watch, "UPDATE_EVERY_S", 0.0)
    # The load that the intervals follow is of the store as well; this is not.
    flush_interval, share, busy = FlushInterval(), 1.0, 0.0

    def busy_s() -> float:
        nonlocal busy
        clock.advance(UPDATE_EVERY_S)
        busy += share * UPDATE_EVERY_S
        return busy

    def is_behind() -> bool:
        return registry.get_sample_value("penstock_broker_is_behind") == 1.0

    metrics = BrokerMetrics(registry)
    watching = watch_load(flush_interval, HeartbeatInterval(), saturation, metrics, clock, busy_s=busy_s)
    watch = asyncio.create_task(watching)
    await until(is_behind)
    assert saturation.is_behind
    share = 0.9
    await until(lambda: not is_behind())
    await end(watch)


def test_work_of_this_thread_counts() -> None:
    before_s, worked_s = thread_busy_s(), time.thread_time()
    while time.thread_time() - worked_s < 0.05:
        pass
    assert thread_busy_s() - before_s >= 0.04


def test_where_the_system_says_less_the_threads_own_time_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(load_watch, "_SCHEDULING", tmp_path / "missing")
    assert thread_busy_s() <= time.thread_time()
