"""Measures how busy the process's event loop is, and lets what it asks of generators, and says of itself, follow."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from penstock.clock import Clock
from services.broker.records.run_clock import MOST_BEHIND_S
from services.broker.rules.flush_pacing import UPDATE_EVERY_S, FlushInterval
from services.broker.rules.heartbeat_pacing import HeartbeatInterval
from services.broker.rules.saturation import Saturation
from services.broker.runtime.metrics import BrokerMetrics

_log = structlog.get_logger()
_SCHEDULING = Path("/proc/thread-self/schedstat")


def thread_busy_s() -> float:
    """Seconds that the calling thread has worked, or waited for a core where the system says so, since some moment."""
    try:
        worked_ns, waited_ns, _slices = map(int, _SCHEDULING.read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return time.thread_time()
    return (worked_ns + waited_ns) / 1e9


async def watch_load(
    flush_interval: FlushInterval,
    heartbeat_interval: HeartbeatInterval,
    saturation: Saturation,
    metrics: BrokerMetrics,
    clock: Clock,
    *,
    busy_s: Callable[[], float] = thread_busy_s,
) -> None:
    """Measure until cancelled, in the thread of the event loop."""
    before_s, busy_before_s = clock.monotonic_s(), busy_s()
    while True:
        await asyncio.sleep(UPDATE_EVERY_S)
        now_s, busy_now_s = clock.monotonic_s(), busy_s()
        since_s = max(1e-3, now_s - before_s)
        busy = (busy_now_s - busy_before_s) / since_s
        was_behind = saturation.is_behind
        saturation.update(busy, since_s)
        if saturation.is_behind and not was_behind:
            _log.warning("short of a core: no lease ends until there is time to spare", most_s=MOST_BEHIND_S)
        flush_interval.update(busy)
        heartbeat_interval.update(flush_interval.load, since_s)
        before_s, busy_before_s = now_s, busy_now_s
        metrics.load.set(flush_interval.load)
        metrics.is_behind.set(saturation.is_behind)
        metrics.flush_interval.set(flush_interval.asked_s)
        metrics.heartbeat_interval.set(heartbeat_interval.asked_s(math.inf))
