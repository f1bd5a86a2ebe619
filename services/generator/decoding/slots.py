"""The engine's slots: which samples may decode now.

Leases are requested only for free slots; unleased samples (an agent's turns) wait for one. A freed slot goes to the
unleased sample that waited longest, and leases are requested only beyond those waiting: neither can starve the other,
since a running lease is never evicted.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Slots:
    """At most `max_taken` are occupied at once, except by leases that were already on their way."""

    def __init__(self, max_taken: int) -> None:
        self.max_taken = max_taken
        self._num_taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def num_free(self) -> int:
        """Slots that are free and not waited for."""
        return max(0, self.max_taken - self._num_taken - len(self._waiting))

    @property
    def num_waiting(self) -> int:
        """Unleased samples that wait."""
        return len(self._waiting)

    def take(self) -> None:
        """A lease arrived; it was requested, so it has a slot."""
        self._num_taken += 1

    async def wait(self) -> None:
        """Wait for a slot; the caller sets the deadline. Cancelled callers get none."""
        if self._num_taken < self.max_taken and not self._waiting:
            self._num_taken += 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            await place
        except asyncio.CancelledError:
            # Cancelled at the very moment it was given the slot.
            if place.done() and not place.cancelled():
                self.release()
            elif place in self._waiting:
                self._waiting.remove(place)
            raise

    def release(self) -> None:
        """A slot is freed."""
        self._num_taken -= 1
        while self._waiting and self._num_taken < self.max_taken:
            place = self._waiting.popleft()
            if not place.done():
                self._num_taken += 1
                place.set_result(None)
