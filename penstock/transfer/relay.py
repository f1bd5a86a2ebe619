"""Serves what a receiver has to others of its site: the contents it has fetched, and the one it is fetching."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Self
from urllib.parse import urlsplit

from penstock.security import NO_SECURITY, Security
from penstock.transfer.content_server import serving_contents
from penstock.transfer.partial import PartialContent
from penstock.transfer.rate import ByteRate

MAX_CONTENTS = 16
MAX_LARGEST = 3
"""Limit on all contents, in multiples of the largest: two whole versions, and the deltas around them. Up to it,
files are kept open, and thus on the disk."""

_ANY_ADDRESS = ("0.0.0.0", "::", "", None)


class Relay:
    """An HTTP server of contents; an async context manager.

    Args:
        listen: Address, host:port; port 0 is a free one.
        public_url: Base address under which others reach it; where None, made from `listen`, or where that says "any
            address", from what `peer` sees of this machine, or its name where that says nothing or TLS asks for names.
        peer: The weight store, host:port.
        security: The tokens that are accepted, and the certificate to show.
        site: The site whose receivers are served; empty: all.
        max_bytes_per_second: Cap on what is sent; None for no cap.
        on_served: Called with the number of bytes sent.
    """

    def __init__(
        self,
        *,
        listen: str,
        public_url: str | None = None,
        peer: str | None = None,
        security: Security = NO_SECURITY,
        site: str = "",
        max_bytes_per_second: float | None = None,
        on_served: Callable[[int], None] = lambda _num_bytes: None,
    ) -> None:
        self._serving = serving_contents(
            self._find,
            listen=listen,
            setting="relay_listen",
            security=security,
            site=site,
            rate=None if max_bytes_per_second is None else ByteRate(max_bytes_per_second),
            on_served=on_served,
        )
        self._base_url = public_url
        self._peer = peer
        self._security = security
        self._contents: OrderedDict[tuple[str, str], PartialContent] = OrderedDict()
        self._resources = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Listen. Raises PortUnavailableError."""
        served_url = await self._resources.enter_async_context(self._serving)
        host, port = urlsplit(served_url).hostname, urlsplit(served_url).port
        if host in _ANY_ADDRESS:
            own = None
            if self._peer is not None and not self._security.serves_tls:
                own = await _seen_by(self._peer, family=socket.AF_INET if host == "0.0.0.0" else socket.AF_UNSPEC)
            served_url = f"{urlsplit(served_url).scheme}://{own or socket.gethostname()}:{port}"
        self._base_url = (self._base_url or served_url).rstrip("/")
        return self

    async def __aexit__(self, *_exception: object) -> None:
        """Stop serving and close the files."""
        await self._resources.aclose()
        while self._contents:
            self._contents.popitem()[1].close()

    def url(self, run_id: str, content_id: str) -> str:
        """The URL at which a content is, or will be, offered."""
        if self._base_url is None:
            raise RuntimeError("the relay was not entered")
        return f"{self._base_url}/weights/{run_id}/{content_id}"

    def offer(self, run_id: str, content_id: str, content: PartialContent) -> None:
        """Serve a content, whole or under way, from now on; evicts the oldest if needed."""
        self.withdraw(run_id, content_id)
        self._contents[run_id, content_id] = content.hold()
        while self._is_too_much():
            self._contents.popitem(last=False)[1].close()

    def withdraw(self, run_id: str, content_id: str) -> None:
        """Stop serving a content; answers under way continue."""
        content = self._contents.pop((run_id, content_id), None)
        if content is not None:
            content.close()

    def _is_too_much(self) -> bool:
        sizes = [content.size_bytes for content in self._contents.values()]
        return len(sizes) > MAX_CONTENTS or sum(sizes) > MAX_LARGEST * max(sizes)

    def _find(self, run_id: str, name: str) -> PartialContent | None:
        return self._contents.get((run_id, name))


async def _seen_by(peer: str, *, family: socket.AddressFamily) -> str | None:
    """The address from which this machine calls `peer`, host:port; None if that is loopback or unknown."""
    host, _, port = peer.rpartition(":")
    try:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM, family=family)
        with socket.socket(found[0][0], socket.SOCK_DGRAM) as probe:
            # Sends nothing: it only looks up the route that packets would take.
            probe.connect(found[0][4])
            address = ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
    except (OSError, ValueError):
        return None
    if address.is_loopback or address.is_link_local:
        return None
    return f"[{address}]" if address.version == 6 else str(address)
