"""Measures for how long the process's event loop is held: nothing is read, sent or decided meanwhile."""

from __future__ import annotations

import asyncio

import structlog

from penstock.clock import Clock
from services.broker.runtime.metrics import BrokerMetrics

EVERY_S = 0.1
LONG_STALL_S = 1.0
"""A stall of this length is logged."""

_log = structlog.get_logger()


async def watch_loop(metrics: BrokerMetrics, clock: Clock) -> None:
    """Measure until cancelled. A stall is seen from the next time on that this was due, so up to EVERY_S is missing."""
    longest_s = 0.0
    while True:
        slept_s = clock.monotonic_s()
        await asyncio.sleep(EVERY_S)
        stall_s = max(0.0, clock.monotonic_s() - slept_s - EVERY_S)
        metrics.loop_stalls.observe(stall_s)
        if stall_s > longest_s:
            longest_s = stall_s
            metrics.longest_loop_stall.set(longest_s)
        if stall_s >= LONG_STALL_S:
            _log.warning("the event loop was held; no lease expires by it", seconds=round(stall_s, 1))
