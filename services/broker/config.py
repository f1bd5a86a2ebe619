"""Settings of a broker process."""

from __future__ import annotations

from typing import Self

from pydantic import Field, field_validator, model_validator

from penstock.config import MeasuredConfig
from services.broker.storage.redis.address import parse_redis_url

MEMORY_URL = "memory://"


class BrokerConfig(MeasuredConfig):
    """Where it listens and where its state lives; a run's own limits come with OpenRun."""

    listen: str = "127.0.0.1:7301"
    """Address, host:port."""
    redis_url: str = "redis://127.0.0.1:7300/0"
    """Redis that holds all state: redis://, rediss:// or unix://; redis+sentinel://HOST:PORT,HOST:PORT/SERVICE;
    redis+cluster://HOST:PORT,HOST:PORT; memory:// keeps it in the process, for trials."""
    redis_wait_replicas: int = Field(default=0, ge=0, le=16)
    """Answer only what so many replicas have too, so that the death of a master loses nothing that was answered; all
    replicas, so that one that hangs and comes back does not either. Not with a Cluster, whose client cannot wait."""
    scheduler: str | None = None
    """The scheduler that forecasts lengths for dispatch, host:port; without one lengths are unknown."""
    closed_run_retention_s: float | None = Field(default=7 * 86_400.0, ge=0)
    """How long the samples of a closed run stay in the store, seconds by the store's own clock; then they are deleted:
    the run cannot be exported or resumed any more, its audit stays. None keeps them until the run is deleted."""

    @field_validator("redis_url")
    @classmethod
    def _is_a_redis_url(cls, value: str) -> str:
        if value != MEMORY_URL:
            parse_redis_url(value)
        return value

    @model_validator(mode="after")
    def _replicas_can_be_waited_for(self) -> Self:
        if self.redis_wait_replicas and (
            self.redis_url == MEMORY_URL or parse_redis_url(self.redis_url).kind == "cluster"
        ):
            raise ValueError("redis_wait_replicas: needs one server or Sentinels in redis_url; set it to 0")
        return self
