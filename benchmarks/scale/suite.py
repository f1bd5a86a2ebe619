"""Runs every part of `penstock bench scale`, and puts the keys of its result together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.broker import memory, restart
from benchmarks.command import Progress, Result
from benchmarks.scale import brokers, live, needs, parts, simulation
from benchmarks.scale.emulated_run import Load, make_scene
from services.broker.rules.sample_policy import MAX_RETAINED_GROUPS

PARTS = ("leases", "chunks", "redis", "memory", "restart", "fleet", "brokers")
"""What can be measured alone; `needs` and the simulation follow where their costs were measured."""
GROUP_SIZE = needs.GROUP_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much to measure."""

    fleets: Sequence[int]
    """Sizes for leases."""
    chunk_tokens: Sequence[int]
    """Tokens of a chunk, two sizes at least."""
    chunks_per_request: Sequence[int]
    chunk_seconds: float
    retained_steps: int
    retained_groups: int
    memory: memory.Size
    restart: restart.Size
    load: Load
    """Of the fleet."""
    leases_over_s: float
    """Time in which the fleet's generators begin to ask for work, and end their samples."""
    num_processes: int
    """Of generators."""
    num_repetitions: int
    idle_s: float
    brokers: Sequence[int]
    brokers_load: Load
    brokers_tokens: int
    simulated: Sequence[tuple[int, int]]
    """Generators and brokers."""
    simulated_s: float
    num_at_once: int = 1
    """Parts that are measured at the same time; with more than one, numbers mean nothing."""


FULL = Plan(
    fleets=(8, 64, 256, 1_024),
    chunk_tokens=(2, 64),
    chunks_per_request=(64, 256),
    chunk_seconds=6.0,
    retained_steps=4,
    retained_groups=16,
    memory=memory.Size(num_generators=1_024, samples_each=256, num_chunks=2, num_workers=2),
    restart=restart.Size(
        num_live_groups=262_144 // GROUP_SIZE, num_retained_groups=MAX_RETAINED_GROUPS, group_size=GROUP_SIZE
    ),
    load=Load(num_generators=1_024, samples_each=64, period_s=8.0, num_periods=1),
    leases_over_s=10.0,
    num_processes=2,
    num_repetitions=3,
    idle_s=5.0,
    brokers=(1, 2, 4, 8),
    brokers_load=Load(num_generators=64, samples_each=64, period_s=1.0, num_periods=6),
    brokers_tokens=16,
    simulated=((512, 8), (1_024, 8), (1_024, 16), (10_000, 32), (10_000, 64)),
    simulated_s=40.0,
)
QUICK = Plan(
    fleets=(8,),
    chunk_tokens=(2, 64),
    chunks_per_request=(8,),
    chunk_seconds=0.5,
    retained_steps=1,
    retained_groups=2,
    memory=memory.Size(num_generators=4, samples_each=8, num_chunks=1, num_workers=1),
    restart=restart.Size(num_live_groups=64, num_retained_groups=64, group_size=GROUP_SIZE),
    load=Load(num_generators=4, samples_each=8, period_s=0.5, num_periods=2),
    leases_over_s=0.2,
    num_processes=1,
    num_repetitions=1,
    idle_s=1.0,
    brokers=(1, 2),
    brokers_load=Load(num_generators=4, samples_each=8, period_s=0.5, num_periods=2),
    brokers_tokens=4,
    simulated=((100, 2),),
    simulated_s=5.0,
    num_at_once=2,
)


async def run(
    plan: Plan, chosen: Sequence[str], assumed: needs.Assumptions, *, redis_server: Path, progress: Progress
) -> Result:
    """Measure the chosen parts."""
    measured: dict[str, Any] = {}
    turns = asyncio.Semaphore(plan.num_at_once)

    async def add(name: str, measure: Callable[[], Awaitable[Any]]) -> None:
        async with turns:
            measured[name] = await measure()

    async with asyncio.TaskGroup() as tasks:
        for name, measure in _measures(plan, redis_server, progress).items():
            if name in chosen:
                tasks.create_task(add(name, measure))
    result = _keys(measured)
    costs = costs_of(measured)
    if costs is not None:
        result |= needs.all_needs(needs.GPUS, assumed, costs)
        result["simulation"] = [await _simulated(plan, sizes, assumed, costs, progress) for sizes in plan.simulated]
    return result


