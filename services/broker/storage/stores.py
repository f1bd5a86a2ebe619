"""Lists the stores by the scheme of `redis_url`. A store is one file beside this one and one entry here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter

from penstock.security import Security
from services.broker.storage.redis.address import parse_redis_url

if TYPE_CHECKING:
    from services.broker.records.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """The settings with which a store is opened."""

    url: str
    num_wait_replicas: int
    """Replicas that must confirm a write before it is answered."""
    registry: CollectorRegistry
    security: Security


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreKind:
    """A kind of store."""

    check: Callable[[str], object]
    """Raises ValueError if a URL is malformed."""
    can_wait_for_replicas: Callable[[str], bool]
    open: Callable[[StoreSettings], Store]
    """Raises ConfigError."""


def _check_memory_url(url: str) -> None:
    if url != "memory://":
        raise ValueError("write it as memory://, with nothing behind it")


def _open_memory(_settings: StoreSettings) -> Store:
    # Here and not above, as in the next one: the broker's configuration is read where no broker is installed.
    from services.broker.storage.memory_store import MemoryStore

    return MemoryStore()


def _redis_faults(registry: CollectorRegistry) -> Counter:
    return Counter(
        "penstock_broker_redis_faults", "Calls to Redis that failed, retries included", ["kind"], registry=registry
    )


def _open_redis(settings: StoreSettings) -> Store:
    from services.broker.storage.redis.authentication import RedisCredentials, protected_url
    from services.broker.storage.redis.redis_store import RedisStore

    faults = _redis_faults(settings.registry)
    credentials = RedisCredentials.from_environment(settings.security)
    url = protected_url(settings.url, credentials, setting="redis_url", security=settings.security)
    return RedisStore.from_url(
        url,
        credentials=credentials,
        num_wait_replicas=settings.num_wait_replicas,
        on_fault=lambda kind: faults.labels(kind).inc(),
    )


REDIS = StoreKind(
    check=parse_redis_url,
    can_wait_for_replicas=lambda url: parse_redis_url(url).kind != "cluster",
    open=_open_redis,
)
STORES: dict[str, StoreKind] = {
    "memory": StoreKind(check=_check_memory_url, can_wait_for_replicas=lambda _: False, open=_open_memory),
}
"""By scheme; Redis gets every other URL, and its errors name the valid forms."""


def store_kind(url: str) -> StoreKind:
    """The kind of store that a URL names."""
    return STORES.get(url.partition("://")[0], REDIS)
