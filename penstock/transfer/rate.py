"""A cap on bytes a second, shared by all connections of a process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

BURST_S = 0.25
"""Burst allowed after a pause, in seconds of the rate."""


class ByteRate:
    """A token bucket: over any time t at most `bytes_per_second` x (t + BURST_S) pass, and one piece more.

    Takers pass in order of request; a piece larger than the bucket passes and is paid for afterwards.
    Takers may be in different threads.
    """

    def __init__(self, bytes_per_second: float | None, *, now_s: Callable[[], float] = time.monotonic) -> None:
        if bytes_per_second is not None and bytes_per_second <= 0:
            raise ValueError(f"bytes_per_second: must be positive, not {bytes_per_second}")
        self._rate = bytes_per_second
        self._now_s = now_s
        self._free_at_s = 0.0
        self._lock = threading.Lock()

    def delay_s(self, num_bytes: int) -> float:
        """Take `num_bytes`; returns how long to wait before they may pass."""
        if self._rate is None:
            return 0.0
        with self._lock:
            now_s = self._now_s()
            begin_s = max(self._free_at_s, now_s - BURST_S)
            self._free_at_s = begin_s + num_bytes / self._rate
        return max(0.0, begin_s - now_s)

    async def take(self, num_bytes: int) -> None:
        """Wait until `num_bytes` may pass."""
        delay_s = self.delay_s(num_bytes)
        if delay_s > 0:
            await asyncio.sleep(delay_s)