def _measures(plan: Plan, redis_server: Path, progress: Progress) -> Mapping[str, Callable[[], Awaitable[Any]]]:
    async def fleet() -> dict[str, Any]:
        async with make_scene(redis_server) as scene:
            return await live.measure(
                scene,
                plan.load,
                num_processes=plan.num_processes,
                chunk_tokens=plan.chunk_tokens,
                num_repetitions=plan.num_repetitions,
                idle_s=plan.idle_s,
                leases_over_s=plan.leases_over_s,
                progress=progress,
            )

    async def several() -> dict[str, dict[str, float]]:
        async with make_scene(redis_server) as scene:
            return await brokers.measure(
                scene,
                plan.brokers_load,
                numbers=plan.brokers,
                num_processes=plan.num_processes,
                num_tokens=plan.brokers_tokens,
                num_repetitions=plan.num_repetitions,
                idle_s=plan.idle_s,
                progress=progress,
            )

    return {
        "leases": lambda: parts.lease_costs(plan.fleets, progress),
        "chunks": lambda: parts.chunk_costs(plan.chunk_tokens, plan.chunks_per_request, plan.chunk_seconds, progress),
        "redis": lambda: parts.redis_bytes(plan.retained_steps, plan.retained_groups, progress),
        "memory": lambda: parts.broker_memory(plan.memory, progress),
        "restart": lambda: parts.restarted(plan.restart, progress),
        "fleet": fleet,
        "brokers": several,
    }


def _keys(measured: Mapping[str, Any]) -> Result:
    """The result's keys, of what was measured."""
    result: Result = {name: measured[name] for name in ("leases", "brokers", "restart", "fleet") if name in measured}
    if "chunks" in measured:
        result |= measured["chunks"]
    if "redis" in measured:
        result["redis_bytes_per_token"] = measured["redis"]["bytes_per_token"]
    if "memory" in measured:
        result |= {"broker_mb": measured["memory"]["peak_mb"], "memory": measured["memory"]}
    if "fleet" in measured:
        result["heartbeat_late_max_s"] = measured["fleet"]["heartbeat_late_max_s"]
    return result


def costs_of(measured: Mapping[str, Any]) -> needs.Costs | None:
    """The unit costs, where chunks and a fleet were measured. Costs below zero, of noise in short windows, are zero."""
    if "chunks" not in measured or "fleet" not in measured:
        return None
    fleet, chunks = measured["fleet"], measured["chunks"]
    redis_us = _line(fleet["chunks"], "redis_us_per_chunk")
    read, sent = (_line(fleet["chunks"], f"redis_{name}_bytes_per_chunk") for name in ("read", "sent"))
    return needs.Costs(
        us_per_chunk=max(0.0, chunks["us_per_chunk"]),
        us_per_token=max(0.0, chunks["us_per_token"]),
        us_per_request=max(0.0, chunks["us_per_request"]),
        us_per_lease=fleet["us_per_lease"],
        us_per_group=fleet["us_per_group_delivered"],
        us_per_heartbeat=fleet["us_per_heartbeat"],
        us_per_lease_kept=fleet["us_per_lease_kept"],
        redis_us_per_chunk=redis_us[0],
        redis_us_per_token=redis_us[1],
        redis_bytes_per_chunk=read[0] + sent[0],
        redis_bytes_per_token=read[1] + sent[1],
    )


def _line(chunks: Mapping[str, Mapping[str, float]], name: str) -> tuple[float, float]:
    """A cost by chunk and by token, from those of chunks of several sizes."""
    sizes = np.array([float(size) for size in chunks])
    slope, base = np.polyfit(sizes, np.array([each[name] for each in chunks.values()]), 1)
    return max(0.0, float(base)), max(0.0, float(slope))


async def _simulated(
    plan: Plan, sizes: tuple[int, int], assumed: needs.Assumptions, costs: needs.Costs, progress: Progress
) -> dict[str, Any]:
    num_generators, num_brokers = sizes
    progress(f"simulation: {num_generators} generators, {num_brokers} brokers")
    fleet = simulation.Fleet(num_generators=num_generators, num_brokers=num_brokers, seconds=plan.simulated_s)
    return await asyncio.to_thread(simulation.simulate, fleet, assumed, costs)
