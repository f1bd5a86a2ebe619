"""Places at the engine: who may decode now.

Leases come only as far as places are free; guests (samples that no lease brought: an agent's turns) wait for one.
A place that becomes free goes to the guest that waited longest, and leases are asked for only beyond the guests that
wait: neither can starve the other, for a lease that runs is never put out.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Slots:
    """At most `max_taken` are taken at once, except by leases that were on their way already."""

    def __init__(self, max_taken: int) -> None:
        self._max_taken = max_taken
        self._num_taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def num_free(self) -> int:
        """Places that nobody has and no guest waits for."""
        return max(0, self._max_taken - self._num_taken - len(self._waiting))

    @property
    def num_waiting(self) -> int:
        """Guests that wait."""
        return len(self._waiting)

    def take(self) -> None:
        """A lease came; it was asked for, so it has a place."""
        self._num_taken += 1

    async def wait(self) -> None:
        """Returns with a place; the caller sets the deadline. Cancelled callers have none."""
        if self._num_taken < self._max_taken and not self._waiting:
            self._num_taken += 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            await place
        except asyncio.CancelledError:
            # Cancelled in the very moment in which it was given the place.
            if place.done() and not place.cancelled():
                self.release()
            elif place in self._waiting:
                self._waiting.remove(place)
            raise

    def release(self) -> None:
        """Somebody is done."""
        self._num_taken -= 1
        while self._waiting and self._num_taken < self._max_taken:
            place = self._waiting.popleft()
            if not place.done():
                self._num_taken += 1
                place.set_result(None)
