"""Chooses where to fetch a content from, best first: a relay of the site if there is one, else the origin's addresses.

Promises:

- A source that failed is left for another one: a relay for what the weight store names instead, an origin's address for
  the next one of them.
- Failures without a chunk in between are counted, and after MAX_FAILURES the fetch is given up with the last error; a
  source that failed before is tried again only after a pause.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from penstock.errors import PenstockError, UnknownVersionError
from penstock.network.rpc import backoff_s
from penstock.process.logger import get_logger

MAX_FAILURES = 8

FindRelays = Callable[[str], Awaitable[Sequence[str]]]
"""Address of the relay that failed, or "", to addresses of this content at relays, best first."""
_log = get_logger()


class SourceKind(StrEnum):
    """The kind of sender."""

    ORIGIN = "origin"
    """One of the manifest's addresses: across the link between sites, if there is one."""
    RELAY = "relay"
    """A receiver of the same site."""


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """One attempt with an address as the source."""

    url: str
    kind: SourceKind


Explain = Callable[[Source, PenstockError], Awaitable[PenstockError]]


class Sources:
    """The sources of one fetch.

    Args:
        origin_urls: The manifest's addresses; at least one.
        find_relays: Asks the weight store; None without relays.
        explain: Finds the cause of a failure, which is then reported instead.
    """

    def __init__(
        self, origin_urls: Sequence[str], find_relays: FindRelays | None, explain: Explain | None = None
    ) -> None:
        self._origin_urls = origin_urls
        self._find_relays = find_relays
        self._explain = explain
        self._current: Source | None = None
        self._num_failures = 0
        self._num_origins_tried = 0
        self._failed: set[str] = set()
        self._gone: set[str] = set()
        self._delays = backoff_s()
        self._lock = asyncio.Lock()

    async def current(self) -> Source:
        """The source to use now; waits while one is being chosen, or if all have failed."""
        async with self._lock:
            if self._current is None:
                self._current = await self._choose("")
            return self._current

    def note_good(self) -> None:
        """A chunk arrived."""
        self._num_failures = 0
        self._delays = backoff_s()

    async def note_failed(self, source: Source, error: PenstockError) -> None:
        """Choose another source, unless one was chosen since `source` was.

        Raises:
            PenstockError: `error`, or what is behind it, where nothing is left to try.
        """
        async with self._lock:
            if source is not self._current:
                return
            if self._explain is not None:
                error = await self._explain(source, error)
            _log.info("a source of weights failed", url=source.url, kind=source.kind, error=str(error))
            self._num_failures += 1
            self._failed.add(source.url)
            if isinstance(error, UnknownVersionError):
                self._gone.add(source.url)
            if self._num_failures >= MAX_FAILURES or self._gone.issuperset(self._origin_urls):
                raise error
            chosen = await self._choose(source.url if source.kind is SourceKind.RELAY else "")
            if chosen.url in self._failed:
                await asyncio.sleep(next(self._delays))
            self._current = chosen

    async def _choose(self, failed_relay: str) -> Source:
        if self._find_relays is not None and (self._current is None or failed_relay):
            for url in await self._find_relays(failed_relay):
                if url not in self._failed:
                    return Source(url, SourceKind.RELAY)
        url = self._origin_urls[self._num_origins_tried % len(self._origin_urls)]
        self._num_origins_tried += 1
        return Source(url, SourceKind.ORIGIN)
