"""Compares a gloo broadcast of a full content to receivers of one site with HTTP, interleaved, all on loopback.

    penstock bench weights.broadcast [--mb 200] [--receivers 2] [--repetitions 5]

Sender and receivers are in one process and share its event loop, threads and cores: the figure compares two ways of
bringing the same bytes, checked and written alike, and predicts nothing for a real network. HTTP is the way of
receivers without a site, each fetching from the origin. Groups are formed before the clock starts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import socket
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from benchmarks.scratch import scratch_folder
from benchmarks.weights.contents import RUN_ID, make_manifest, write_weights
from penstock.clients.weights import WeightsClient
from penstock.collective.broadcast_backend import Transport
from penstock.downloads.broadcast_receiver import BroadcastReceiver
from penstock.downloads.downloader import Downloader
from penstock.network.rpc import Server, service_of
from penstock.security import NO_SECURITY
from penstock.v1 import weights_pb2
from services.trainer.publishing.broadcasts import Broadcasts, BroadcastSettings
from services.trainer.publishing.deltas import Published
from services.trainer.publishing.publisher import serving_weights
from services.trainer.publishing.version_store import WeightStore, WeightStoreService

MB = 1_000_000
WARM_UP_BYTES = 1 * MB


class _Site:
    """A store that broadcasts, and downloaders of both kinds for each receiver."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._store = WeightStore()
        self._num_published = 0
        self.by_way: dict[str, list[Downloader]] = {"http": [], "gloo": []}

    async def open(self, stack: AsyncExitStack, *, num_receivers: int) -> None:
        self._store.reset(RUN_ID)
        self._url = await stack.enter_async_context(
            serving_weights(self._store, listen="127.0.0.1:0", security=NO_SECURITY)
        )
        broadcasts = Broadcasts(
            BroadcastSettings(backend=Transport.GLOO, public_host="127.0.0.1", gather_s=0.5, stall_s=60.0),
            listener=socket.create_server(("127.0.0.1", 0)),
            find_content=self._store.find_content,
        )
        stack.push_async_callback(broadcasts.close)
        service = service_of(WeightStoreService(self._store, broadcasts=broadcasts))
        server = Server(listen="127.0.0.1:0", services=[service], security=NO_SECURITY)
        target = f"127.0.0.1:{await server.start()}"
        stack.push_async_callback(server.stop, grace_s=0.2)
        for index in range(num_receivers):
            stack.enter_context(broadcasts.attended_by(f"x{index}"))
            client = await stack.enter_async_context(WeightsClient(target, run_id=RUN_ID, receiver_id=f"x{index}"))
            receiver = await stack.enter_async_context(BroadcastReceiver(client, backend=Transport.GLOO))
            self.by_way["gloo"].append(await stack.enter_async_context(Downloader(broadcasts=receiver)))
            self.by_way["http"].append(await stack.enter_async_context(Downloader()))

    def publish(self, size_bytes: int) -> weights_pb2.WeightsManifest:
        """Make new bytes: a content is broadcast once."""
        self._num_published += 1
        path = self._folder / f"v{self._num_published}"
        write_weights(path, size_bytes=size_bytes, seed=self._num_published)
        manifest = make_manifest(
            path, url=f"{self._url}/weights/{RUN_ID}/{path.name}", policy_version=self._num_published
        )
        self._store.add(Published(manifest=manifest, path=path))
        return manifest

    async def bring(self, manifest: weights_pb2.WeightsManifest, way: str) -> float:
        """Seconds until all receivers have a content."""
        cache = self._folder / "cache"
        begun_s = time.perf_counter()
        downloads = await asyncio.gather(
            *(
                downloader.fetch(manifest, cache / f"{way}{index}" / "content")
                for index, downloader in enumerate(self.by_way[way])
            )
        )
        seconds = time.perf_counter() - begun_s
        if way == "gloo" and any(download.origin_bytes for download in downloads):
            raise RuntimeError("a broadcast did not bring everything: no figure")
        shutil.rmtree(cache)
        return seconds


async def measure(*, size_bytes: int, num_receivers: int, num_repetitions: int) -> dict[str, object]:
    """Medians of both ways, their ratio in each repetition, and its minimum and maximum."""
    times_s: dict[str, list[float]] = {"http": [], "gloo": []}
    with scratch_folder() as folder:
        async with AsyncExitStack() as stack:
            site = _Site(folder)
            await site.open(stack, num_receivers=num_receivers)
            await site.bring(site.publish(WARM_UP_BYTES), "gloo")
            for repetition in range(num_repetitions):
                manifest = site.publish(size_bytes)
                for way in sorted(times_s, reverse=repetition % 2 == 0):
                    times_s[way].append(await site.bring(manifest, way))
    ratios = [http_s / gloo_s for http_s, gloo_s in zip(times_s["http"], times_s["gloo"], strict=True)]
    return {
        "size_mb": size_bytes / MB,
        "num_receivers": num_receivers,
        "num_repetitions": num_repetitions,
        "http_s": statistics.median(times_s["http"]),
        "gloo_s": statistics.median(times_s["gloo"]),
        "ratio_to_http": statistics.median(ratios),
        "ratio_spread": [min(ratios), max(ratios)],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=200)
    parser.add_argument("--receivers", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args(arguments)
    figures = asyncio.run(
        measure(size_bytes=options.mb * MB, num_receivers=options.receivers, num_repetitions=options.repetitions)
    )
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
