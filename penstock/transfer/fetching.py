"""One content, fetched by several ranged GETs at once.

    missing chunks -> spans of neighbours -> a GET each -> chunk read -> checked and written in a thread -> there
                            ^                    |
                            +-- what is missing -+  broken off, silent or wrong: from another source

Chunks are taken in order, so that what is served to others meanwhile grows from the front.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import aiohttp

from penstock.errors import DigestMismatchError, PenstockError, ServiceUnavailableError, UnknownVersionError
from penstock.transfer.coding import CODING_HEADER, ZSTD, read_frame
from penstock.transfer.partial import PartialContent
from penstock.transfer.rate import ByteRate
from penstock.transfer.sources import Source, SourceKind, Sources

MIN_SPAN_BYTES, MAX_SPAN_BYTES = 4 * 1024**2, 64 * 1024**2
"""Asked for by one GET: little enough that all connections end at about the same time, and enough that a round trip
before each does not matter."""
SPANS_PER_CONNECTION = 8
CONNECT_TIMEOUT_S = 5.0
ORIGIN_SILENCE_S = 15.0
RELAY_SILENCE_S = 60.0
"""A relay sends a chunk when it has all of it, and closes the connection by itself where it stands still."""

_HTTP_OK, _HTTP_PARTIAL, _HTTP_NOT_FOUND, _HTTP_GONE = 200, 206, 404, 410
_Piece: TypeAlias = bytes | memoryview


def span_bytes(missing_bytes: int, num_connections: int) -> int:
    """How much one GET asks for."""
    share_bytes = missing_bytes // (num_connections * SPANS_PER_CONNECTION)
    return min(max(share_bytes, MIN_SPAN_BYTES), MAX_SPAN_BYTES)


class Fetching:
    """One fetch; `run` it once.

    Args:
        session: Sends the token, knows the authorities.
        content: What is there, and where it goes.
        sources: Whom to ask.
        rate: Cap on what comes.
        on_fetched: Told how many bytes came, and from what kind of source.
        on_refused: Told of each chunk that is not what it must be.
        is_compressed: Whether the origin is asked to compress what it sends.
    """

    def __init__(
        self,
        *,
        session: aiohttp.ClientSession,
        content: PartialContent,
        sources: Sources,
        rate: ByteRate,
        on_fetched: Callable[[SourceKind, int], None],
        on_refused: Callable[[DigestMismatchError], None],
        is_compressed: bool = False,
    ) -> None:
        self.fetched_bytes = dict.fromkeys(SourceKind, 0)
        self.num_refused = 0
        self._session = session
        self._content = content
        self._sources = sources
        self._rate = rate
        self._on_fetched = on_fetched
        self._on_refused = on_refused
        self._is_compressed = is_compressed
        self._span_bytes = MIN_SPAN_BYTES
        self._spans: deque[range] = deque()
        self._begun: dict[int, list[_Piece]] = {}
        """What came of chunks that were cut off, by index."""

    async def run(self, *, num_connections: int) -> None:
        """Fetch what is missing. Raises PenstockError where no source is left, OSError where the disk refuses."""
        self._span_bytes = span_bytes(self._content.missing_bytes, num_connections)
        self._spans.extend(self._group(self._content.missing()))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(num_connections, len(self._spans))):
                    group.create_task(self._work())
        except* (PenstockError, OSError) as errors:
            raise _first(errors) from None

    async def _work(self) -> None:
        while self._spans:
            span = self._spans.popleft()
            source = await self._sources.current()
            try:
                await self._fetch_span(source, span)
            except (DigestMismatchError, ServiceUnavailableError, UnknownVersionError) as error:
                if isinstance(error, DigestMismatchError):
                    self.num_refused += 1
                    self._on_refused(error)
                self._spans.extendleft(reversed(self._group(span)))
                await self._sources.note_failed(source, error)

    async def _fetch_span(self, source: Source, span: range) -> None:
        begin = self._content.chunk(span[0]).offset + _size(self._begun.get(span[0], ()))
        end = self._content.chunk(span[-1]).offset + self._content.chunk(span[-1]).size_bytes
        headers = {"Range": f"bytes={begin}-{end - 1}"}
        if self._is_compressed and source.kind is SourceKind.ORIGIN:
            headers[CODING_HEADER] = ZSTD
        silence_s = RELAY_SILENCE_S if source.kind is SourceKind.RELAY else ORIGIN_SILENCE_S
        try:
            async with self._session.get(
                source.url,
                headers=headers,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=silence_s),
            ) as response:
                self._check_answer(response, begin, end)
                is_coded = response.headers.get(CODING_HEADER) == ZSTD
                await self._read_chunks(_Pieces(response.content, is_coded=is_coded), source.kind, span)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ServiceUnavailableError(f"{source.url}: {type(error).__name__}: {error}") from error

    def _check_answer(self, response: aiohttp.ClientResponse, begin: int, end: int) -> None:
        if response.status in (_HTTP_NOT_FOUND, _HTTP_GONE):
            raise UnknownVersionError(f"{response.url}: the content is not there (any more)")
        is_whole = (begin, end) == (0, self._content.size_bytes)
        if response.status == _HTTP_OK and is_whole:
            return
        if response.status != _HTTP_PARTIAL:
            raise ServiceUnavailableError(f"{response.url}: answered HTTP {response.status} to a ranged GET")
        content_range = response.headers.get("Content-Range", "")
        if not content_range.startswith(f"bytes {begin}-{end - 1}/"):
            raise ServiceUnavailableError(
                f"{response.url}: sent range {content_range!r:.80}, asked for {begin}-{end - 1}"
            )

    async def _read_chunks(self, incoming: _Pieces, kind: SourceKind, span: range) -> None:
        """Read chunk after chunk; while one is checked and written the next one is read."""
        storing: asyncio.Task[None] | None = None
        try:
            for index in span:
                pieces = await self._read_chunk(incoming, kind, index)
                if storing is not None:
                    await storing
                storing = asyncio.create_task(self._store(index, pieces))
        finally:
            if storing is not None:
                await storing

    async def _read_chunk(self, incoming: _Pieces, kind: SourceKind, index: int) -> list[_Piece]:
        pieces = self._begun.setdefault(index, [])
        missing_bytes = self._content.chunk(index).size_bytes - _size(pieces)
        while missing_bytes:
            piece, came_bytes = await incoming.next(missing_bytes)
            pieces.append(piece)
            missing_bytes -= len(piece)
            self.fetched_bytes[kind] += came_bytes
            self._content.note_received(came_bytes)
            self._on_fetched(kind, came_bytes)
            await self._rate.take(came_bytes)
        return self._begun.pop(index)

    async def _store(self, index: int, pieces: Sequence[_Piece]) -> None:
        await self._content.store(index, pieces)
        self._sources.note_good()

    def _group(self, indices: Iterable[int]) -> list[range]:
        """The missing ones of some chunks, as runs of neighbours."""
        spans: list[range] = []
        last_bytes = 0
        for index in indices:
            if self._content.has(index):
                continue
            size_bytes = self._content.chunk(index).size_bytes
            if spans and spans[-1].stop == index and last_bytes + size_bytes <= self._span_bytes:
                spans[-1] = range(spans[-1].start, index + 1)
                last_bytes += size_bytes
            else:
                spans.append(range(index, index + 1))
                last_bytes = size_bytes
        return spans


class _Pieces:
    """A body in the pieces it came in, or was compressed in, cut where a chunk ends: nothing is copied."""

    def __init__(self, reader: aiohttp.StreamReader, *, is_coded: bool) -> None:
        self._reader = reader
        self._is_coded = is_coded
        self._rest: _Piece = b""

    async def next(self, max_bytes: int) -> tuple[_Piece, int]:
        """The next bytes, and how many came over the network for them now.

        Raises:
            ServiceUnavailableError: The body ended, or is not coded as it says.
        """
        piece, came_bytes = self._rest, 0
        while not piece:
            piece, came_bytes = await (read_frame(self._reader) if self._is_coded else self._read())
        if not self._is_coded:
            came_bytes = min(len(piece), max_bytes)
        if len(piece) <= max_bytes:
            self._rest = b""
            return piece, came_bytes
        view = memoryview(piece)
        self._rest = view[max_bytes:]
        return view[:max_bytes], came_bytes

    async def _read(self) -> tuple[_Piece, int]:
        piece, is_end = await self._reader.readchunk()
        if not piece and (not is_end or self._reader.at_eof()):
            raise ServiceUnavailableError("the source broke off")
        return piece, len(piece)


def _size(pieces: Iterable[_Piece]) -> int:
    return sum(len(piece) for piece in pieces)


def _first(errors: BaseExceptionGroup[Exception]) -> BaseException:
    first: BaseException = errors
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first
