"""Tracks a peer's outage: since when and why; logs it once it lasts, now and then, and when it ends.

Nothing here waits or gives up: that is up to the callers.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from penstock.clock import Clock, SystemClock
from penstock.process.logger import get_logger

FIRST_NOTICE_S = 3.0
"""Shorter outages, such as a broker's restart, are not worth a line."""
MOST_BETWEEN_NOTICES_S = 60.0

_log = get_logger()


class Outage:
    """The availability of one peer.

    Args:
        peer: Its name in messages.
        on_notice: Called with a line to show while the peer is away, and with an empty one when it is back.
        clock: Where time comes from.
    """

    def __init__(
        self, peer: str, *, on_notice: Callable[[str], None] = lambda text: None, clock: Clock | None = None
    ) -> None:
        self.peer = peer
        self.since_s: float | None = None
        """When it stopped answering, Unix seconds; None while it answers."""
        self.on_notice = on_notice
        self._clock = clock or SystemClock()
        self._begun_s = 0.0
        self._notice_at_s = 0.0
        self._pause_s = FIRST_NOTICE_S

    @property
    def is_noticed(self) -> bool:
        """Whether it has lasted long enough to be shown."""
        return self.since_s is not None and self._pause_s > FIRST_NOTICE_S

    @property
    def away_s(self) -> float:
        """For how long it has been away, seconds; 0 while it answers."""
        return 0.0 if self.since_s is None else self._clock.monotonic_s() - self._begun_s

    def failed(self, error: Exception) -> None:
        """A call failed with an error that may be temporary."""
        now_s = self._clock.monotonic_s()
        if self.since_s is None:
            self.since_s, self._begun_s, self._pause_s = self._clock.now_s(), now_s, FIRST_NOTICE_S
            self._notice_at_s = now_s + FIRST_NOTICE_S
        if now_s < self._notice_at_s:
            return
        self._pause_s = min(MOST_BETWEEN_NOTICES_S, 2 * self._pause_s)
        self._notice_at_s = now_s + self._pause_s
        _log.warning("waiting for a peer that is away", peer=self.peer, away_s=round(self.away_s), error=str(error))
        self.on_notice(self.described(error))

    def described(self, error: Exception) -> str:
        """A line that says which peer is awaited, since when and why."""
        since = "" if self.since_s is None else f" since {_clock_time(self.since_s)}"
        return f"waiting for {self.peer}{since}: {str(error).removeprefix(f'{self.peer}: ')}"

    def answered(self) -> None:
        """The peer answered, even if with an error."""
        if self.since_s is None:
            return
        if self.is_noticed:
            _log.info("the peer is back", peer=self.peer, away_s=round(self.away_s))
            self.on_notice("")
        self.since_s = None


def _clock_time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, tz=UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
