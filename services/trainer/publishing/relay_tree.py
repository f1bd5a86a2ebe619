"""Which receivers of a site fetch a content over the link between sites, and which relay serves which receiver.

Promises:

- Of one site's receivers that can relay, one at a time fetches a content from the origin: the first that asked and has
  not been reported as failing. It serves the next FANOUT, each of those the next FANOUT, and so on.
- A relay that a receiver could not fetch from is skipped until it asks again itself. So a report, true or false, costs
  its site at most one more copy, and no receiver waits for a relay that is gone.
- A site that takes a version by its full content does not take it by a delta as well, nor the other way round, but for
  receivers that can use only one of them: the first of the two that a receiver named is the one.
- At most MAX_CONTENTS contents are remembered, those requested most recently, with MAX_RELAYS relays each.

Pure bookkeeping: no clock, no socket.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

MAX_CONTENTS = 256
"""Limit of pairs of site and content."""
MAX_RELAYS = 1024
"""Limit for one site and content."""
FANOUT = 8
"""Receivers that one relay serves at once."""

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class SiteRelays:
    """The relays of every site and content; starts empty."""

    def __init__(self) -> None:
        self._relays: OrderedDict[tuple[str, str], dict[str, str]] = OrderedDict()
        self._versions: OrderedDict[str, str] = OrderedDict()
        """The version that a content leads to, by its digest."""
        self._agreed: OrderedDict[tuple[str, str], str] = OrderedDict()
        """The content by which a site takes a version."""

    def clear(self) -> None:
        """Forget everything."""
        self._relays.clear()
        self._versions.clear()
        self._agreed.clear()

    def note_content(self, content_id: str, digest: str) -> None:
        """A content is offered that leads to the version with that digest, from nothing or from another version."""
        _put(self._versions, content_id, digest)

    def agreed(self, *, site: str, content_id: str) -> str:
        """By which content a site takes the version that `content_id` leads to: that one, unless another was named."""
        digest = self._versions.get(content_id)
        if not site or digest is None:
            return content_id
        agreed = self._agreed.get((site, digest), content_id)
        _put(self._agreed, (site, digest), agreed)
        return agreed

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
            self.agreed(site=site, content_id=content_id)
        # A receiver is served by one that asked before it, so there are no circular waits.
        order = list(relays)
        place = order.index(receiver_id) if receiver_id in relays else len(order)
        return [relays[order[(place - 1) // FANOUT]]] if place else []

    def _of(self, site: str, content_id: str) -> dict[str, str]:
        relays = self._relays.get((site, content_id), {})
        _put(self._relays, (site, content_id), relays)
        return relays


def _put(kept: OrderedDict[_Key, _Value], key: _Key, value: _Value) -> None:
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > MAX_CONTENTS:
        kept.popitem(last=False)
