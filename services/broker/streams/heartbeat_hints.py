"""Tells a generator's lease stream how often to send heartbeats, and measures whether they come."""

from __future__ import annotations

from penstock.heartbeat_interval import BEAT_INTERVAL_S
from penstock.v1 import broker_pb2
from services.broker.rules.heartbeat_pacing import HeartbeatInterval
from services.broker.rules.limits import duration
from services.broker.runtime.metrics import BrokerMetrics
from services.broker.runtime.run_replica import RunReplica


class HeartbeatHints:
    """What one stream was asked for.

    Args:
        interval: What this process asks for.
        replica: The run's.
        metrics: Take the time between heartbeats.
    """

    def __init__(self, interval: HeartbeatInterval, replica: RunReplica, metrics: BrokerMetrics) -> None:
        self._interval, self._replica, self._metrics = interval, replica, metrics
        self._sent_s = 0.0
        """What the generator was asked for last; 0 for its own interval."""
        self._longest_sent_s = BEAT_INTERVAL_S
        """The longest interval it was to keep since its last heartbeat."""
        self._beat_s: float | None = None
        """When that was read."""

    @property
    def asked_s(self) -> float:
        """What is asked of the run's generators now; 0 for nothing."""
        state = self._replica.copy
        return 0.0 if state is None else self._interval.asked_s(state.limits.generation_lease_s)

    @property
    def is_news(self) -> bool:
        """Whether the interval differs from the one the generator was sent last."""
        return self.asked_s != self._sent_s

    def idle(self, reason: str) -> broker_pb2.LeaseIdle:
        """A sign of life that says so."""
        self._sent_s = self.asked_s
        self._longest_sent_s = max(self._longest_sent_s, self._sent_s)
        return broker_pb2.LeaseIdle(reason=reason, heartbeat_interval=duration(self._sent_s) if self._sent_s else None)

    def note_beat(self) -> None:
        """A heartbeat was read."""
        self._interval.note_beat()
        at_s = self._replica.clock.monotonic_s()
        if self._beat_s is not None:
            self._metrics.note_heartbeat_gap(at_s - self._beat_s, self._longest_sent_s)
        self._beat_s, self._longest_sent_s = at_s, self._sent_s or BEAT_INTERVAL_S
