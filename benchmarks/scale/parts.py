"""The numbers that have suites of their own: leases, chunks, bytes in Redis, memory, restarts. A function for each."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.broker import chunks, leases, memory, restart, retained
from benchmarks.command import Progress

RETAINED_TOKENS, RETAINED_CHUNK = 1_024, 10


async def lease_costs(fleets: Sequence[int], progress: Progress) -> dict[str, dict[str, float]]:
    """Of each size of the fleet; see `benchmarks.broker.leases`."""
    found: dict[str, dict[str, float]] = {}
    for size in fleets:
        progress(f"leases: {size} generators")
        # In a thread, as it runs an event loop of its own; it counts CPU time of its thread alone.
        found[str(size)] = asdict(await asyncio.to_thread(leases.measure, size, dispatch="lpt"))
    return found


async def chunk_costs(
    tokens: Sequence[int], sizes: Sequence[int], seconds: float, progress: Progress
) -> dict[str, float]:
    """CPU a chunk, a token and a request; see `benchmarks.broker.chunks`."""
    cells = [
        chunks.Cell(tokens=each, chunks=size, seconds=seconds, is_spread=False) for size in sizes for each in tokens
    ]
    found = await chunks.run(cells, lambda text: progress(f"chunks: {text}"))
    return {name: float(found[name]) for name in ("us_per_chunk", "us_per_token", "us_per_request", "largest_error")}


async def redis_bytes(num_steps: int, num_groups: int, progress: Progress) -> dict[str, float]:
    """Bytes a completion token that Redis keeps of trained steps; see `benchmarks.broker.retained`."""
    progress("redis: bytes a token")
    options = argparse.Namespace(
        tokens=RETAINED_TOKENS, chunk=RETAINED_CHUNK, steps=num_steps, groups=num_groups, puts=False, no_text=False
    )
    found: dict[str, Any] = await retained.measure(options)
    return {"bytes_per_token": float(found["redis_bytes_per_token"])}


async def broker_memory(size: memory.Size, progress: Progress) -> dict[str, Any]:
    """A broker that holds a whole fleet's samples; see `benchmarks.broker.memory`."""
    progress(f"memory: {size.num_generators} generators with {size.samples_each} samples each")
    return await memory.measure(size)


async def restarted(size: restart.Size, progress: Progress) -> dict[str, Any]:
    """A broker that is started again over a large run; see `benchmarks.broker.restart`."""
    progress(f"restart: {size.num_live_groups} groups under way, {size.num_retained_groups} retained")
    return await restart.measure(size)
