"""Measures put, delivery and acknowledgement: trajectories from two producers to one trainer, at full speed.

The trainer checks every trajectory byte for byte, and that each arrives once; then it acknowledges the step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.broker.processes import CpuMeter, Stage, Worker
from benchmarks.broker.worker import Ready
from benchmarks.broker.workload import WORKLOADS, Workload
from penstock.clients.broker import BrokerClient
from penstock.clients.trajectories import TrajectorySession
from penstock.network.connection import Connection

CONSUMER = "trainer-0"
MICROBATCH_GROUPS = 32


async def produce(ready: Ready, *, broker: str, run_id: str, name: str, workload: str, count: int) -> dict[str, Any]:
    """A producer's role."""
    made, start_s = WORKLOADS[workload], 0.0
    assert made.templates
    async with (
        Connection(broker) as connection,
        TrajectorySession(connection, run_id=run_id, producer_id=name) as session,
    ):
        await ready()
        start_s = time.monotonic()
        receipts = []
        for first in range(0, count, made.num_per_put):
            numbers = range(first, min(count, first + made.num_per_put))
            receipts.append(await session.send([made.group(f"{name}-{number}", number) for number in numbers]))
        stored = [await receipt for receipt in receipts]
        return {
            "start_s": start_s,
            "num_stored": sum(receipt.num_samples for receipt in stored),
            "num_refused": sum(len(receipt.refused) for receipt in stored),
        }


async def consume(ready: Ready, *, broker: str, run_id: str, workload: str, count: int) -> dict[str, Any]:
    """The trainer's role."""
    made = WORKLOADS[workload]
    assert made.templates
    # As the real trainer does: see its loop.
    max_held_groups = 2 * made.groups_per_step
    seen: set[str] = set()
    num_doubled = num_damaged = num_microbatches = version = 0
    async with (
        BrokerClient(broker) as client,
        client.consumer(run_id, CONSUMER, max_held_groups=max_held_groups, max_groups=MICROBATCH_GROUPS) as session,
    ):
        await ready()
        step: list[str] = []
        while len(seen) + num_doubled < count:
            microbatch = await session.next(timeout_s=60.0)
            if microbatch is None:
                raise RuntimeError(f"nothing came for a minute: {session.waiting_reason}")
            num_microbatches += 1
            for group in microbatch.groups:
                group_id = group.prompt.group_id
                num_doubled += group_id in seen
                num_damaged += not made.is_intact(group)
                seen.add(group_id)
                step.append(group_id)
            if len(step) >= made.groups_per_step or len(seen) >= count:
                version += 1
                await client.ack_step(run_id, consumer_id=CONSUMER, group_ids=step, policy_version=version)
                session.release(step)
                step = []
        return {
            "end_s": time.monotonic(),
            "num_received": len(seen),
            "num_doubled": num_doubled,
            "num_damaged": num_damaged,
            "num_microbatches": num_microbatches,
        }


async def measure(stage: Stage, workers: list[Worker], *, workload: str, count: int, run_id: str) -> dict[str, float]:
    """One repetition: `count` trajectories of all producers (all workers but the last) to the trainer (the last)."""
    *producers, consumer = workers
    made = WORKLOADS[workload]
    broker, address = stage.brokers[0]
    async with BrokerClient(address) as client:
        await client.open_run(run_id, limits=made.limits(), policy_version=0)
        share = count // len(producers)
        common = {"broker": address, "run_id": run_id, "workload": workload}
        for number, producer in enumerate(producers):
            await producer.prepare("workloads.throughput:produce", **common, name=f"p{number}", count=share)
        await consumer.prepare("workloads.throughput:consume", **common, count=share * len(producers))
        assert stage.redis is not None
        clients = {f"producer_{number}": producer for number, producer in enumerate(producers)}
        meter = CpuMeter(broker=broker, redis=stage.redis, **clients, trainer=consumer)
        *sent, received = await play(workers)
        cpu_s = meter.used_s()
        books = await client.audit(run_id)
        await client.close_run(run_id)
    count = share * len(producers)
    if (received["num_received"], received["num_doubled"], received["num_damaged"]) != (count, 0, 0):
        raise RuntimeError(f"not exactly once and intact: {received} of {count}")
    if not books.balanced or (books.submitted, books.trained) != (count, count):
        raise RuntimeError(f"the books say {books}")
    return rates(made, count=count, sent=sent, received=received, cpu_s=cpu_s)


def rates(
    made: Workload,
    *,
    count: int,
    sent: Sequence[dict[str, Any]],
    received: dict[str, Any],
    cpu_s: dict[str, float],
) -> dict[str, float]:
    """Result of a repetition, from the reports of its producers and its consumer."""
    elapsed_s = received["end_s"] - min(report["start_s"] for report in sent)
    return {
        "trajectories_per_second": count / elapsed_s,
        "mb_per_second": count * made.size_bytes / elapsed_s / 1e6,
        "cpu_s_per_1k": sum(cpu_s.values()) / count * 1e3,
        **{f"cpu_s_per_1k_{name}": used_s / count * 1e3 for name, used_s in cpu_s.items()},
    }


async def play(workers: list[Worker]) -> list[dict[str, Any]]:
    """Let prepared workers play together; returns their reports."""
    return list(await asyncio.gather(*(worker.go() for worker in workers)))
