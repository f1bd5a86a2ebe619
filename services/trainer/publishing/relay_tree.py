"""Which receivers of a site fetch a content over the link between sites, and which relay serves which receiver.

Promises:

- Of one site's receivers that can relay, one at a time fetches a content from the origin: the first that asked and has
  not been reported as failing. It serves the next FANOUT, each of those the next FANOUT, and so on.
- A relay that a receiver could not fetch from is skipped until it asks again itself. So a report, true or false, costs
  its site at most one more copy, and no receiver waits for a relay that is gone.
- At most MAX_CONTENTS contents are remembered, those requested most recently, with MAX_RELAYS relays each.

Pure bookkeeping: no clock, no socket.
"""

from __future__ import annotations

from collections import OrderedDict

MAX_CONTENTS = 256
"""Limit of pairs of site and content."""
MAX_RELAYS = 1024
"""Limit for one site and content."""
FANOUT = 8
"""Receivers that one relay serves at once."""


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
        """Addresses of relays for a receiver, best first; if empty, it fetches from the origin.

        Args:
            site: The receiver's; there are no relays if it is empty.
            content_id: What it is about to fetch.
            receiver_id: The receiver that asks.
            relay_url: Where it will serve this content itself; empty if it will not.
            failed_url: The relay it was assigned and could not fetch from; empty if there is none.
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
