"""A weight store with real manifests and a real HTTP server, that can be told to misbehave. Needs no torch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
from aiohttp import web
from safetensors.numpy import save_file

from penstock.errors import DigestMismatchError, UnknownVersionError
from penstock.model.digests import manifest_digest, safetensors_digests
from penstock.network.rpc import Service, service_of
from penstock.transfer.chunks import chunks_of
from penstock.v1 import broker_pb2, weights_pb2, weights_pb2_grpc


def write_weights(path: Path, *, seed: int, num_values: int = 4096) -> Path:
    """A small safetensors file of random numbers."""
    generator = np.random.default_rng(seed)
    save_file(
        {
            "model.weight": generator.standard_normal((num_values // 8, 8), dtype=np.float32),
            "model.bias": generator.standard_normal(8, dtype=np.float32),
        },
        path,
    )
    return path


def make_manifest(
    path: Path, *, policy_version: int, url: str, history: int = 0, chunk_bytes: int = 4096, run_id: str = "r"
) -> weights_pb2.WeightsManifest:
    """The true manifest of a file."""
    tensors = safetensors_digests(path)
    return weights_pb2.WeightsManifest(
        run_id=run_id,
        policy_version=policy_version,
        history=history,
        kind=weights_pb2.WEIGHTS_KIND_FULL,
        encoding=weights_pb2.WEIGHTS_ENCODING_SAFETENSORS,
        tensors=tensors,
        chunks=chunks_of(path, chunk_bytes=chunk_bytes),
        digest=manifest_digest(tensors),
        size_bytes=path.stat().st_size,
        urls=[url],
    )


class ScriptedWeightStore(weights_pb2_grpc.WeightStoreServiceServicer):
    """Publishes files; use `serving_content` around it for the HTTP side."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.manifests: list[weights_pb2.WeightsManifest] = []
        self.reports: list[weights_pb2.ReportHoldingRequest] = []
        self.ranges: list[str] = []
        """Range header of each HTTP request."""
        self.corrupt_requests = 0
        """So many HTTP answers have one byte changed in the middle."""
        self.break_after_bytes: list[int] = []
        """HTTP answers that break off after so many bytes, in order."""
        self.ignores_ranges = False
        self.is_gone = False
        self.is_sending = asyncio.Event()
        self.is_sending.set()
        self.refuses_reports = False
        self._base_url = ""
        self._changed = asyncio.Condition()

    def service(self) -> Service:
        return service_of(self)

    async def publish(
        self,
        policy_version: int,
        *,
        history: int = 0,
        seed: int | None = None,
        is_announced: bool = True,
        owner: broker_pb2.RunOwner | None = None,
    ):
        """Make a version and announce it, or leave it to be asked for."""
        name = f"v{policy_version}h{history}.safetensors"
        path = write_weights(self.directory / name, seed=policy_version if seed is None else seed)
        return await self.publish_file(
            path, policy_version=policy_version, history=history, is_announced=is_announced, owner=owner
        )

    async def publish_file(
        self,
        path: Path,
        *,
        policy_version: int,
        history: int = 0,
        is_announced: bool = True,
        owner: broker_pb2.RunOwner | None = None,
    ):
        """Make a version of a file in the store's directory."""
        url = f"{self._base_url}/{path.name}"
        manifest = make_manifest(path, policy_version=policy_version, history=history, url=url)
        if owner is not None:
            manifest.instance_id, manifest.epoch = owner.instance_id, owner.epoch
        async with self._changed:
            self.manifests.append(manifest)
            if is_announced:
                self._changed.notify_all()
        return manifest

    @asynccontextmanager
    async def serving_content(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_get("/{name}", self._content)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self._base_url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self._base_url
        finally:
            await runner.cleanup()

    async def _content(self, request: web.Request) -> web.StreamResponse:
        self.ranges.append(request.headers.get("Range", ""))
        if self.is_gone:
            raise web.HTTPNotFound
        await self.is_sending.wait()
        data = (self.directory / request.match_info["name"]).read_bytes()
        asked = slice(None) if self.ignores_ranges else request.http_range
        start, stop, _ = asked.indices(len(data))
        body = bytearray(data[start:stop])
        if self.corrupt_requests:
            self.corrupt_requests -= 1
            body[len(body) // 2] ^= 1
        headers = {"Content-Length": str(len(body))}
        if asked != slice(None):
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        response = web.StreamResponse(status=200 if asked == slice(None) else 206, headers=headers)
        await response.prepare(request)
        if self.break_after_bytes:
            await response.write(bytes(body[: self.break_after_bytes.pop(0)]))
            assert request.transport is not None
            request.transport.close()
            return response
        await response.write(bytes(body))
        return response

    async def GetManifest(self, request, context):
        for manifest in reversed(self.manifests):
            if not request.HasField("policy_version") or manifest.policy_version == request.policy_version:
                return weights_pb2.GetManifestResponse(manifest=manifest)
        raise UnknownVersionError("no such version")

    async def WatchManifests(self, request, context):
        seen = None
        while True:
            async with self._changed:
                while not self.manifests or self.manifests[-1] is seen:
                    await self._changed.wait()
                seen = self.manifests[-1]
            yield weights_pb2.WatchManifestsResponse(manifest=seen)

    async def ReportHolding(self, request, context):
        self.reports.append(request)
        if self.refuses_reports:
            raise DigestMismatchError("not what was published")
        return weights_pb2.ReportHoldingResponse(newest_version=self.manifests[-1].policy_version)
