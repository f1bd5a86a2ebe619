"""Measures Redis under a stalled trainer: waiting data must stay bounded while producers keep pushing."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import redis.asyncio

from benchmarks.broker.processes import Stage
from benchmarks.broker.workload import SHORT
from penstock.clients.broker import BrokerClient
from penstock.clients.trajectories import TrajectorySession
from penstock.errors import RunClosedError
from penstock.process.tasks import end

MAX_QUEUED_GROUPS = 2_048


async def measure(stage: Stage, *, duration_s: float, run_id: str) -> dict[str, Any]:
    """Producers that push for `duration_s` while no trainer takes anything."""
    _broker, address = stage.brokers[0]
    limits = SHORT.limits()
    limits.max_queued_groups = MAX_QUEUED_GROUPS
    client: redis.asyncio.Redis = redis.asyncio.Redis.from_url(stage.redis_url)
    async with BrokerClient(address) as broker:
        await broker.open_run(run_id, limits=limits, policy_version=0)
        idle_bytes = await _used_bytes(client)
        samples: list[int] = []
        # Leaving the session flushes it, which ends only because the run is closed.
        with suppress(RunClosedError):
            async with TrajectorySession(broker, run_id=run_id, producer_id="p0") as session:
                pushing = asyncio.create_task(_push(session))
                for _ in range(max(4, round(duration_s / 0.5))):
                    await asyncio.sleep(0.5)
                    samples.append(await _used_bytes(client))
                await end(pushing)
                books = await broker.audit(run_id)
                await broker.close_run(run_id)
    await client.aclose()
    half = len(samples) // 2
    return {
        "num_samples_waiting": books.in_flight,
        "max_queued_groups": MAX_QUEUED_GROUPS,
        "redis_bytes_before": idle_bytes,
        "redis_bytes_full": max(samples),
        "redis_bytes_per_waiting_byte": (max(samples) - idle_bytes) / (books.in_flight * SHORT.size_bytes),
        "growth_in_second_half_bytes": max(samples[half:]) - max(samples[:half]),
        "is_bounded": books.in_flight <= MAX_QUEUED_GROUPS,
    }


async def _push(session: TrajectorySession) -> None:
    number = 0
    while True:
        await session.send([SHORT.group(f"p0-{number + offset}", number + offset) for offset in range(32)])
        number += 32


async def _used_bytes(client: redis.asyncio.Redis) -> int:
    info: dict[str, Any] = await client.info("memory")
    return int(info["used_memory"])
