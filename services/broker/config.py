"""Settings of a broker process."""

from __future__ import annotations

import socket
from typing import Self

from pydantic import Field, field_validator, model_validator

from penstock.config import MeasuredConfig
from penstock.flush_interval import LONGEST_ASKED_S
from penstock.security.plain_text import is_local
from penstock.targets import checked_address
from services.broker.rules.flush_pacing import DEFAULT_LONGEST_S
from services.broker.storage.stores import store_kind

_EVERY_INTERFACE = ("", "0.0.0.0", "::")


class BrokerConfig(MeasuredConfig):
    """Where it listens and where its state lives; a run's own limits come with OpenRun."""

    listen: str = "127.0.0.1:7301"
    """Address, host:port."""
    advertise: str | None = None
    """Address under which the other brokers of this Redis, and clients, reach this one, host:port; different for each.
    Unset, it is `listen`, with this machine's name for 0.0.0.0 and ::."""
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
    max_flush_interval_s: float = Field(default=DEFAULT_LONGEST_S, ge=0, le=LONGEST_ASKED_S)
    """Longest time for which it asks generators to gather tokens when it falls behind, seconds; up to 0.2, their own
    default, it asks for nothing."""

    @property
    def address(self) -> str:
        """Where the other brokers and clients reach this one, host:port."""
        if self.advertise is not None:
            return self.advertise
        host, _, port = self.listen.rpartition(":")
        return f"{socket.gethostname()}:{port}" if host.strip("[]") in _EVERY_INTERFACE else self.listen

    @property
    def public_hosts(self) -> list[str]:
        """The host of `advertise`, which the certificate has to name."""
        return [] if self.advertise is None else [self.advertise.rpartition(":")[0].strip("[]")]

    @property
    def broker_name(self) -> str:
        """Its name among the brokers of this Redis; another machine's loopback addresses are others."""
        return f"{socket.gethostname()}/{self.address}" if is_local(self.address) else self.address

    @field_validator("advertise")
    @classmethod
    def _is_an_address(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if value.rpartition(":")[0].strip("[]") in _EVERY_INTERFACE:
            raise ValueError("no address that others can call; name this machine, as host:port")
        return checked_address(value)

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
