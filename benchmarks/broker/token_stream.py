"""Measures the broker's cost of token chunks from many samples decoding concurrently.

Real lease and token clients on several connections; every sample gets a token at a steady rate, and the clients flush
at the generators' interval.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np

from benchmarks.broker.processes import CpuMeter, Stage, Worker
from benchmarks.broker.worker import Ready
from penstock.clients.broker import BrokerClient
from penstock.clients.leases import LeaseSession
from penstock.clients.sample_stream import SampleStream
from penstock.clients.tokens import TokenSession
from penstock.network.connection import Connection
from penstock.process.tasks import end
from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.codec import int32_bytes

NUM_CONNECTIONS = 8
GROUP_SIZE = 8
TOKENS_PER_S = 10
"""Tokens of each sample."""
FLUSH_INTERVAL_S = 0.2
"""The generator's default."""


class Generator:
    """A generator that decodes nothing: the tokens are made up."""

    def __init__(self, number: int, num_slots: int) -> None:
        self.generator_id = f"g{number}"
        self.num_slots = num_slots
        self.streams: dict[str, SampleStream] = {}
        self.tokens: TokenSession | None = None
        self.num_refused = 0

    def num_free_slots(self) -> int:
        return self.num_slots - len(self.streams)

    def beat(self) -> broker_pb2.GeneratorBeat:
        return broker_pb2.GeneratorBeat(active_lease_ids=list(self.streams), num_running=len(self.streams))

    def lease(self, lease: broker_pb2.Lease) -> None:
        assert self.tokens is not None
        offset = len(lease.prefix_token_ids) // 4
        self.streams[lease.lease_id] = self.tokens.open(
            lease.key, lease_id=lease.lease_id, offset=offset, listener=self, token_shard=lease.token_shard
        )

    def revoke(self, revocation: broker_pb2.LeaseRevocation) -> None:
        self.streams.pop(revocation.lease_id, None)

    def owned_by(self, owner: broker_pb2.RunOwner) -> None:
        """There is no trainer."""

    def run_closed(self) -> None:
        self.streams.clear()

    def settled(self) -> None:
        """Implements StreamListener."""

    def refused(self, error: broker_pb2.ChunkError) -> None:
        self.num_refused += 1


async def decode(ready: Ready, *, broker: str, run_id: str, num_samples: int, duration_s: float) -> dict[str, Any]:
    """The role of all generators: takes every lease, then appends tokens to every sample at a steady rate."""
    generators = [Generator(number, num_samples // NUM_CONNECTIONS) for number in range(NUM_CONNECTIONS)]
    connections = [Connection(broker) for _ in generators]
    tasks: list[asyncio.Task[None]] = []
    for generator, connection in zip(generators, connections, strict=True):
        common: dict[str, Any] = {"run_id": run_id, "generator_id": generator.generator_id}
        generator.tokens = TokenSession(connection, **common, flush_interval_s=FLUSH_INTERVAL_S)
        hello = broker_pb2.GeneratorHello(**common, engine="benchmark", max_context_tokens=1 << 20)
        leases = LeaseSession(connection, hello=hello, handler=generator)
        tasks += [asyncio.create_task(generator.tokens.run()), asyncio.create_task(leases.run())]
    async with asyncio.timeout(60):
        while sum(len(generator.streams) for generator in generators) < num_samples:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await ready()
    token_ids, logprobs = np.array([7], dtype=np.int32), np.array([-0.5], dtype=np.float32)
    num_ticks = round(duration_s * TOKENS_PER_S)
    start_s = time.monotonic()
    for tick in range(num_ticks):
        for number, generator in enumerate(generators):
            # Spread over the tick, as different generators are.
            at_s = start_s + (tick + number / NUM_CONNECTIONS) / TOKENS_PER_S
            await asyncio.sleep(max(0.0, at_s - time.monotonic()))
            for stream in generator.streams.values():
                stream.append(token_ids, logprobs, policy_version=0)
    sessions = [generator.tokens for generator in generators if generator.tokens is not None]
    for session in sessions:
        await session.flush(timeout_s=30.0)
    took_s = time.monotonic() - start_s
    await end(*tasks)
    for connection in connections:
        await connection.close()
    return {
        "took_s": took_s,
        "num_tokens": num_ticks * num_samples,
        "num_stored": sum(session.num_tokens_stored for session in sessions),
        "num_refused": sum(generator.num_refused for generator in generators),
    }


async def measure(
    stage: Stage, worker: Worker, *, num_samples: int, duration_s: float, run_id: str
) -> dict[str, float]:
    """One repetition."""
    broker, address = stage.brokers[0]
    num_groups = num_samples // GROUP_SIZE
    limits = broker_pb2.RunLimits(
        groups_per_step=num_groups, group_size=GROUP_SIZE, max_staleness=0, max_completion_tokens=1 << 16
    )
    async with BrokerClient(address) as client:
        await client.open_run(run_id, limits=limits, policy_version=0)
        prompts = [
            types_pb2.Prompt(
                group_id=f"g{number}",
                token_ids=int32_bytes(np.arange(256)),
                group_size=GROUP_SIZE,
                sampling=types_pb2.SamplingParams(max_new_tokens=4096),
                purpose=types_pb2.PURPOSE_TRAIN,
            )
            for number in range(num_groups)
        ]
        await client.submit_prompts(run_id, prompts)
        await worker.prepare(
            "token_stream:decode", broker=address, run_id=run_id, num_samples=num_samples, duration_s=duration_s
        )
        assert stage.redis is not None
        meter = CpuMeter(broker=broker, redis=stage.redis)
        report = await worker.go()
        cpu_s = meter.used_s()
        await client.close_run(run_id)
    if report["num_stored"] != report["num_tokens"] or report["num_refused"]:
        raise RuntimeError(f"not every token was stored: {report}")
    per_second = report["num_tokens"] / report["took_s"]
    return {
        "tokens_per_second": per_second,
        "broker_core_percent": 100 * cpu_s["broker"] / report["took_s"],
        "broker_core_percent_per_10k_tokens_per_second": 100 * cpu_s["broker"] / report["num_tokens"] * 1e4,
        "redis_core_percent_per_10k_tokens_per_second": 100 * cpu_s["redis"] / report["num_tokens"] * 1e4,
    }
