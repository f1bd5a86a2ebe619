"""Fetches one content by several concurrent ranged GETs.

    missing chunks -> spans of neighbours -> a GET each, in a thread (`span_read`) -> chunks there
                            ^                    |
                            +-- what is missing -+  broken off, silent or wrong: from another source

Chunks are fetched in order, so that what is relayed meanwhile grows from the front.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from penstock import tracing
from penstock.errors import DigestMismatchError, PenstockError, ServiceUnavailableError, UnknownVersionError
from penstock.transfer.coding import CODING_HEADER, ZSTD
from penstock.transfer.connections import Connections
from penstock.transfer.content_sources import Source, SourceKind, Sources
from penstock.transfer.partial import Landing, PartialContent
from penstock.transfer.rate import ByteRate
from penstock.transfer.span_read import SpanRead

MIN_SPAN_BYTES, MAX_SPAN_BYTES = 4 * 1024**2, 64 * 1024**2
"""Bytes per GET: few enough that all connections end at about the same time, and enough that a round trip before each
does not matter."""
SPANS_PER_CONNECTION = 8
ORIGIN_SILENCE_S = 15.0
RELAY_SILENCE_S = 60.0
"""A relay sends a chunk once it has all of it, and closes the connection itself if it stalls."""


def span_bytes(missing_bytes: int, num_connections: int) -> int:
    """Bytes per GET."""
    share_bytes = missing_bytes // (num_connections * SPANS_PER_CONNECTION)
    return min(max(share_bytes, MIN_SPAN_BYTES), MAX_SPAN_BYTES)


@dataclass(kw_only=True)
class Fetching:
    """One fetch; `run` it once."""

    connections: Connections
    """Where to read, and in which threads."""
    content: PartialContent
    """What has arrived, and where the rest goes."""
    sources: Sources
    """Where to fetch from."""
    rate: ByteRate
    """Cap on the rate of receipt."""
    on_fetched: Callable[[SourceKind, int], None]
    """Called with the number of bytes received and the kind of source; in any thread, one at a time."""
    on_refused: Callable[[DigestMismatchError], None]
    """Called for each chunk whose digest is wrong."""
    is_compressed: bool
    """Whether the origin is asked to compress what it sends."""
    fetched_bytes: dict[SourceKind, int] = field(default_factory=lambda: dict.fromkeys(SourceKind, 0), init=False)
    num_refused: int = field(default=0, init=False)
    _span_bytes: int = field(default=MIN_SPAN_BYTES, init=False)
    _spans: deque[range] = field(default_factory=deque, init=False)
    _landings: dict[int, Landing] = field(default_factory=dict, init=False)
    """Requested chunks, by index: of an interrupted one only the rest is fetched."""
    _has_progressed: bool = field(default=False, init=False)
    """Whether a chunk has arrived since the last failure."""
    _counting: threading.Lock = field(default_factory=threading.Lock, init=False)

    async def run(self, *, num_connections: int) -> None:
        """Fetch what is missing. Raises PenstockError if no source is left, OSError if the disk refuses."""
        self._span_bytes = span_bytes(self.content.missing_bytes, num_connections)
        self._spans.extend(self._group(self.content.missing()))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(num_connections, len(self._spans))):
                    group.create_task(self._work())
        # Not `except*`: early releases of Python 3.11 wrap what is raised in it once more.
        except BaseExceptionGroup as errors:
            expected, others = errors.split((PenstockError, OSError))
            if expected is None or others is not None:
                raise
            raise _first(expected) from None

    async def _work(self) -> None:
        while self._spans:
            span = self._spans.popleft()
            source = await self.sources.current()
            try:
                await self._fetch_span(source, span)
            except (DigestMismatchError, ServiceUnavailableError, UnknownVersionError) as error:
                if self._has_progressed:
                    self._has_progressed = False
                    self.sources.note_good()
                if isinstance(error, DigestMismatchError):
                    self.num_refused += 1
                    self.on_refused(error)
                self._spans.extendleft(reversed(self._group(span)))
                await self.sources.note_failed(source, error)

    async def _fetch_span(self, source: Source, span: range) -> None:
        headers = {**self.connections.headers, **tracing.headers()}
        if self.is_compressed and source.kind is SourceKind.ORIGIN:
            headers[CODING_HEADER] = ZSTD
        connection = self.connections.take(source.url)
        read = SpanRead(
            connection=connection,
            url=source.url,
            headers=headers,
            silence_s=RELAY_SILENCE_S if source.kind is SourceKind.RELAY else ORIGIN_SILENCE_S,
            rate=self.rate,
            on_received=partial(self._note_received, source.kind),
        )
        landings = {index: self._landings.get(index) or self.content.landing(index) for index in span}
        self._landings.update(landings)
        job = self.connections.threads.submit(
            read.run, landings, size_bytes=self.content.size_bytes, on_chunk=self._note_chunk
        )
        try:
            await asyncio.wrap_future(job)
        except asyncio.CancelledError:
            # The next process to open the file must be its only writer.
            read.stop()
            await asyncio.gather(asyncio.wrap_future(job), return_exceptions=True)
            connection.close()
            raise
        self.connections.give_back(source.url, connection)

    def _note_received(self, kind: SourceKind, num_bytes: int) -> None:
        with self._counting:
            self.fetched_bytes[kind] += num_bytes
            self.content.note_received(num_bytes)
            self.on_fetched(kind, num_bytes)

    def _note_chunk(self, index: int) -> None:
        del self._landings[index]
        self._has_progressed = True
        self.content.keep(index)

    def _group(self, indices: Iterable[int]) -> list[range]:
        """The missing chunks, as runs of neighbours."""
        spans: list[range] = []
        last_bytes = 0
        for index in indices:
            if self.content.has(index):
                continue
            size_bytes = self.content.chunk(index).size_bytes
            if spans and spans[-1].stop == index and last_bytes + size_bytes <= self._span_bytes:
                spans[-1] = range(spans[-1].start, index + 1)
                last_bytes += size_bytes
            else:
                spans.append(range(index, index + 1))
                last_bytes = size_bytes
        return spans


def _first(errors: BaseExceptionGroup[Exception]) -> BaseException:
    first: BaseException = errors
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first
