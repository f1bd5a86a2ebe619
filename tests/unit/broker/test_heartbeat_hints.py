"""How late heartbeats are, by the interval that the generator was to keep at the time."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from penstock.clock import ManualClock
from penstock.v1 import broker_pb2
from services.broker.rules.heartbeat_pacing import HeartbeatInterval
from services.broker.runtime.metrics import BrokerMetrics
from services.broker.runtime.run_replica import RunReplica
from services.broker.storage.memory_store import MemoryStore
from services.broker.streams.heartbeat_hints import HeartbeatHints
from tests.helpers.brokers.broker import duration, limits


async def test_a_heartbeat_is_late_once_the_longest_interval_that_was_in_force_is_over() -> None:
    clock, registry, interval = ManualClock(), CollectorRegistry(), HeartbeatInterval()
    replica = RunReplica("run-1", store=MemoryStore(clock), clock=clock)
    hints = HeartbeatHints(interval, replica, BrokerMetrics(registry))
    request = broker_pb2.OpenRunRequest(run_id="run-1", limits=limits(generation_lease=duration(60.0)))
    await replica.open(request)

    def late_s(gap_s: float) -> float:
        """After a heartbeat so long after the last one: by how much one was late so far."""
        clock.advance(gap_s)
        hints.note_beat()
        return registry.get_sample_value("penstock_broker_heartbeat_longest_delay_seconds") or 0.0

    assert late_s(60.0) == 0.0
    assert late_s(2.0) == 0.0
    for _ in range(3):
        interval.note_beat()
        interval.update(1.0, 1e-3)
    assert hints.is_news
    assert hints.idle("busy") == broker_pb2.LeaseIdle(reason="busy", heartbeat_interval=duration(4.5))
    assert not hints.is_news
    assert late_s(4.5) == 0.0
    for _ in range(99):
        interval.update(0.0, 1.0)
    assert hints.idle("calm") == broker_pb2.LeaseIdle(reason="calm")
    # The generator may have waited since before it was told.
    assert late_s(4.5) == 0.0
    assert late_s(2.5) == 0.5
