"""Which receivers of a site fetch a content across the link between sites, and which relay serves which receiver.

Promises:

- Of the receivers of one site that can relay, one at a time is sent to the origin for a content: the first that asked
  of those that no receiver has reported. It serves the next FANOUT, each of those the next FANOUT, and so on.
- A relay that a receiver could not fetch from is passed over from then on, until it asks again itself. So a report,
  true or wrong, costs its site at most one more copy, and no receiver waits for a relay that is gone.
- At most MAX_CONTENTS contents are remembered, the least recently asked for go first, with MAX_RELAYS relays each.

Pure bookkeeping: no clock, no socket.
"""

from __future__ import annotations

from collections import OrderedDict

MAX_CONTENTS = 256
"""Pairs of site and content."""
MAX_RELAYS = 1024
"""Of one site and content."""
FANOUT = 8
"""Receivers that one relay is to serve at once."""


class SiteRelays:
    """The relays of every site and content; starts empty."""

    def __init__(self) -> None:
        self._relays: OrderedDict[tuple[str, str], dict[str, str]] = OrderedDict()

    def clear(self) -> None:
        """Forget everything."""
        self._relays.clear()

    def sources(
        self, *, site: str, content_id: str, receiver_id: str, relay_url: str = "", failed_url: str = ""
    ) -> list[str]:
        """Addresses of relays for a receiver, best first; none: it fetches from the origin.

        Args:
            site: The receiver's; there are no relays where it is empty.
            content_id: What it is about to fetch.
            receiver_id: Who asks.
            relay_url: Where it will serve this content itself; empty if it will not.
            failed_url: The relay it was sent to and could not fetch from; empty where there is none.
        """
        if not site:
            return []
        relays = self._of(site, content_id)
        for relay_id in [relay_id for relay_id, url in relays.items() if failed_url and url == failed_url]:
            del relays[relay_id]
        if relay_url and (receiver_id in relays or len(relays) < MAX_RELAYS):
            relays[receiver_id] = relay_url
        # A receiver is served by one that asked before it, so there are no circular waits.
        order = list(relays)
        place = order.index(receiver_id) if receiver_id in relays else len(order)
        return [relays[order[(place - 1) // FANOUT]]] if place else []

    def _of(self, site: str, content_id: str) -> dict[str, str]:
        relays = self._relays.setdefault((site, content_id), {})
        self._relays.move_to_end((site, content_id))
        while len(self._relays) > MAX_CONTENTS:
            self._relays.popitem(last=False)
        return relays
