"""Provides the broker's surroundings: a scheduler with given forecasts, and weights of one small file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from aiohttp import web
from safetensors.numpy import save_file

from benchmarks.fleet.workload import group_id
from benchmarks.weights.contents import make_manifest
from penstock.network.rpc import Server, service_of
from penstock.v1 import scheduler_pb2, scheduler_pb2_grpc, weights_pb2, weights_pb2_grpc

_Context = grpc.aio.ServicerContext[Any, Any]


class ToldScheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Returns the forecasts it was given for a run."""

    def __init__(self) -> None:
        self._told: dict[str, dict[str, float]] = {}

    async def tell(self, run_id: str, forecasts: Sequence[float | None]) -> None:
        """Forecast i is of sample i; None means no forecast."""
        self._told[run_id] = {group_id(index): value for index, value in enumerate(forecasts) if value is not None}

    async def ForecastLengths(
        self, request: scheduler_pb2.ForecastLengthsRequest, _context: _Context
    ) -> scheduler_pb2.ForecastLengthsResponse:
        """Return the given forecasts."""
        told = self._told.get(request.run_id, {})
        forecasts = [
            scheduler_pb2.LengthForecast(expected_tokens=told.get(query.group_id)) for query in request.queries
        ]
        return scheduler_pb2.ForecastLengthsResponse(forecasts=forecasts, model_version=1)


class OneVersion(weights_pb2_grpc.WeightStoreServiceServicer):
    """Version 0 of any requested run."""

    def __init__(self, path: Path, url: str) -> None:
        self._manifest = make_manifest(path, url=url)

    async def GetManifest(
        self, request: weights_pb2.GetManifestRequest, _context: _Context
    ) -> weights_pb2.GetManifestResponse:
        """The one manifest."""
        return weights_pb2.GetManifestResponse(manifest=self._of(request.run_id))

    async def WatchManifests(
        self, request: weights_pb2.WatchManifestsRequest, _context: _Context
    ) -> AsyncIterator[weights_pb2.WatchManifestsResponse]:
        """The one manifest, then nothing."""
        yield weights_pb2.WatchManifestsResponse(manifest=self._of(request.run_id))
        await asyncio.Event().wait()

    async def FindSources(
        self, _request: weights_pb2.FindSourcesRequest, _context: _Context
    ) -> weights_pb2.FindSourcesResponse:
        """No relays."""
        return weights_pb2.FindSourcesResponse()

    async def ReportHolding(
        self, _request: weights_pb2.ReportHoldingRequest, _context: _Context
    ) -> weights_pb2.ReportHoldingResponse:
        """Accept."""
        return weights_pb2.ReportHoldingResponse(newest_version=0)

    def _of(self, run_id: str) -> weights_pb2.WeightsManifest:
        manifest = weights_pb2.WeightsManifest()
        manifest.CopyFrom(self._manifest)
        manifest.run_id = run_id
        return manifest


@asynccontextmanager
async def serving_surroundings(folder: Path) -> AsyncIterator[tuple[ToldScheduler, str]]:
    """The address of the running scheduler and weight store."""
    path = folder / "weights.safetensors"
    save_file({"model.weight": np.arange(64, dtype=np.float32)}, path)
    async with _serving_file(path) as url:
        # The calls left out are not made here.
        scheduler = ToldScheduler()  # type: ignore[abstract]
        weights = OneVersion(path, url)  # type: ignore[abstract]
        services = [
            service_of(scheduler),
            service_of(weights),
        ]
        server = Server(listen="127.0.0.1:0", services=services)
        port = await server.start()
        try:
            yield scheduler, f"127.0.0.1:{port}"
        finally:
            await server.stop(grace_s=0.5)


@asynccontextmanager
async def _serving_file(path: Path) -> AsyncIterator[str]:
    async def content(_request: web.Request) -> web.FileResponse:
        return web.FileResponse(path)

    app = web.Application()
    app.router.add_get("/weights", content)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/weights"
    finally:
        await runner.cleanup()
