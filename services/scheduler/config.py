"""Settings of a scheduler process."""

from __future__ import annotations

from pydantic import Field

from penstock.config import StrictModel


class SchedulerConfig(StrictModel):
    """Where it listens."""

    listen: str = "127.0.0.1:7306"
    """Address, host:port."""
    heartbeat_interval_s: float = Field(default=5.0, gt=0, le=300)
    """How often machines report; three missed reports make a machine count as gone."""
    metrics_port: int | None = Field(default=None, ge=1, le=65535)
    """Port of the Prometheus endpoint; none when unset."""
