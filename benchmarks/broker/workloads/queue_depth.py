"""Compares leasing from a queue of a million samples with leasing from one of a thousand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from benchmarks.broker.processes import CpuMeter, Stage
from penstock.clients.broker import BrokerClient
from penstock.v1 import broker_pb2, broker_pb2_grpc, types_pb2
from penstock.wire.codec import int32_bytes

GROUP_SIZE = 8
SHALLOW_SAMPLES = 1_000
NUM_LEASED = 512
"""Samples leased in a repetition; the shallow queue has this many."""
PROMPTS_PER_CALL = 1_000


async def fill(stage: Stage, *, run_id: str, num_samples: int) -> None:
    """A run with this many queued samples."""
    num_groups = num_samples // GROUP_SIZE
    limits = broker_pb2.RunLimits(
        groups_per_step=65_536,
        group_size=GROUP_SIZE,
        max_staleness=8,
        max_queued_groups=num_groups,
        max_completion_tokens=1 << 16,
    )
    ids = int32_bytes(np.arange(16))
    async with BrokerClient(stage.brokers[0][1]) as client:
        await client.open_run(run_id, limits=limits, policy_version=0)
        for first in range(0, num_groups, PROMPTS_PER_CALL):
            prompts = [
                types_pb2.Prompt(
                    group_id=f"g{number}",
                    token_ids=ids,
                    group_size=GROUP_SIZE,
                    sampling=types_pb2.SamplingParams(max_new_tokens=16),
                    purpose=types_pb2.PURPOSE_TRAIN,
                )
                for number in range(first, min(num_groups, first + PROMPTS_PER_CALL))
            ]
            response = await client.submit_prompts(run_id, prompts)
            if response.errors:
                raise RuntimeError(f"a prompt was refused: {response.errors[0].message}")


async def measure(stage: Stage, *, run_id: str, generator_id: str, num_leases: int) -> dict[str, float]:
    """One generator that asks for `num_leases` samples at once: its time and the broker's CPU until it has them.

    The leases stay alive; they expire after the generator is gone, after the measurement.
    """
    broker, address = stage.brokers[0]
    received = asyncio.Event()
    beat = broker_pb2.GeneratorBeat(credit_total=num_leases)

    async def requests() -> AsyncIterator[broker_pb2.StreamLeasesRequest]:
        yield broker_pb2.StreamLeasesRequest(
            hello=broker_pb2.GeneratorHello(run_id=run_id, generator_id=generator_id, max_context_tokens=1 << 16)
        )
        yield broker_pb2.StreamLeasesRequest(beat=beat)
        await received.wait()

    async with BrokerClient(address) as client:
        stub = broker_pb2_grpc.BrokerServiceStub(client.channel)
        await client.list_runs()
        meter, start_s = CpuMeter(broker=broker), time.monotonic()
        call: Any = stub.StreamLeases(requests(), timeout=120)
        count = 0
        while count < num_leases:
            response = await call.read()
            count += response.HasField("lease")
        took_s, cpu_s = time.monotonic() - start_s, meter.used_s()["broker"]
        received.set()
        call.cancel()
    return {"ms_per_100_leases": took_s / num_leases * 1e5, "broker_cpu_ms_per_100_leases": cpu_s / num_leases * 1e5}
