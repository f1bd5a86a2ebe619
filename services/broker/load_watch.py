"""Measures how busy the process's event loop is, and lets what it asks of generators follow."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from pathlib import Path

from penstock.clock import Clock
from services.broker.rules.flush_pacing import UPDATE_EVERY_S, FlushInterval
from services.broker.rules.heartbeat_pacing import HeartbeatInterval
from services.broker.runtime.metrics import BrokerMetrics

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
        flush_interval.update((busy_now_s - busy_before_s) / since_s)
        heartbeat_interval.update(flush_interval.load, since_s)
        before_s, busy_before_s = now_s, busy_now_s
        metrics.load.set(flush_interval.load)
        metrics.flush_interval.set(flush_interval.asked_s)
        metrics.heartbeat_interval.set(heartbeat_interval.asked_s(math.inf))
