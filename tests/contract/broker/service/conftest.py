"""A broker for every test here, with talkative streams."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from services.broker.records.store import Store
from services.broker.streams import lease_stream, microbatch_stream, scoring_stream
from tests.helpers.brokers.broker import (
    RunningBroker,
    serving,
)


@pytest.fixture(autouse=True)
def _talkative_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams give their signs of life ten times as often: the tests wait for several, on every store."""
    for module, name in (
        (lease_stream, "IDLE_EVERY_S"),
        (scoring_stream, "IDLE_EVERY_S"),
        (microbatch_stream, "WAITING_EVERY_S"),
    ):
        monkeypatch.setattr(module, name, 0.1)


@pytest.fixture
async def broker(store: Store) -> AsyncIterator[RunningBroker]:
    async with serving(store) as running:
        yield running
