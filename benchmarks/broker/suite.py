"""Runs every workload of the broker, repetitions interleaved, and reports for `penstock bench broker`."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import redis.asyncio

from benchmarks.broker import token_stream
from benchmarks.broker.peers import bare, peer
from benchmarks.broker.processes import Stage, Worker, free_port
from benchmarks.broker.workload import WORKLOADS
from benchmarks.broker.workloads import latency, queue_depth, stalled_trainer, throughput
from benchmarks.scratch import scratch_folder

REWRITE_TIMEOUT_S = 60.0
Result = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much to measure."""

    num_repetitions: int
    num_short: int
    num_long: int
    num_puts: int
    num_streamed_samples: int
    stream_s: float
    stall_s: float
    num_queued_samples: int


FULL = Plan(
    num_repetitions=5,
    num_short=16_384,
    num_long=1_600,
    num_puts=1_000,
    num_streamed_samples=1_024,
    stream_s=10.0,
    stall_s=8.0,
    num_queued_samples=1_000_000,
)
QUICK = Plan(
    num_repetitions=1,
    num_short=256,
    num_long=40,
    num_puts=100,
    num_streamed_samples=64,
    stream_s=1.0,
    stall_s=2.0,
    num_queued_samples=4_000,
)


async def run(
    plan: Plan, *, redis_server: Path, progress: Callable[[str], None], peers_dir: Path | None = None
) -> Result:
    """Measure everything; `progress` receives status messages.

    With `peers_dir`, the folder of their environments, peers are measured beside the broker.
    """
    pythons = await peer.pythons(cache_dir=peers_dir, progress=progress) if peers_dir else {}
    with scratch_folder() as folder:
        async with Stage(folder, redis_server) as stage:
            workers = [await stage.start_worker() for _ in range(3)]
            result = await _throughputs(stage, workers, plan, pythons, progress)
            result["latency"] = await _latency(stage, workers[:2], plan, progress)
            result["token_stream"] = await _token_stream(stage, workers[0], plan, progress)
            progress("memory: a trainer that takes nothing")
            result["memory"] = await stalled_trainer.measure(stage, duration_s=plan.stall_s, run_id="stalled")
            await _empty(stage)
            result["queue"] = await _queue(stage, plan, progress)
    return result


class _Beside(Protocol):
    """A system measured beside the broker."""

    async def measure(self, workload: str, count: int) -> dict[str, float]:
        """One repetition."""

    async def stop(self) -> None:
        """Stop its processes."""


