"""Measures a site behind a shaped link: fetch time over size/bandwidth, the cost of a cut, and copies over the link.

Everything is real but the link: the store that names the relays, the HTTP server, the receivers and their relays.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.weights.contents import RUN_ID, make_manifest, median_and_spread, write_weights
from benchmarks.weights.link import ShapedLink, link_to
from penstock.clients.weights import WeightsClient
from penstock.downloads.downloader import Download, Downloader
from penstock.network.rpc import Server, service_of
from penstock.security import NO_SECURITY
from penstock.transfer.relay import Relay
from penstock.v1 import weights_pb2
from services.trainer.publishing.deltas import Published
from services.trainer.publishing.publisher import serving_weights
from services.trainer.publishing.version_store import WeightStore, WeightStoreService

NUM_RECEIVERS = 3
CUT_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class _Site:
    folder: Path
    store: WeightStore
    target: str
    link: ShapedLink

    def publish(self, policy_version: int, *, size_bytes: int) -> weights_pb2.WeightsManifest:
        path = self.folder / f"v{policy_version}"
        write_weights(path, size_bytes=size_bytes, seed=policy_version)
        url = f"http://127.0.0.1:{self.link.port}/weights/{RUN_ID}/{path.name}"
        manifest = make_manifest(path, url=url, policy_version=policy_version)
        self.store.add(Published(manifest=manifest, path=path))
        return manifest

    @asynccontextmanager
    async def receiver(self, name: str) -> AsyncIterator[Downloader]:
        async with (
            WeightsClient(self.target, run_id=RUN_ID, receiver_id=name, site="far") as client,
            Relay(listen="127.0.0.1:0") as relay,
            Downloader(relay=relay, find_relays=client.find_relays) as downloader,
        ):
            yield downloader


@asynccontextmanager
async def _site(folder: Path, *, bytes_per_second: float, delay_s: float) -> AsyncIterator[_Site]:
    store = WeightStore()
    store.reset(RUN_ID)
    service = service_of(WeightStoreService(store))
    server = Server(listen="127.0.0.1:0", services=[service])
    async with (
        serving_weights(store, listen="127.0.0.1:0", security=NO_SECURITY) as url,
        link_to(int(url.rpartition(":")[2]), bytes_per_second=bytes_per_second, delay_s=delay_s) as link,
    ):
        port = await server.start()
        try:
            yield _Site(folder, store, f"127.0.0.1:{port}", link)
        finally:
            await server.stop(grace_s=0)


async def measure(
    folder: Path, *, size_bytes: int, bytes_per_second: float, delay_s: float, num_repetitions: int
) -> dict[str, Any]:
    """Medians and spreads for one receiver, uninterrupted and with a cut, and for several of one site together.

    `time_ratio` is the seconds of a fetch over size/bandwidth. `cut_time_ratio` is the same with every connection cut
    half-way, `resent_ratio` the bytes sent twice because of it, over the size. `link_copies` is the bytes that crossed
    the link over the size when NUM_RECEIVERS receivers fetch at once, `site_time_ratio` the time until the last of them
    had all.
    """
    rows = []
    async with _site(folder, bytes_per_second=bytes_per_second, delay_s=delay_s) as site:
        for repetition in range(num_repetitions):
            manifest = site.publish(repetition, size_bytes=size_bytes)
            ideal_s = manifest.size_bytes / bytes_per_second
            rows.append(
                await _alone(site, manifest, ideal_s)
                | await _with_a_cut(site, manifest, ideal_s)
                | await _together(site, manifest, ideal_s)
            )
    return median_and_spread(rows)


async def _alone(site: _Site, manifest: weights_pb2.WeightsManifest, ideal_s: float) -> dict[str, float]:
    async with Downloader() as downloader:
        begun_s = time.perf_counter()
        await downloader.fetch(manifest, site.folder / "alone")
        took_s = time.perf_counter() - begun_s
    (site.folder / "alone").unlink()
    return {"time_ratio": took_s / ideal_s}


async def _with_a_cut(site: _Site, manifest: weights_pb2.WeightsManifest, ideal_s: float) -> dict[str, float]:
    before_bytes, begun_s = site.link.delivered_bytes, time.perf_counter()
    async with Downloader() as downloader:
        fetch = asyncio.create_task(downloader.fetch(manifest, site.folder / "cut"))
        async with asyncio.timeout(CUT_TIMEOUT_S):
            while site.link.delivered_bytes - before_bytes < manifest.size_bytes / 2:  # noqa: ASYNC110 -- a counter
                await asyncio.sleep(0.002)
        site.link.cut()
        await fetch
    took_s = time.perf_counter() - begun_s
    (site.folder / "cut").unlink()
    resent_bytes = site.link.delivered_bytes - before_bytes - manifest.size_bytes
    return {"cut_time_ratio": took_s / ideal_s, "resent_ratio": max(0.0, resent_bytes / manifest.size_bytes)}


async def _together(site: _Site, manifest: weights_pb2.WeightsManifest, ideal_s: float) -> dict[str, float]:
    async with AsyncExitStack() as stack:
        names = [f"receiver-{number}" for number in range(NUM_RECEIVERS)]
        receivers = [await stack.enter_async_context(site.receiver(name)) for name in names]
        before_bytes, begun_s = site.link.delivered_bytes, time.perf_counter()
        downloads: list[Download] = await asyncio.gather(
            *(receiver.fetch(manifest, site.folder / name) for receiver, name in zip(receivers, names, strict=True))
        )
        took_s = time.perf_counter() - begun_s
    for download in downloads:
        download.path.unlink()
    return {
        "link_copies": (site.link.delivered_bytes - before_bytes) / manifest.size_bytes,
        "site_time_ratio": took_s / ideal_s,
    }
