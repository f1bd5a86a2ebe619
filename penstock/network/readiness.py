"""Readiness: a service reports itself unhealthy while a peer that it needs is away for long.

This is not liveness: the process continues by itself when its peer is back; a restart would only lose work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from penstock.network.outage import Outage
from penstock.process.logger import get_logger

AWAY_S = 10.0
"""Shorter outages, such as a broker's restart, are no reason to route work elsewhere or to page anyone."""
LOOK_EVERY_S = 1.0

_log = get_logger()


async def follow_outage(set_serving: Callable[[bool], Awaitable[None]], outage: Callable[[], Outage | None]) -> None:
    """Call `set_serving` when a peer has been away for AWAY_S, and when it is back; runs until cancelled.

    Health is left alone until the peer's first outage.

    Args:
        set_serving: Changes the service's health.
        outage: Its present connection to the peer; None while there is none.
    """
    is_away = False
    while True:
        current = outage()
        was_away, is_away = is_away, current is not None and current.away_s >= AWAY_S
        if is_away != was_away:
            _log.info("health changed", is_serving=not is_away, peer=current.peer if current is not None else "")
            await set_serving(not is_away)
        await asyncio.sleep(LOOK_EVERY_S)
