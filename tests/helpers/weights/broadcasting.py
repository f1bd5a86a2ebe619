"""A weight store that broadcasts over real gloo, and receivers on the same loopback: real gRPC, real HTTP."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from penstock.clients.weights import WeightsClient
from penstock.collective.broadcast_backend import Transport
from penstock.downloads.broadcast_receiver import BroadcastReceiver
from penstock.downloads.downloader import Download, Downloader
from penstock.errors import PenstockError
from penstock.network.rpc import service_of
from penstock.security import NO_SECURITY
from penstock.transfer.content_sources import SourceKind
from penstock.v1 import weights_pb2
from services.trainer.publishing.broadcasts import Broadcasts, BroadcastSettings
from services.trainer.publishing.deltas import Published
from services.trainer.publishing.publisher import serving_weights
from services.trainer.publishing.version_store import WeightStore, WeightStoreService
from tests.helpers.serving import serving
from tests.helpers.weights.scripted_weight_store import make_manifest

CHUNK_BYTES = 64 * 1024


class Origin:
    """The trainer's side."""

    def __init__(self, folder: Path, broadcasts: Broadcasts, store: WeightStore, target: str, url: str) -> None:
        self.folder = folder
        self.broadcasts = broadcasts
        self.target = target
        self._store = store
        self._url = url
        self._resources = AsyncExitStack()

    def publish(self, policy_version: int, *, size_bytes: int = 2_000_000) -> weights_pb2.WeightsManifest:
        path = self.folder / f"v{policy_version}"
        rng = np.random.default_rng(policy_version)
        save_file({"w": rng.integers(0, 255, size_bytes, dtype=np.uint8)}, path)
        url = f"{self._url}/weights/r/{path.name}"
        manifest = make_manifest(path, policy_version=policy_version, url=url, chunk_bytes=CHUNK_BYTES)
        self._store.add(Published(manifest=manifest, path=path))
        return manifest

    async def receiver(self, name: str, **settings: object) -> Receiver:
        """A receiver that watches; the store knows of it."""
        made = await self._resources.enter_async_context(Receiver(name, self.folder, self.target, **settings))
        await made.is_watching.wait()
        return made

    async def close(self) -> None:
        await self._resources.aclose()


class Receiver:
    """What a generator has of the weights' way."""

    def __init__(
        self, name: str, folder: Path, target: str, *, backend: Transport = Transport.GLOO, **settings: object
    ) -> None:
        self.folder = folder / f"cache-{name}"
        self.client = WeightsClient(target, run_id="r", receiver_id=name)
        self.client.joins_broadcasts = True
        self.outcomes: list[str] = []
        self.refused: list[PenstockError] = []
        self.num_received = 0
        self.http_bytes = 0
        self.is_watching = asyncio.Event()
        self.broadcasts = BroadcastReceiver(
            self.client, backend=backend, on_received=self._count, on_end=self.outcomes.append
        )
        self.downloader = Downloader(broadcasts=self.broadcasts, on_fetched=self._count_http, **settings)
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Receiver:
        await self.broadcasts.__aenter__()
        await self.downloader.__aenter__()
        self._watch = asyncio.create_task(self.client.watch(lambda _manifest: self.is_watching.set(), print))
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.leave()
        await self.downloader.__aexit__()
        await self.broadcasts.__aexit__()
        await self.client.close()

    async def leave(self) -> None:
        """Watch no more."""
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)

    async def fetch(self, manifest: weights_pb2.WeightsManifest) -> Download:
        path = self.folder / f"v{manifest.policy_version}"
        return await self.downloader.fetch(manifest, path, on_refused=self.refused.append)

    def content(self, policy_version: int) -> bytes:
        return (self.folder / f"v{policy_version}").read_bytes()

    def _count(self, num_bytes: int) -> None:
        self.num_received += num_bytes

    def _count_http(self, _kind: SourceKind, num_bytes: int) -> None:
        self.http_bytes += num_bytes


def gloo_broadcasts(store: WeightStore, *, gather_s: float = 5.0, stall_s: float = 5.0) -> Broadcasts:
    """A store's contents, broadcast on the loopback."""
    return Broadcasts(
        BroadcastSettings(backend=Transport.GLOO, public_host="127.0.0.1", gather_s=gather_s, stall_s=stall_s),
        listener=socket.create_server(("127.0.0.1", 0)),
        find_content=store.find_content,
    )


@asynccontextmanager
async def broadcasting(folder: Path, *, gather_s: float = 5.0, stall_s: float = 5.0) -> AsyncIterator[Origin]:
    """The store; version 0 is published."""
    store = WeightStore()
    store.reset("r")
    broadcasts = gloo_broadcasts(store, gather_s=gather_s, stall_s=stall_s)
    service = service_of(WeightStoreService(store, broadcasts=broadcasts))
    async with (
        serving_weights(store, listen="127.0.0.1:0", security=NO_SECURITY) as url,
        serving(service) as (_, target),
    ):
        made = Origin(folder, broadcasts, store, target, url)
        made.publish(0, size_bytes=1000)
        try:
            yield made
        finally:
            await made.close()
            await broadcasts.close()
