"""The sources that receivers could not fetch weights from, and why; shown in the trainer's status.

At most MAX_FAILURES are kept, each for FORGET_S after its last report: receivers repeat reports while a failure lasts.
"""

from __future__ import annotations

from collections import OrderedDict
from urllib.parse import urlsplit

from penstock.clients.weights import MAX_FAILURE_CHARACTERS
from penstock.clock import Clock, SystemClock
from penstock.security.checks.inspection import printable

FORGET_S = 150.0
MAX_FAILURES = 32


class SourceFailures:
    """Starts empty."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._reported: OrderedDict[tuple[str, str], tuple[float, str]] = OrderedDict()

    def note(self, receiver_id: str, url: str, failure: str) -> None:
        """Record that a receiver could not fetch from that address, or not serve its own content there."""
        host = urlsplit(url).netloc
        reason = printable(failure, max_chars=MAX_FAILURE_CHARACTERS)
        self._reported[receiver_id, host] = self._clock.monotonic_s(), reason
        self._reported.move_to_end((receiver_id, host))
        while len(self._reported) > MAX_FAILURES:
            self._reported.popitem(last=False)

    def lines(self) -> list[str]:
        """One line for each failure, oldest first."""
        since_s = self._clock.monotonic_s() - FORGET_S
        return [
            f"weights of {printable(receiver_id)}: {failure}"
            for (receiver_id, _), (reported_s, failure) in self._reported.items()
            if reported_s >= since_s
        ]
