"""Settings of a broker process."""

from __future__ import annotations

from pydantic import Field

from penstock.config import StrictModel


class BrokerConfig(StrictModel):
    """Where it listens and where its state lives; a run's own limits come with OpenRun."""

    listen: str = "127.0.0.1:7301"
    """Address, host:port."""
    redis_url: str = "redis://127.0.0.1:7300/0"
    """Redis that holds all state: redis://, rediss:// or unix://; memory:// keeps it in the process, for trials."""
    metrics_port: int | None = Field(default=None, ge=1, le=65535)
    """Port of the Prometheus endpoint; none when unset."""
