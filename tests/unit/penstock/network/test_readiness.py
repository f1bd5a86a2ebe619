"""Health while a peer is away."""

from __future__ import annotations

import asyncio
from contextlib import closing

from penstock.clock import ManualClock
from penstock.errors import ServiceUnavailableError
from penstock.network.outage import Outage
from penstock.network.readiness import AWAY_S, follow_outage
from tests.helpers.virtual_time import VirtualLoop


def test_health_is_off_while_a_peer_is_away_for_long_and_no_sooner_whatever_the_wall_clock_says() -> None:
    clock, said = ManualClock(), list[bool]()
    outage = Outage("broker", clock=clock)
    connection: list[Outage | None] = [None]

    async def set_serving(is_serving: bool) -> None:
        said.append(is_serving)

    async def pass_time(seconds: float) -> None:
        for _ in range(round(seconds)):
            clock.advance(1)
            await asyncio.sleep(1)

    async def work() -> None:
        following = asyncio.create_task(follow_outage(set_serving, lambda: connection[0]))
        await pass_time(5)
        connection[0] = outage
        await pass_time(5)
        outage.failed(ServiceUnavailableError("away"))
        await pass_time(AWAY_S - 2)
        outage.answered()
        outage.failed(ServiceUnavailableError("away again"))
        clock.set_wall(3600)
        await pass_time(AWAY_S - 2)
        assert said == []
        clock.set_wall(-7200)
        await pass_time(60)
        assert said == [False]
        outage.answered()
        await pass_time(60)
        assert said == [False, True]
        following.cancel()

    with closing(VirtualLoop()) as loop:
        loop.run_until_complete(work())
