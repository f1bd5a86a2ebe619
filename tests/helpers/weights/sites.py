"""An origin behind a link, and receivers of one site that relay to each other: real gRPC, real HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from benchmarks.weights.link import ShapedLink, link_to
from penstock.clients.weights import WeightsClient
from penstock.downloads.downloader import Download, Downloader
from penstock.network.rpc import service_of
from penstock.security import NO_SECURITY, Security
from penstock.transfer.relay import Relay
from penstock.v1 import weights_pb2
from services.trainer.publishing.deltas import Published
from services.trainer.publishing.publisher import serving_weights
from services.trainer.publishing.source_failures import SourceFailures
from services.trainer.publishing.version_store import WeightStore, WeightStoreService
from tests.helpers.serving import serving
from tests.helpers.weights.scripted_weight_store import make_manifest

CHUNK_BYTES = 64 * 1024


class Site:
    """Receivers of site "s" and the link they share."""

    def __init__(self, folder: Path, store: WeightStore, target: str, link: ShapedLink, security: Security) -> None:
        self.folder = folder
        self.link = link
        self.store = store
        self.target = target
        self.failures = SourceFailures()
        """What receivers told."""
        self._security = security
        self._resources = AsyncExitStack()

    def publish(self, policy_version: int = 1, *, size_bytes: int) -> weights_pb2.WeightsManifest:
        path = self.folder / f"v{policy_version}"
        rng = np.random.default_rng(policy_version)
        save_file({"w": rng.integers(0, 255, size_bytes, dtype=np.uint8)}, path)
        scheme = "http" if self._security.cert_file is None else "https"
        url = f"{scheme}://127.0.0.1:{self.link.port}/weights/r/{path.name}"
        manifest = make_manifest(path, policy_version=policy_version, url=url, chunk_bytes=CHUNK_BYTES)
        self.store.add(Published(manifest=manifest, path=path))
        return manifest

    async def receiver(self, name: str, **settings: object) -> Receiver:
        made = Receiver(name, self.folder / f"cache-{name}", self.target, self._security, **settings)
        return await self._resources.enter_async_context(made)

    async def close(self) -> None:
        await self._resources.aclose()


class Receiver:
    """What a generator has of the weights' way."""

    def __init__(self, name: str, folder: Path, target: str, security: Security, **settings: object) -> None:
        self.folder = folder
        self.client = WeightsClient(target, run_id="r", receiver_id=name, site="s", security=security)
        self.relayed_bytes = 0
        self.fetched_bytes = 0
        self.relay = Relay(listen="127.0.0.1:0", security=security, on_served=self._count)
        self.downloader = Downloader(
            security=security,
            relay=self.relay,
            find_relays=self.client.find_relays,
            on_fetched=self._count_fetched,
            **settings,
        )
        self.downloader.faults.report = self.client.report_failure

    async def __aenter__(self) -> Receiver:
        await self.relay.__aenter__()
        await self.downloader.__aenter__()
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.downloader.__aexit__()
        await self.relay.__aexit__()
        await self.client.close()

    async def fetch(self, manifest: weights_pb2.WeightsManifest, **settings: object) -> Download:
        return await self.downloader.fetch(manifest, self.folder / f"v{manifest.policy_version}", **settings)

    def _count_fetched(self, _kind: object, num_bytes: int) -> None:
        self.fetched_bytes += num_bytes

    def _count(self, num_bytes: int) -> None:
        self.relayed_bytes += num_bytes


@asynccontextmanager
async def site(
    folder: Path, *, security: Security = NO_SECURITY, origin_bytes_per_second: float | None = None, **shape: float
) -> AsyncIterator[Site]:
    store = WeightStore()
    store.reset("r")
    servicer = WeightStoreService(store)
    service = service_of(servicer)
    async with (
        serving_weights(
            store, listen="127.0.0.1:0", security=security, max_bytes_per_second=origin_bytes_per_second
        ) as url,
        link_to(int(url.rpartition(":")[2]), **shape) as link,
        serving(service, security=security) as (_, target),
    ):
        made = Site(folder, store, target, link, security)
        made.failures = servicer.failures
        try:
            yield made
        finally:
            await made.close()
