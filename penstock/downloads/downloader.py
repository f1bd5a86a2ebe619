"""Fetches a content over HTTP: ranged, parallel, resumable, every byte checked; from a relay or across the link.

Promises:

- Only bytes whose chunk has the digest its manifest states are kept, each where it belongs; what is kept is not fetched
  again, by this attempt, the next one or the next process. Of a chunk that was cut off the rest alone is fetched,
  unless the process ends.
- The target file appears by a rename, complete and every chunk checked, or not at all. What it makes of a version is
  proved tensor by tensor where it is used: by the engine before it loads, and where a delta is applied.
- A source that sends wrong bytes, disconnects or stalls is left for another one, a bounded number of times
  (`transfer.content_sources`).
- With a relay, received chunks are offered to others of the site while the rest is still on its way.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from penstock.clients.weights import content_id
from penstock.downloads.broadcast_receiver import BroadcastReceiver
from penstock.downloads.file_check import is_laid_out_alike, verify_content
from penstock.downloads.relay_wait import RelayWait
from penstock.errors import DigestMismatchError, InvalidFieldError, PenstockError
from penstock.process.logger import get_logger
from penstock.security import NO_SECURITY, Security
from penstock.security.tls import ClientContexts
from penstock.transfer.connections import Connections
from penstock.transfer.content_sources import SourceKind, Sources
from penstock.transfer.fetching import Fetching
from penstock.transfer.partial import PartialContent
from penstock.transfer.rate import ByteRate
from penstock.transfer.relay import Relay
from penstock.transfer.source_faults import SourceFaults
from penstock.v1 import weights_pb2

NUM_CONNECTIONS = 4
PARTIAL_SUFFIX = ".partial"

FindRelays = Callable[[str, str, str], Awaitable[Sequence[str]]]
"""Content id, own relay address of it or "", relay address that failed or "", to addresses at relays, best first."""
_log = get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """The result and cost of a fetch."""

    path: Path
    """The file."""
    fetched_bytes: int
    """Bytes received over the network, refused ones included."""
    num_refused: int
    """Pieces whose digest did not match on the way."""
    origin_bytes: int = 0
    """Those of `fetched_bytes` that came from the manifest's addresses, not from a relay or a broadcast."""


