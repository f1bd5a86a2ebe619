"""Compares fetching full contents on loopback with a bare parallel ranged download of the same bytes.

The bare download uses the same HTTP library, connections, threads and pieces, ranges of the same size, and writes to a
file as well; it checks nothing and cannot resume. Repetitions are interleaved, in alternating order.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.weights.contents import RUN_ID, make_manifest, median_and_spread, write_weights
from benchmarks.weights.origin import running_origin
from penstock.downloads.downloader import NUM_CONNECTIONS, Downloader
from penstock.transfer.fetching import span_bytes
from penstock.transfer.span_read import PIECE_BYTES
from penstock.v1 import weights_pb2

MB = 1_000_000


async def bare_download(url: str, target: Path, *, size_bytes: int) -> None:
    """Ranged GETs over NUM_CONNECTIONS connections, a thread each; each piece is written in its place."""
    length = span_bytes(size_bytes, NUM_CONNECTIONS)
    begins = deque(range(0, size_bytes, length))
    descriptor = os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        os.ftruncate(descriptor, size_bytes)
        await asyncio.gather(
            *(asyncio.to_thread(_download, url, descriptor, begins, length, size_bytes) for _ in range(NUM_CONNECTIONS))
        )
    finally:
        os.close(descriptor)


def _download(url: str, descriptor: int, begins: deque[int], length: int, size_bytes: int) -> None:
    parts = urlsplit(url)
    with closing(HTTPConnection(parts.hostname or "", parts.port)) as connection:
        while True:
            try:
                offset = begins.popleft()
            except IndexError:
                return
            last = min(offset + length, size_bytes) - 1
            connection.request("GET", parts.path, headers={"Range": f"bytes={offset}-{last}"})
            with connection.getresponse() as response:
                while piece := response.read1(PIECE_BYTES):
                    os.pwrite(descriptor, piece, offset)
                    offset += len(piece)


async def measure(folder: Path, *, sizes_bytes: dict[int, int], progress: Callable[[str], None]) -> dict[str, Any]:
    """For each size, with its number of repetitions: bytes per second of both, their ratio, this process's CPU seconds.

    `ratio_to_bare_download` of the whole is the lowest of all sizes.
    """
    origin_folder = folder / "origin"
    origin_folder.mkdir()
    by_size: dict[str, dict[str, Any]] = {}
    async with running_origin(origin_folder) as url:
        for size_bytes, num_repetitions in sizes_bytes.items():
            name = f"{size_bytes / MB:g}_mb"
            path = origin_folder / name
            write_weights(path, size_bytes=size_bytes)
            manifest = make_manifest(path, url=f"{url}/weights/{RUN_ID}/{name}")
            rows = []
            for repetition in range(num_repetitions):
                progress(f"full: {name}, repetition {repetition + 1} of {num_repetitions}")
                rows.append(await _pair(manifest, folder, is_bare_first=repetition % 2 == 0))
            by_size[name] = median_and_spread(rows)
            path.unlink()
    lowest = min(by_size.values(), key=lambda row: row["ratio_to_bare_download"])
    return {"ratio_to_bare_download": lowest["ratio_to_bare_download"], "by_size": by_size}


async def _pair(manifest: weights_pb2.WeightsManifest, folder: Path, *, is_bare_first: bool) -> dict[str, float]:
    async def bare() -> None:
        await bare_download(manifest.urls[0], folder / "bare", size_bytes=manifest.size_bytes)

    async def ours() -> None:
        async with Downloader() as downloader:
            await downloader.fetch(manifest, folder / "ours")

    times_s: dict[str, float] = {}
    cpu_s: dict[str, float] = {}
    ways: list[tuple[str, Callable[[], Awaitable[None]]]] = [("bare", bare), ("ours", ours)]
    for name, way in ways if is_bare_first else reversed(ways):
        begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
        await way()
        times_s[name], cpu_s[name] = time.perf_counter() - begun_s, time.process_time() - begun_cpu_s
        (folder / name).unlink()
    return {
        "mb_per_second": manifest.size_bytes / MB / times_s["ours"],
        "bare_mb_per_second": manifest.size_bytes / MB / times_s["bare"],
        "ratio_to_bare_download": times_s["bare"] / times_s["ours"],
        "cpu_s": cpu_s["ours"],
        "bare_cpu_s": cpu_s["bare"],
    }
