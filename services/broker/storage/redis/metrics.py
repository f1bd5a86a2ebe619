"""Counts Redis' faults for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


class RedisMetrics:
    """Faults of Redis by kind."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._faults = Counter(
            "penstock_broker_redis_faults", "Calls to Redis that failed, retries included", ["kind"], registry=registry
        )

    def count(self, kind: str) -> None:
        """Count a fault; kinds are those of RedisFault."""
        self._faults.labels(kind).inc()
