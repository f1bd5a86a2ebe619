"""Fetching a version's content over HTTP: ranged, resumable, every byte checked.

Promises:

- Only bytes whose chunk has the digest its manifest states are kept; a partial file is continued where its good chunks
  end, also by the next process.
- The target file appears by a rename, complete and checked as a whole, or not at all.
- A source that lies, breaks off or is silent is left for the next one, after a while, a bounded number of times.
"""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

import aiohttp
import structlog

from penstock.clients.contents import verify_content
from penstock.errors import DigestMismatchError, PenstockError, ServiceUnavailableError, UnknownVersionError
from penstock.rpc import backoff_s
from penstock.security import NO_SECURITY, Security
from penstock.v1 import weights_pb2

MAX_ATTEMPTS = 8
CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 15.0
PARTIAL_SUFFIX = ".partial"

_HTTP_OK, _HTTP_PARTIAL, _HTTP_NOT_FOUND, _HTTP_GONE = 200, 206, 404, 410
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """What a fetch took."""

    path: Path
    """The file."""
    fetched_bytes: int
    """Bytes that came over the network, refused ones included."""
    num_refused: int
    """Pieces, or whole files, whose digest did not match on the way."""


class Downloader:
    """Fetches contents into files; an async context manager that owns one HTTP session."""

    def __init__(self, *, security: Security = NO_SECURITY) -> None:
        self._headers = {} if security.token is None else {"Authorization": f"Bearer {security.token}"}
        self._tls = ssl.create_default_context(cafile=str(security.ca_file)) if security.ca_file else True
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        """Open the session."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=READ_TIMEOUT_S)
        self._session = aiohttp.ClientSession(timeout=timeout, auto_decompress=False, headers=self._headers)
        return self

    async def __aexit__(self, *_exception: object) -> None:
        """Close the session."""
        if self._session is not None:
            await self._session.close()

    async def fetch(
        self,
        manifest: weights_pb2.WeightsManifest,
        target: Path,
        *,
        on_refused: Callable[[DigestMismatchError], None] = lambda _error: None,
    ) -> Download:
        """Bring the content of a checked manifest to `target`.

        Args:
            manifest: What to fetch; passed `check_manifest`.
            target: Where to; `target` + ".partial" holds what is there so far.
            on_refused: Told each time something came that is not what the manifest states.

        Raises:
            UnknownVersionError: No source has the version any more.
            DigestMismatchError: The sources keep sending something else.
            ServiceUnavailableError: No source could be reached or finished.
        """
        if await asyncio.to_thread(_is_there, target, manifest):
            return Download(path=target, fetched_bytes=0, num_refused=0)
        fetched_bytes = num_refused = 0
        last_error: PenstockError = ServiceUnavailableError("no source was tried")
        delays = backoff_s()
        for attempt in range(MAX_ATTEMPTS):
            partial = await _Partial.open(target, manifest.chunks)
            try:
                await self._continue(partial, manifest.urls[attempt % len(manifest.urls)])
                await asyncio.to_thread(partial.finish, manifest)
                return Download(
                    path=target, fetched_bytes=fetched_bytes + partial.fetched_bytes, num_refused=num_refused
                )
            except DigestMismatchError as error:
                num_refused += 1
                on_refused(error)
                last_error = error
            except (ServiceUnavailableError, UnknownVersionError) as error:
                last_error = error
            finally:
                fetched_bytes += partial.fetched_bytes
                partial.close()
            _log.info("weights not fetched; trying again", attempt=attempt + 1, error=str(last_error))
            if isinstance(last_error, UnknownVersionError) and attempt + 1 >= len(manifest.urls):
                break
            await asyncio.sleep(next(delays))
        raise last_error

    async def _continue(self, partial: _Partial, url: str) -> None:
        """Fetch what is missing from one source; raises where it breaks off or lies."""
        if partial.is_complete:
            return
        if self._session is None:
            raise RuntimeError("the downloader was not entered")
        headers = {"Range": f"bytes={partial.offset}-"} if partial.offset else {}
        try:
            async with self._session.get(url, headers=headers, allow_redirects=False, ssl=self._tls) as response:
                await self._read_body(partial, response)
        except asyncio.IncompleteReadError as error:
            raise ServiceUnavailableError(f"{url}: broke off at byte {partial.offset}") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ServiceUnavailableError(f"{url}: {type(error).__name__}: {error}") from error

    async def _read_body(self, partial: _Partial, response: aiohttp.ClientResponse) -> None:
        if response.status in (_HTTP_NOT_FOUND, _HTTP_GONE):
            raise UnknownVersionError(f"{response.url}: the content is not there (any more)")
        if response.status == _HTTP_OK and partial.offset:
            # The source ignores ranges: it sends everything again.
            partial.restart()
        elif response.status == _HTTP_PARTIAL:
            content_range = response.headers.get("Content-Range", "")
            if not content_range.startswith(f"bytes {partial.offset}-"):
                raise ServiceUnavailableError(
                    f"{response.url}: sent range {content_range!r}, asked from {partial.offset}"
                )
        elif response.status != _HTTP_OK:
            raise ServiceUnavailableError(f"{response.url}: answered HTTP {response.status}")
        while (size_bytes := partial.next_size_bytes) is not None:
            piece = await response.content.readexactly(size_bytes)
            await asyncio.to_thread(partial.append, piece)


class _Partial:
    """The file under way: its first chunks are on disk and right, the others are not there."""

    def __init__(self, target: Path, chunks: Sequence[weights_pb2.ChunkInfo]) -> None:
        self.fetched_bytes = 0
        self._target = target
        self._path = target.with_name(target.name + PARTIAL_SUFFIX)
        self._chunks = chunks
        self._num_good = 0
        target.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = self._path.open("r+b" if self._path.exists() else "w+b")
        self._verify()

    @classmethod
    async def open(cls, target: Path, chunks: Sequence[weights_pb2.ChunkInfo]) -> _Partial:
        """Verify what an earlier attempt left, in a thread."""
        return await asyncio.to_thread(cls, target, chunks)

    def _verify(self) -> None:
        for chunk in self._chunks:
            if hashlib.sha256(self._file.read(chunk.size_bytes)).hexdigest() != chunk.sha256:
                break
            self._num_good += 1
        self._truncate()

    def _truncate(self) -> None:
        self._file.seek(self.offset)
        self._file.truncate()

    @property
    def is_complete(self) -> bool:
        """Whether every chunk is there."""
        return self._num_good == len(self._chunks)

    @property
    def offset(self) -> int:
        """Where the good chunks end, in bytes."""
        return self._chunks[self._num_good].offset if not self.is_complete else self._end()

    @property
    def next_size_bytes(self) -> int | None:
        """Size of the next missing chunk; None when all are there."""
        return None if self.is_complete else self._chunks[self._num_good].size_bytes

    def _end(self) -> int:
        return self._chunks[-1].offset + self._chunks[-1].size_bytes

    def append(self, piece: bytes) -> None:
        """Keep the next chunk if it is right; raises DigestMismatchError."""
        chunk = self._chunks[self._num_good]
        self.fetched_bytes += len(piece)
        if hashlib.sha256(piece).hexdigest() != chunk.sha256:
            raise DigestMismatchError(f"{self._target.name}: the chunk at byte {chunk.offset} has another digest")
        self._file.write(piece)
        self._num_good += 1

    def restart(self) -> None:
        """Forget everything."""
        self._num_good = 0
        self._truncate()

    def finish(self, manifest: weights_pb2.WeightsManifest) -> None:
        """Check the whole and give it its name; raises DigestMismatchError, and then nothing of it is kept."""
        self._file.flush()
        try:
            verify_content(self._path, manifest)
        except DigestMismatchError:
            self.restart()
            raise
        self._path.replace(self._target)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _is_there(target: Path, manifest: weights_pb2.WeightsManifest) -> bool:
    """Whether an earlier process left the whole content, still as it must be."""
    if not target.is_file():
        return False
    try:
        verify_content(target, manifest)
    except DigestMismatchError as error:
        _log.warning("cached weights are damaged; fetching them again", file=target.name, error=str(error))
        return False
    return True
