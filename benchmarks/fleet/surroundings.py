"""Runs the services around a benchmark's emulated GPUs: Redis, broker, weights, a scheduler with given forecasts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.broker.processes import Stage
from benchmarks.fleet.generation import Surroundings
from benchmarks.fleet.services import serving_surroundings
from benchmarks.scratch import scratch_folder


@asynccontextmanager
async def staged(redis_server: Path) -> AsyncIterator[Surroundings]:
    """Starts everything in its own folder, and stops it."""
    with scratch_folder() as folder:
        async with (
            serving_surroundings(folder) as (scheduler, address),
            Stage(folder, redis_server, broker_settings=(f"scheduler={address}",)) as stage,
        ):
            yield Surroundings(
                stage=stage, broker=stage.brokers[0][1], weights=address, foresee=scheduler.tell, folder=folder
            )
