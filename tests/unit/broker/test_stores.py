"""A store of one's own: a file, and an entry in the table of stores."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from penstock.security import NO_SECURITY
from services.broker.config import BrokerConfig
from services.broker.server import make_store
from services.broker.storage.memory_store import MemoryStore
from services.broker.storage.stores import STORES, StoreKind, StoreSettings


class ShelfStore(MemoryStore):
    """A toy: keeps everything in memory, under a name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


def _check(url: str) -> None:
    if not url.removeprefix("shelf://"):
        raise ValueError("name the shelf: shelf://NAME")


def _open(settings: StoreSettings) -> ShelfStore:
    return ShelfStore(settings.url.removeprefix("shelf://"))


@pytest.fixture(autouse=True)
def shelf(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = StoreKind(check=_check, can_wait_for_replicas=lambda _: False, open=_open)
    monkeypatch.setitem(STORES, "shelf", kind)


def _make(config: BrokerConfig) -> object:
    return make_store(config, registry=CollectorRegistry(), security=NO_SECURITY)


def test_a_url_of_its_scheme_opens_it():
    store = _make(BrokerConfig(redis_url="shelf://a"))
    assert isinstance(store, ShelfStore)
    assert store.name == "a"
    assert type(_make(BrokerConfig(redis_url="memory://"))) is MemoryStore


def test_its_own_check_names_what_is_wrong():
    with pytest.raises(ValidationError, match="name the shelf"):
        BrokerConfig(redis_url="shelf://")
    with pytest.raises(ValidationError, match="redis_wait_replicas"):
        BrokerConfig(redis_url="shelf://a", redis_wait_replicas=1)
    with pytest.raises(ValidationError, match="must begin with"):
        BrokerConfig(redis_url="drawer://a")
    with pytest.raises(ValidationError, match="memory://"):
        BrokerConfig(redis_url="memory://a")