async def _throughputs(
    stage: Stage, workers: list[Worker], plan: Plan, pythons: Mapping[str, Path | None], progress: Callable[[str], None]
) -> Result:
    # New processes for each workload: by default, processes that have carried long messages keep their buffers and then
    # carry short ones 1.5 times as fast.
    bare_streams = {
        workload: await _Floor.start(stage, [await stage.start_worker(is_plain=True) for _ in workers], is_plain=True)
        for workload in WORKLOADS
    }
    beside: dict[str, _Beside] = {"tuned_bare_stream": await _Floor.start(stage, workers, is_plain=False)}
    for name, python in pythons.items():
        progress(f"{name}: starting")
        beside[name] = await peer.Peer.start(stage, peer.KINDS[name], python, num_workers=len(workers))
    found: dict[str, dict[str, list[dict[str, float]]]] = {workload: {} for workload in WORKLOADS}
    for repetition in range(plan.num_repetitions):
        for workload, count in (("short", plan.num_short), ("long", plan.num_long)):
            others = {"bare_stream": bare_streams[workload], **beside}
            if repetition == 0:
                progress(f"{workload}: warming up")
                await _side_by_side(stage, workers, others, workload, count // 4, run_id=f"{workload}-warm")
            progress(f"{workload}: repetition {repetition + 1} of {plan.num_repetitions}")
            rows = await _side_by_side(stage, workers, others, workload, count, run_id=f"{workload}-{repetition}")
            ours, bare_per_second = rows["ours"], rows["bare_stream"]["trajectories_per_second"]
            for name in others:
                ours[f"ratio_to_{name}"] = ours["trajectories_per_second"] / rows[name]["trajectories_per_second"]
            for name in pythons:
                rows[name]["ratio_to_bare_stream"] = rows[name]["trajectories_per_second"] / bare_per_second
            for name, row in rows.items():
                found[workload].setdefault(name, []).append(row)
    for each in (*bare_streams.values(), *beside.values()):
        await each.stop()
    return {
        workload: summary(rows.pop("ours")) | {name: summary(others) for name, others in rows.items()}
        for workload, rows in found.items()
    }


async def _side_by_side(
    stage: Stage, workers: list[Worker], beside: Mapping[str, _Beside], workload: str, count: int, *, run_id: str
) -> dict[str, dict[str, float]]:
    """One repetition of all systems in turn."""
    rows = {name: await each.measure(workload, count) for name, each in beside.items()}
    rows["ours"] = await throughput.measure(stage, workers, workload=workload, count=count, run_id=run_id)
    await _empty(stage)
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class _Floor:
    """A bare stream to compare with."""

    server: Worker
    address: str
    workers: list[Worker]

    @classmethod
    async def start(cls, stage: Stage, workers: list[Worker], *, is_plain: bool) -> _Floor:
        """Start its server; `workers` are its clients."""
        server, address = await stage.start_worker(is_plain=is_plain), f"127.0.0.1:{free_port()}"
        await server.prepare("peers.bare:serve", address=address)
        return cls(server=server, address=address, workers=workers)

    async def measure(self, workload: str, count: int) -> dict[str, float]:
        """One repetition."""
        return await bare.measure(self.address, self.server, self.workers, workload=workload, count=count)

    async def stop(self) -> None:
        """Stop the server; its clients may be shared."""
        await self.server.stop()


async def _latency(stage: Stage, workers: list[Worker], plan: Plan, progress: Callable[[str], None]) -> Result:
    found = []
    for repetition in range(plan.num_repetitions):
        progress(f"latency: repetition {repetition + 1} of {plan.num_repetitions}")
        found.append(await latency.measure(stage, workers, count=plan.num_puts, run_id=f"latency-{repetition}"))
        await _empty(stage)
    return summary(found)


async def _token_stream(stage: Stage, worker: Worker, plan: Plan, progress: Callable[[str], None]) -> Result:
    found = []
    for repetition in range(plan.num_repetitions):
        progress(f"token stream: repetition {repetition + 1} of {plan.num_repetitions}")
        found.append(
            await token_stream.measure(
                stage,
                worker,
                num_samples=plan.num_streamed_samples,
                duration_s=plan.stream_s,
                run_id=f"tokens-{repetition}",
            )
        )
        await _empty(stage)
    return summary(found)


async def _queue(stage: Stage, plan: Plan, progress: Callable[[str], None]) -> Result:
    progress(f"queue: filling {plan.num_queued_samples} samples")
    await queue_depth.fill(stage, run_id="deep", num_samples=plan.num_queued_samples)
    num_leases = min(queue_depth.NUM_LEASED, plan.num_queued_samples // 4)
    deep: list[dict[str, float]] = []
    shallow: list[dict[str, float]] = []
    for repetition in range(plan.num_repetitions):
        progress(f"queue: repetition {repetition + 1} of {plan.num_repetitions}")
        run_id = f"shallow-{repetition}"
        await queue_depth.fill(stage, run_id=run_id, num_samples=queue_depth.SHALLOW_SAMPLES)
        generator_id = f"g{repetition}"
        for found, name in ((shallow, run_id), (deep, "deep")):
            found.append(
                await queue_depth.measure(stage, run_id=name, generator_id=generator_id, num_leases=num_leases)
            )
    result: Result = {"num_queued_samples": plan.num_queued_samples, "deep": summary(deep), "shallow": summary(shallow)}
    for field in ("ms_per_100_leases", "broker_cpu_ms_per_100_leases"):
        name = "slowdown" if field == "ms_per_100_leases" else "cpu_slowdown"
        result[name] = result["deep"][field] / max(result["shallow"][field], 1e-9)
    return result


async def _empty(stage: Stage) -> None:
    """Remove the runs so far and their file, so that every repetition starts with the same Redis."""
    client: redis.asyncio.Redis = redis.asyncio.Redis.from_url(stage.redis_url)
    await client.flushall()
    await client.bgrewriteaof()
    async with asyncio.timeout(REWRITE_TIMEOUT_S):
        while (await client.info("persistence"))["aof_rewrite_in_progress"]:  # noqa: ASYNC110 -- Redis sends no
            # notification
            await asyncio.sleep(0.05)
    await client.aclose()


def summary(repetitions: Sequence[dict[str, float]]) -> Result:
    """The median of each number, and its minimum and maximum under "spread"."""
    names = list(repetitions[0])
    values = {name: sorted(found[name] for found in repetitions) for name in names}
    result: Result = {name: statistics.median(values[name]) for name in names}
    result["spread"] = {name: [values[name][0], values[name][-1]] for name in names}
    result["num_repetitions"] = len(repetitions)
    return result