class Downloader:
    """Fetches contents into files; an async context manager that owns its HTTP connections and threads.

    Args:
        security: The token to show, the authorities to trust, the certificate to show.
        broadcasts: Asked for a content first; what it does not bring is fetched.
        relay: Where what is fetched is offered to others; entered already.
        find_relays: Asks the weight store where to fetch; None: always from the manifest's addresses.
        num_connections: Ranges of one content fetched at once.
        max_bytes_per_second: Cap on what this process fetches; None for no cap.
        compresses: Whether origins are asked to compress full contents; deltas are made small already.
        on_fetched: Called with the number of bytes received, as they arrive, and the kind of source; in any thread.
    """

    def __init__(
        self,
        *,
        security: Security = NO_SECURITY,
        broadcasts: BroadcastReceiver | None = None,
        relay: Relay | None = None,
        find_relays: FindRelays | None = None,
        num_connections: int = NUM_CONNECTIONS,
        max_bytes_per_second: float | None = None,
        compresses: bool = False,
        on_fetched: Callable[[SourceKind, int], None] = lambda _kind, _num_bytes: None,
    ) -> None:
        self._security = security
        self._headers = {} if security.token is None else {"Authorization": f"Bearer {security.token}"}
        self._tls = ClientContexts(security.tls_files)
        self._broadcasts = broadcasts
        self._relay = relay
        self._find_relays = find_relays
        self.relay_wait: RelayWait | None = None
        """Lets another receiver of the site be the first to fetch; None: the first to ask fetches."""
        self.faults = SourceFaults(security.tls_files)
        """Explains failures of sources that an operator has to fix."""
        self._num_connections = num_connections
        self._rate = ByteRate(max_bytes_per_second)
        self._compresses = compresses
        self._on_fetched = on_fetched
        self._connections: Connections | None = None

    async def __aenter__(self) -> Self:
        """Get ready to fetch."""
        # Twice as many, so that one fetch does not wait for another.
        self._connections = Connections(tls=self._tls, headers=self._headers, num_threads=2 * self._num_connections)
        return self

    async def __aexit__(self, *_exception: object) -> None:
        """Close the connections."""
        if self._connections is not None:
            self._connections.close()

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
            target: The file to write; `target` + ".partial" holds what has arrived so far.
            on_refused: Called each time received bytes do not match the manifest.

        Raises:
            InvalidFieldError: The manifest names only addresses that must not be shown the credentials.
            UnknownVersionError: No source has the version any more.
            DigestMismatchError: The sources keep sending something else.
            ServiceUnavailableError: No source could be reached or finished.
            OSError: The file cannot be written.
        """
        if await asyncio.to_thread(_is_there, target, manifest):
            await self.offer(manifest, target)
            return Download(path=target, fetched_bytes=0, num_refused=0)
        partial_path = target.with_name(target.name + PARTIAL_SUFFIX)
        content = await PartialContent.open(partial_path, manifest.chunks)
        self._offer(manifest, content)
        broadcast_bytes = 0
        try:
            if self._broadcasts is not None and not content.is_complete:
                broadcast_bytes = await self._broadcasts.receive(manifest, content, on_refused)
            if self.relay_wait is not None and not content.is_complete:
                await self.relay_wait.for_content(content_id(manifest))
            fetching = await self._fetch_missing(manifest, content, on_refused)
            await asyncio.to_thread(os.replace, partial_path, target)
        except BaseException as error:
            self._withdraw(manifest)
            content.fail(error if isinstance(error, Exception) else RuntimeError("the receiver stops"))
            raise
        finally:
            content.close()
        return Download(
            path=target,
            fetched_bytes=broadcast_bytes + sum(fetching.fetched_bytes.values()),
            num_refused=fetching.num_refused,
            origin_bytes=fetching.fetched_bytes[SourceKind.ORIGIN],
        )

    async def offer(self, manifest: weights_pb2.WeightsManifest, path: Path) -> bool:
        """Offer a file that did not come over the network to others of the site, if it is the very content.

        Args:
            manifest: What it holds.
            path: The file, proved to hold that (`penstock.downloads.file_check`, `penstock.deltas`).

        Returns:
            Whether it is offered; not where there is no relay, or where the file is laid out otherwise.
        """
        if self._relay is None or not await asyncio.to_thread(is_laid_out_alike, path, manifest):
            return False
        content = await PartialContent.whole(path, manifest.chunks)
        self._offer(manifest, content)
        content.close()
        if (ask := self._asker(manifest)) is not None:
            # Asked not for the answer, but so that the weight store knows that the content is here.
            with contextlib.suppress(PenstockError):
                await ask("")
        return True

    async def _fetch_missing(
        self,
        manifest: weights_pb2.WeightsManifest,
        content: PartialContent,
        on_refused: Callable[[DigestMismatchError], None],
    ) -> Fetching:
        if self._connections is None:
            raise RuntimeError("the downloader was not entered")
        fetching = Fetching(
            connections=self._connections,
            content=content,
            sources=Sources(self._origins(manifest), self._asker(manifest), self.faults.explained),
            rate=self._rate,
            on_fetched=self._on_fetched,
            on_refused=on_refused,
            is_compressed=self._compresses and manifest.kind == weights_pb2.WEIGHTS_KIND_FULL,
        )
        await fetching.run(num_connections=self._num_connections)
        return fetching

    def _origins(self, manifest: weights_pb2.WeightsManifest) -> Sequence[str]:
        # The token goes with every request, so never to where it could be read on the way.
        urls = [url for url in manifest.urls if self._security.may_fetch_from(url)]
        if not urls:
            raise InvalidFieldError(
                f"{manifest.urls[0]} is in plain text, where this process's credentials are not shown; give the "
                "trainer's process a certificate (PENSTOCK_TLS_CERT), or set insecure: true here",
                field="manifest.urls",
            )
        return urls

    def _asker(self, manifest: weights_pb2.WeightsManifest) -> Callable[[str], Awaitable[Sequence[str]]] | None:
        find_relays = self._find_relays
        if find_relays is None:
            return None
        identity = content_id(manifest)
        own_url = self._relay.url(manifest.run_id, identity) if self._relay is not None else ""

        async def ask(failed_url: str) -> Sequence[str]:
            urls = await find_relays(identity, own_url, failed_url)
            return [url for url in urls if self._security.may_fetch_from(url)]

        return ask

    def _offer(self, manifest: weights_pb2.WeightsManifest, content: PartialContent) -> None:
        if self._relay is not None:
            self._relay.offer(manifest.run_id, content_id(manifest), content)

    def _withdraw(self, manifest: weights_pb2.WeightsManifest) -> None:
        if self._relay is not None:
            self._relay.withdraw(manifest.run_id, content_id(manifest))


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
