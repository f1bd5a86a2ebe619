"""Decides whether a broker process cannot know what waits for it, as it is short of a core. Pure.

An event loop that finds nothing to do has read everything. One that works, or waits for a core, all the time takes new
streams one by one, slowly: a generator that opens its stream again waits in a line of which the process sees nothing,
for longer than its leases last. So the process is behind from when that has lasted AFTER_S, which is less than a lease
of a generator without a stream has left, until it had time to spare for RECOVERY_S.
"""

from __future__ import annotations

FULL = 0.95
"""Share of the time."""
AFTER_S = 2.0
RECOVERY_S = 5.0
"""A client opens its stream again within 3 s; then there is no line, and it is heard."""


class Saturation:
    """Of one broker process."""

    def __init__(self) -> None:
        self._full_s = self._left_s = 0.0
        """How long it has had no time to spare, and how long it is behind from now on if it has."""

    @property
    def is_behind(self) -> bool:
        """Whether something may wait for it that it does not know of."""
        return self._left_s > 0

    def update(self, busy: float, since_s: float) -> None:
        """Take the share of time that the loop's thread worked or waited for a core in the last `since_s` seconds."""
        self._full_s = self._full_s + since_s if busy >= FULL else 0.0
        self._left_s = RECOVERY_S if self._full_s >= AFTER_S else max(0.0, self._left_s - since_s)
