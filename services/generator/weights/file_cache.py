"""Brings a version's file into this generator's cache as soon as its link and its processor allow.

    the version's file is cached, or one of its digest        -> nothing is fetched
    an older file is cached, and the store has deltas, or
    will soon, which end before the full content (FetchChoice) -> they are fetched and applied to a copy of it
    otherwise, and whenever a delta fails                      -> the full content is fetched
    another receiver of the site has begun with the other one  -> that one is fetched, from it

Promises:

- The file that `fetch` names has been checked: chunk by chunk if it was fetched whole, tensor by tensor if it was
  cached or made by deltas. An engine checks the tensors once more, before it loads them.
- Deltas never make a version fail: faults of deltas or their base are counted, and the full content is fetched.
- The cache folder belongs to this generator alone; `clean` keeps the newest MAX_KEPT_FILES versions and MAX_KEPT_DELTAS
  deltas.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import structlog

from penstock.clients.weights import VersionName, WeightsClient, content_id
from penstock.clock import Clock, SystemClock
from penstock.deltas.content import TEMPORARY_SUFFIX, apply_deltas
from penstock.downloads.downloader import PARTIAL_SUFFIX, Downloader
from penstock.downloads.file_check import verify_content
from penstock.errors import PenstockError
from penstock.model.digests import MalformedWeightsError, WeightsMismatchError
from penstock.network.rpc import DEFAULT_TIMEOUT_S
from penstock.v1 import weights_pb2
from services.generator.metrics import GeneratorMetrics
from services.generator.weights.fetch_choice import FetchChoice

MAX_KEPT_FILES = 2
MAX_KEPT_DELTAS = 2
MIN_ANSWER_S = 1.0
"""A store gets at least this long to answer."""

_FILE_NAME = re.compile(r"v(\d{8,})-([0-9a-f]{64})\.safetensors")
_Chain = tuple[weights_pb2.WeightsManifest, ...]
"""Deltas to apply in order."""
_log = structlog.get_logger()


class Way(StrEnum):
    """How a version got into the cache."""

    CACHE = "cache"
    DELTA = "delta"
    FULL = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A version's file, checked."""

    path: Path
    """The file."""
    way: Way
    """How it got there."""
    fetched_bytes: int
    """Bytes received over the network for it; those of an abandoned delta are not known."""
    origin_bytes: int
    """Those that came from the origin, not from a relay of the site."""


