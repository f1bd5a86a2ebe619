"""Measures the time from a producer's put to the trainer's receipt: single short trajectories at a steady rate."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np

from benchmarks.broker.processes import Stage, Worker
from benchmarks.broker.worker import Ready
from benchmarks.broker.workload import SHORT
from benchmarks.broker.workloads.throughput import play
from penstock.clients.broker import BrokerClient
from penstock.clients.trajectories import TrajectorySession
from penstock.network.connection import Connection

RATE_PER_S = 200
NUM_WARM_UP = 50


async def produce(ready: Ready, *, broker: str, run_id: str, count: int) -> dict[str, Any]:
    """The producer's role: when each trajectory was put, in seconds."""
    async with (
        Connection(broker) as connection,
        TrajectorySession(connection, run_id=run_id, producer_id="p0", max_unanswered=64) as session,
    ):
        await ready()
        start_s, put_s, receipts = time.monotonic(), [], []
        for number in range(count):
            await asyncio.sleep(max(0.0, start_s + number / RATE_PER_S - time.monotonic()))
            group = SHORT.group(f"p0-{number}", number)
            put_s.append(time.monotonic())
            receipts.append(await session.send([group]))
        for receipt in receipts:
            await receipt
    return {"put_s": put_s}


async def consume(ready: Ready, *, broker: str, run_id: str, count: int) -> dict[str, Any]:
    """The trainer's role: when each trajectory arrived, in seconds."""
    got_s: dict[int, float] = {}
    async with (
        BrokerClient(broker) as client,
        client.consumer(run_id, "trainer-0", max_held_groups=SHORT.groups_per_step, max_groups=32) as session,
    ):
        await ready()
        while len(got_s) < count:
            microbatch = await session.next(timeout_s=60.0)
            now_s = time.monotonic()
            if microbatch is None:
                raise RuntimeError(f"nothing came for a minute: {session.waiting_reason}")
            for group in microbatch.groups:
                got_s[int(group.prompt.group_id.rpartition("-")[2])] = now_s
    return {"got_s": [got_s[number] for number in range(count)]}


async def measure(stage: Stage, workers: list[Worker], *, count: int, run_id: str) -> dict[str, float]:
    """One repetition; at most one step of trajectories, so that no acknowledgement interferes."""
    producer, consumer = workers
    _broker, address = stage.brokers[0]
    async with BrokerClient(address) as client:
        await client.open_run(run_id, limits=SHORT.limits(), policy_version=0)
        common = {"broker": address, "run_id": run_id, "count": min(count, SHORT.groups_per_step)}
        await producer.prepare("workloads.latency:produce", **common)
        await consumer.prepare("workloads.latency:consume", **common)
        sent, received = await play(workers)
        await client.close_run(run_id)
    took_s = np.subtract(received["got_s"], sent["put_s"])[NUM_WARM_UP:]
    p50_s, p99_s = np.percentile(took_s, [50, 99])
    span_s = sent["put_s"][-1] - sent["put_s"][0]
    return {
        "p50_ms": float(p50_s) * 1e3,
        "p99_ms": float(p99_s) * 1e3,
        "puts_per_second": (len(sent["put_s"]) - 1) / span_s,
    }
