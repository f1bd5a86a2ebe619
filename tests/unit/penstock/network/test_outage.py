"""Waiting for a peer that is away: for ever by default, said now and then, and never where waiting cannot help."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from penstock.clients.broker import BrokerClient
from penstock.clock import ManualClock
from penstock.errors import (
    BadTokenError,
    DeadlineError,
    NotOfferedError,
    PenstockError,
    QueueFullError,
    ServiceUnavailableError,
)
from penstock.network.outage import Outage
from penstock.network.rpc import call_with_retry
from penstock.security import NO_SECURITY
from tests.helpers.brokers.scripted_training import ScriptedTrainingBroker
from tests.helpers.certificates import make_security
from tests.helpers.serving import serving
from tests.helpers.virtual_time import VirtualLoop

NIGHT_S = 10 * 3600.0


def away_until(end_s: float, error: PenstockError) -> Callable[..., Any]:
    """A method that raises `error` until that moment of the loop."""

    async def method(_request: object, *, timeout: float) -> str:
        if asyncio.get_running_loop().time() < end_s:
            raise error
        return "answered"

    return method


@pytest.mark.parametrize("error", [ServiceUnavailableError("Redis is away"), DeadlineError("no answer")])
def test_a_brokers_client_waits_a_night_and_goes_on(error: PenstockError) -> None:
    async def work() -> tuple[str, float]:
        async with BrokerClient("127.0.0.1:1") as client:
            answer = await client._call(away_until(NIGHT_S, error), None)
        return answer, asyncio.get_running_loop().time()

    with closing(VirtualLoop()) as loop:
        answer, waited_s = loop.run_until_complete(work())
    assert answer == "answered"
    assert NIGHT_S <= waited_s < NIGHT_S + 10


def test_how_long_to_wait_is_a_setting() -> None:
    async def work() -> float:
        async with BrokerClient("127.0.0.1:1", patience_s=600.0) as client:
            with pytest.raises(ServiceUnavailableError):
                await client._call(away_until(NIGHT_S, ServiceUnavailableError("away")), None)
        return asyncio.get_running_loop().time()

    with closing(VirtualLoop()) as loop:
        assert 590 < loop.run_until_complete(work()) <= 600


@pytest.mark.parametrize(
    "error",
    [
        BadTokenError("no"),
        NotOfferedError("no"),
        QueueFullError("Received message larger than max (17000000 vs. 16777216)"),
    ],
)
def test_what_waiting_cannot_heal_is_raised_at_once(error: PenstockError) -> None:
    async def work() -> float:
        with pytest.raises(type(error)):
            await call_with_retry(away_until(NIGHT_S, error), None, peer="broker", give_up_after_s=None)
        return asyncio.get_running_loop().time()

    with closing(VirtualLoop()) as loop:
        assert loop.run_until_complete(work()) < 1


def test_an_outage_is_reported_with_its_beginning_at_growing_distances_and_its_end() -> None:
    clock, told = ManualClock(1_700_000_000.0), list[tuple[float, str]]()
    outage = Outage("broker b:1", on_notice=lambda text: told.append((clock.monotonic_s(), text)), clock=clock)
    begun_s = clock.monotonic_s()
    while clock.monotonic_s() < begun_s + 600:
        outage.failed(ServiceUnavailableError("broker b:1: Redis is away"))
        clock.advance(1)
        clock.set_wall(-3600 if clock.monotonic_s() == begun_s + 5 else 0)
    assert outage.away_s == 600
    outage.answered()
    assert outage.away_s == 0
    times_s = [time_s - begun_s for time_s, _ in told]
    assert times_s[:4] == [3, 9, 21, 45]
    assert 10 < len(times_s) < 16
    assert told[0][1] == "waiting for broker b:1 since 2023-11-14 22:13:20 UTC: Redis is away"
    assert told[-1][1] == ""
    assert outage.since_s is None


def test_a_short_outage_is_not_reported() -> None:
    told: list[str] = []
    outage = Outage("broker b:1", on_notice=told.append, clock=ManualClock())
    outage.failed(ServiceUnavailableError("gone"))
    outage.answered()
    assert told == []


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("another authority", "its certificate was signed by 'penstock test', which"),
        ("another name", "its certificate does not name localhost"),
        ("a server without TLS", "it speaks plain text, this process TLS"),
    ],
)
async def test_tls_that_cannot_work_is_reported_and_waited_for_until_it_is_mended(
    tmp_path, monkeypatch, kind: str, reason: str
) -> None:
    monkeypatch.setattr("penstock.network.outage.FIRST_NOTICE_S", 0.3)
    (tmp_path / "other").mkdir()
    security, other = make_security(tmp_path), make_security(tmp_path / "other")
    served = NO_SECURITY if kind == "a server without TLS" else security
    told: asyncio.Queue[str] = asyncio.Queue()
    async with serving(ScriptedTrainingBroker().service(), security=served) as (_, target):
        target = target.replace("127.0.0.1", "localhost") if kind == "another name" else target
        shown = other if kind == "another authority" else security
        async with BrokerClient(target, security=shown, on_outage=told.put_nowait) as client:
            call = asyncio.create_task(client.list_runs())
            assert reason in await asyncio.wait_for(told.get(), 20)
            assert not call.done()
            call.cancel()
