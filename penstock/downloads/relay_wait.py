"""Lets the relay that a plan names for a site begin with a content, so that it is the one that fetches over the link.

Promises:

- No receiver waits longer than the patience; after a wait in vain it does not wait again until a relay was in time.
- With a relay or without, the weight store decides who fetches from whom: waiting only lets another ask first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from penstock.clock import Clock, SystemClock

ASK_EVERY_S = 0.1

FindRelays = Callable[[str, str, str], Awaitable[Sequence[str]]]
"""As of `Downloader`."""


class RelayWait:
    """Waits before fetches over a link.

    Args:
        find_relays: Asks the weight store.
        patience_s: Longest wait for one content, seconds.
        clock: Measures the wait.
    """

    def __init__(self, find_relays: FindRelays, *, patience_s: float, clock: Clock | None = None) -> None:
        self._find_relays = find_relays
        self.patience_s = patience_s
        """As set last."""
        self._clock = clock or SystemClock()
        self._is_expected = True
        """Whether the relay began in time with the last content."""

    def set_patience(self, patience_s: float) -> None:
        """Wait so long from the next content on, for a relay that is expected in time; 0: not at all."""
        self.patience_s = patience_s
        self._is_expected = True

    async def for_content(self, content_id: str) -> None:
        """Return once a relay of the site has the content, or is fetching it, or the patience is over."""
        if not self.patience_s:
            return
        begun_s = self._clock.monotonic_s()
        patience_s = self.patience_s if self._is_expected else 0.0
        while True:
            # Without an address of its own, so that it is not taken for the relay.
            self._is_expected = bool(await self._find_relays(content_id, "", ""))
            if self._is_expected or self._clock.monotonic_s() - begun_s >= patience_s:
                return
            await asyncio.sleep(ASK_EVERY_S)