class WeightFetcher:
    """Owns the cache folder.

    Args:
        client: The weight store.
        downloader: Fetches contents; entered already.
        cache_dir: Folder of this generator's weight files.
        metrics: Counts bytes, paths and fall-backs.
        on_refused: Called each time something does not match its manifest.
        clock: Measures speeds and waits.
    """

    def __init__(
        self,
        *,
        client: WeightsClient,
        downloader: Downloader,
        cache_dir: Path,
        metrics: GeneratorMetrics,
        on_refused: Callable[[PenstockError], None],
        clock: Clock | None = None,
    ) -> None:
        self._client = client
        self._downloader = downloader
        self._cache_dir = cache_dir
        self._metrics = metrics
        self._on_refused = on_refused
        self._clock = clock or SystemClock()
        self._choice = FetchChoice()
        self._fetched_bytes = self._origin_bytes = 0

    async def fetch(self, manifest: weights_pb2.WeightsManifest) -> Fetched:
        """Bring the version of a checked full manifest into the cache; one call at a time.

        Raises:
            UnknownVersionError, DigestMismatchError, ServiceUnavailableError: As `Downloader.fetch`.
            OSError: The cache cannot be read or written.
        """
        path = self._path(manifest, ".safetensors")
        bytes_before, origin_bytes_before = self._fetched_bytes, self._origin_bytes
        way = None if path.exists() else await self._make_from_older(manifest, path)
        if way is None:
            # Also if the file is cached: it is checked, and fetched again if damaged.
            way = Way.FULL if await self._download(manifest, path) else Way.CACHE
        self._metrics.weight_fetches.labels(way).inc()
        return Fetched(
            path=path,
            way=way,
            fetched_bytes=self._fetched_bytes - bytes_before,
            origin_bytes=self._origin_bytes - origin_bytes_before,
        )

    def clean(self, newest: Path) -> None:
        """Delete all but `newest` and the last files before it; partial ones are of versions no longer wanted."""
        complete = sorted(self._cache_dir.glob("v*.safetensors"), key=_arrival)
        deltas = sorted(self._cache_dir.glob("v*.delta"), key=_arrival)
        older = [path for path in complete if path != newest]
        for path in [*older[: -(MAX_KEPT_FILES - 1)], *deltas[:-MAX_KEPT_DELTAS]]:
            path.unlink(missing_ok=True)
        for suffix in (PARTIAL_SUFFIX, TEMPORARY_SUFFIX):
            for path in self._cache_dir.glob(f"v*{suffix}"):
                path.unlink(missing_ok=True)

    async def _make_from_older(self, manifest: weights_pb2.WeightsManifest, path: Path) -> Way | None:
        """Make the version from what is in the cache; None if that is impossible."""
        older = await asyncio.to_thread(self._newest_file)
        if older is None:
            return None
        base, held = older
        try:
            if held.digest == manifest.digest:
                await asyncio.to_thread(_take_as, base, path, manifest)
                await self._downloader.offer(manifest, path)
                return Way.CACHE
            chain = await self._agreed(manifest, held, await self._deltas(manifest, held))
            if not chain:
                return None
            deltas = [self._path(delta, ".delta") for delta in chain]
            for delta, delta_path in zip(chain, deltas, strict=True):
                await self._download(delta, delta_path)
            begun_s = self._clock.monotonic_s()
            await asyncio.to_thread(_apply, base, deltas, path, held=held, manifest=manifest)
            self._choice.note_application(manifest.size_bytes, self._clock.monotonic_s() - begun_s)
            # One of the site that joins late need not fetch it across the link.
            await self._downloader.offer(manifest, path)
            return Way.DELTA
        except (PenstockError, MalformedWeightsError, OSError) as error:
            self._metrics.delta_fallbacks.inc()
            _log.warning("deltas do not do; the full content is fetched", held=held.policy_version, error=str(error))
            if isinstance(error, WeightsMismatchError):
                self._on_refused(error)
            return None

    async def _agreed(self, manifest: weights_pb2.WeightsManifest, held: VersionName, chosen: _Chain) -> _Chain:
        """The deltas by which the site takes the version, chosen here or not; empty: it takes the full content."""
        wanted = content_id(chosen[-1] if chosen else manifest)
        agreed = await self._client.agreed_content(wanted)
        if agreed == wanted:
            return chosen
        if chosen:
            return ()
        chain = (await self._client.get_deltas(manifest.policy_version, held=held)).chain
        return chain if chain and content_id(chain[-1]) == agreed else ()

    async def _deltas(self, manifest: weights_pb2.WeightsManifest, held: VersionName) -> _Chain:
        """The deltas to fetch, once they are offered; empty if the full content is to be fetched instead."""
        begun_s, timeout_s = self._clock.monotonic_s(), DEFAULT_TIMEOUT_S
        while True:
            offered = await self._client.get_deltas(manifest.policy_version, held=held, timeout_s=timeout_s)
            if offered.chain:
                leads_there = offered.chain[-1].digest == manifest.digest
                is_faster = self._choice.takes_deltas(offered.num_bytes, full_bytes=manifest.size_bytes)
                return offered.chain if leads_there and is_faster else ()
            if offered.expected_after_s is None:
                return ()
            wait_s = self._choice.wait_s(
                offered.expected_after_s,
                offered.num_bytes,
                full_bytes=manifest.size_bytes,
                waited_s=self._clock.monotonic_s() - begun_s,
            )
            if wait_s is None:
                return ()
            await asyncio.sleep(wait_s)
            self._metrics.delta_wait_s.inc(wait_s)
            # An answer that takes longer than the full content is not worth having.
            full_s = self._choice.full_s(manifest.size_bytes) or DEFAULT_TIMEOUT_S
            timeout_s = min(DEFAULT_TIMEOUT_S, max(MIN_ANSWER_S, full_s))

    async def _download(self, manifest: weights_pb2.WeightsManifest, path: Path) -> int:
        begun_s = self._clock.monotonic_s()
        download = await self._downloader.fetch(manifest, path, on_refused=self._on_refused)
        self._choice.note_download(
            download.fetched_bytes,
            self._clock.monotonic_s() - begun_s,
            is_delta=manifest.kind == weights_pb2.WEIGHTS_KIND_DELTA,
        )
        self._fetched_bytes += download.fetched_bytes
        self._origin_bytes += download.origin_bytes
        return download.fetched_bytes

    def _path(self, manifest: weights_pb2.WeightsManifest, suffix: str) -> Path:
        return self._cache_dir / f"v{manifest.policy_version:08d}-{manifest.digest}{suffix}"

    def _newest_file(self) -> tuple[Path, VersionName] | None:
        """The version that arrived last; unverified, since its file may have been damaged since."""
        for path in sorted(self._cache_dir.glob("v*.safetensors"), key=_arrival, reverse=True):
            if named := _FILE_NAME.fullmatch(path.name):
                return path, VersionName(int(named[1]), named[2])
        return None


def _arrival(path: Path) -> int:
    return path.stat().st_mtime_ns


def _take_as(base: Path, path: Path, manifest: weights_pb2.WeightsManifest) -> None:
    verify_content(base, manifest)
    os.link(base, path)


def _apply(
    base: Path, deltas: Sequence[Path], path: Path, *, held: VersionName, manifest: weights_pb2.WeightsManifest
) -> None:
    apply_deltas(
        base,
        deltas,
        path,
        base_digest=held.digest,
        tensors=manifest.tensors,
        digest=manifest.digest,
    )
