"""How long the broker's event loop was held."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry

from penstock.clock import ManualClock
from penstock.process.tasks import end
from services.broker.loop_watch import EVERY_S, watch_loop
from services.broker.runtime.metrics import BrokerMetrics
from tests.helpers.waiting import until


async def test_stalls_are_counted_and_the_longest_is_shown() -> None:
    registry, clock = CollectorRegistry(), ManualClock()
    watch = asyncio.create_task(watch_loop(BrokerMetrics(registry), clock))

    def num_over(seconds: float) -> float:
        most = registry.get_sample_value("penstock_broker_loop_stall_seconds_bucket", {"le": str(seconds)})
        return (registry.get_sample_value("penstock_broker_loop_stall_seconds_count") or 0.0) - (most or 0.0)

    for number, held_s in enumerate((2.0, 40.0, 3.0), 1):
        await asyncio.sleep(0)
        clock.advance(held_s + EVERY_S)
        await until(lambda: num_over(1.0) == number)  # noqa: B023 -- awaited at once
    assert num_over(30.0) == 1
    longest_s = registry.get_sample_value("penstock_broker_loop_longest_stall_seconds")
    assert longest_s is not None
    assert abs(longest_s - 40.0) < 1e-6
    await end(watch)
