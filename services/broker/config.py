"""Settings of a broker process."""

from __future__ import annotations

from typing import Self

from pydantic import Field, field_validator, model_validator

from penstock.config import MeasuredConfig
from services.broker.storage.stores import store_kind


class BrokerConfig(MeasuredConfig):
    """Where it listens and where its state lives; a run's own limits come with OpenRun."""

    listen: str = "127.0.0.1:7301"
    """Address, host:port."""
    redis_url: str = "redis://127.0.0.1:7300/0"
    """Redis that holds all state: redis://, rediss:// or unix://; redis+sentinel://HOST:PORT,HOST:PORT/SERVICE;
    redis+cluster://HOST:PORT,HOST:PORT; memory:// keeps it in the process, for trials."""
    redis_wait_replicas: int = Field(default=0, ge=0, le=16)
    """Acknowledge a write only after this many replicas confirm it, so that the death of a master loses nothing that
    was acknowledged; name all replicas to be safe from a master that hangs and returns, too. Not with a Cluster, whose
    client cannot wait."""
    scheduler: str | None = None
    """The scheduler that forecasts lengths for dispatch, host:port; without one lengths are unknown."""
    closed_run_retention_s: float | None = Field(default=7 * 86_400.0, ge=0)
    """How long the samples of a closed run stay in the store, seconds by the store's own clock; then they are deleted:
    the run cannot be exported or resumed any more, its audit stays. None keeps them until the run is deleted."""

    @field_validator("redis_url")
    @classmethod
    def _is_a_store_url(cls, value: str) -> str:
        store_kind(value).check(value)
        return value

    @model_validator(mode="after")
    def _replicas_can_be_waited_for(self) -> Self:
        if self.redis_wait_replicas and not store_kind(self.redis_url).can_wait_for_replicas(self.redis_url):
            raise ValueError("redis_wait_replicas: needs one server or Sentinels in redis_url; set it to 0")
        return self
