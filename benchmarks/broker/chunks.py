"""Measures what token chunks cost a broker: CPU a chunk, a token and a request, for chunks and requests of many sizes.

penstock bench broker.chunks [--tokens N ...] [--chunks N ...] [--seconds S] [--spread] [--json]

Pretended generators hold real leases. Each request has one chunk of every sample of its generator, and requests arrive
evenly spaced, as those of a fleet do, so that the broker meets them one by one. Times are CPU time of the broker's
process, less what it uses when idle, with a real Redis and the generators in processes of their own. They are divided
into three parts by least squares of the relative errors:

    us = a * chunks + b * tokens + c * requests

By default a generator holds whole groups; with --spread the samples of a group are at different generators.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.broker.processes import CpuMeter, Stage, Worker
from benchmarks.broker.worker import Ready
from benchmarks.command import Progress, Result, measure, print_table, short
from benchmarks.scratch import scratch_folder
from console.launch.embedded_redis import redis_executable
from penstock.clients.broker import BrokerClient
from penstock.network.connection import Connection
from penstock.v1 import broker_pb2, broker_pb2_grpc, types_pb2
from penstock.wire.codec import encode_versions, float32_bytes, int32_bytes

TOKENS = (2, 16, 64, 256, 1024)
"""Tokens of a chunk."""
CHUNKS = (8, 64, 256)
"""Chunks of a request: samples that a generator decodes at once."""
GROUP_SIZE = 8
MAX_REQUESTS_PER_S = 300
MAX_CHUNKS_PER_S = 6_000
MAX_BYTES_PER_S = 20e6
IDLE_S = 4.0
ANSWER_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One load."""

    tokens: int
    chunks: int
    seconds: float
    is_spread: bool

    @property
    def num_generators(self) -> int:
        """Enough that a generator's requests are far apart, and that groups can be spread."""
        return max(8, 256 // self.chunks)

    @property
    def requests_per_s(self) -> float:
        """Of all generators, so that neither the broker nor the machine is at its limit."""
        chunk_bytes = 8 * self.tokens + 100
        most = min(MAX_CHUNKS_PER_S, MAX_BYTES_PER_S / chunk_bytes)
        return min(MAX_REQUESTS_PER_S, most / self.chunks)

    @property
    def num_requests(self) -> int:
        """Of all generators."""
        return round(self.requests_per_s * self.seconds)


class _Generator:
    """A generator that decodes nothing: its tokens are the same in every request."""

    def __init__(self, broker: str, run_id: str, number: int, tokens: int) -> None:
        self._stub = broker_pb2_grpc.BrokerServiceStub(Connection(broker).channel)
        self._ids: dict[str, Any] = {"run_id": run_id, "generator_id": f"gen-{number:04}"}
        self._tokens = tokens
        self._request = broker_pb2.StreamTokensRequest(**self._ids)
        self._leases: Any = None
        self._stream: Any = None
        self.num_refused = 0

    async def take(self, num_samples: int) -> None:
        """Lease samples until it holds this many."""
        if self._leases is None:
            self._leases = self._stub.StreamLeases()
            hello = broker_pb2.GeneratorHello(**self._ids, engine="benchmark", max_context_tokens=1 << 21)
            await self._leases.write(broker_pb2.StreamLeasesRequest(hello=hello))
        beat = broker_pb2.GeneratorBeat(credit_total=num_samples)
        await self._leases.write(broker_pb2.StreamLeasesRequest(beat=beat))
        while len(self._request.chunks) < num_samples:
            response = await self._leases.read()
            if response.WhichOneof("frame") == "lease":
                self._add(response.lease)

    def _add(self, lease: broker_pb2.Lease) -> None:
        self._request.chunks.add(
            key=lease.key,
            lease_id=lease.lease_id,
            token_ids=int32_bytes(np.arange(100_000, 100_000 + self._tokens)),
            logprobs=float32_bytes(np.full(self._tokens, -0.5)),
            policy_versions=encode_versions(np.zeros(self._tokens, dtype=np.int64)),
        )

    async def send(self) -> None:
        """Send one chunk of each sample."""
        if self._stream is None:
            self._leases.cancel()
            self._stream = self._stub.StreamTokens()
        self._request.sequence += 1
        await self._stream.write(self._request)
        for chunk in self._request.chunks:
            chunk.offset += self._tokens

    async def read_answers(self) -> None:
        """Read the answers to all requests."""
        for _ in range(self._request.sequence):
            self.num_refused += len((await self._stream.read()).errors)


async def stream(ready: Ready, *, broker: str, run_id: str, cell: dict[str, Any]) -> dict[str, Any]:
    """The role of all generators."""
    load = Cell(**cell)
    generators = [_Generator(broker, run_id, number, load.tokens) for number in range(load.num_generators)]
    async with asyncio.timeout(ANSWER_TIMEOUT_S):
        if load.is_spread:
            # One sample each, again and again: the siblings of a group go to different generators.
            for count in range(1, load.chunks + 1):
                await asyncio.gather(*(generator.take(count) for generator in generators))
        else:
            for generator in generators:
                await generator.take(load.chunks)
    await ready()
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    for number in range(load.num_requests):
        await asyncio.sleep(max(0.0, start_s + number / load.requests_per_s - loop.time()))
        await generators[number % len(generators)].send()
    async with asyncio.timeout(ANSWER_TIMEOUT_S):
        await asyncio.gather(*(generator.read_answers() for generator in generators))
    return {"took_s": loop.time() - start_s, "num_refused": sum(generator.num_refused for generator in generators)}


async def _measure(stage: Stage, worker: Worker, cell: Cell, *, idle_share: float, run_id: str) -> dict[str, float]:
    broker, address = stage.brokers[0]
    num_groups = cell.num_generators * cell.chunks // GROUP_SIZE
    limits = broker_pb2.RunLimits(
        groups_per_step=num_groups, group_size=GROUP_SIZE, max_staleness=0, max_completion_tokens=1 << 20
    )
    # Heartbeats are not what is measured here.
    limits.generation_lease.FromSeconds(600)
    async with BrokerClient(address) as client:
        await client.open_run(run_id, limits=limits, policy_version=0)
        await client.submit_prompts(run_id, [_prompt(number) for number in range(num_groups)])
        await worker.prepare("chunks:stream", broker=address, run_id=run_id, cell=asdict(cell))
        assert stage.redis is not None
        meter = CpuMeter(broker=broker, redis=stage.redis)
        report = await worker.go()
        used_s = meter.used_s()
        await client.close_run(run_id, drop_reason="run_complete")
        await client.delete_run(run_id, force=True)
    if report["num_refused"]:
        raise RuntimeError(f"the broker refused {report['num_refused']} chunks")
    num_chunks = cell.num_requests * cell.chunks
    return {
        "broker_us_per_chunk": 1e6 * (used_s["broker"] - idle_share * report["took_s"]) / num_chunks,
        "redis_us_per_chunk": 1e6 * used_s["redis"] / num_chunks,
        "broker_share": used_s["broker"] / report["took_s"],
    }


def _prompt(number: int) -> types_pb2.Prompt:
    return types_pb2.Prompt(
        group_id=f"group-{number:06}",
        token_ids=int32_bytes(np.arange(256)),
        group_size=GROUP_SIZE,
        sampling=types_pb2.SamplingParams(max_new_tokens=1 << 20, temperature=1.0),
        purpose=types_pb2.PURPOSE_TRAIN,
    )


def fit(cells: Sequence[Cell], us_per_chunk: Sequence[float]) -> dict[str, float]:
    """The parts of the cost, and the largest relative error of a cell."""
    rows = np.array([(1.0, cell.tokens, 1 / cell.chunks) for cell in cells])
    costs = np.array(us_per_chunk)
    parts = np.linalg.lstsq(rows / costs[:, None], np.ones(len(costs)), rcond=None)[0]
    error = np.abs(rows @ parts / costs - 1).max()
    names = ("us_per_chunk", "us_per_token", "us_per_request", "largest_error")
    return dict(zip(names, map(float, (*parts, error)), strict=True))


async def run(cells: Sequence[Cell], progress: Progress) -> Result:
    """Measure every load."""
    found: dict[str, dict[str, dict[str, float]]] = defaultdict(dict)
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(scratch_folder())
        stage = await stack.enter_async_context(Stage(folder, redis_executable()))
        worker = await stage.start_worker()
        meter = CpuMeter(broker=stage.brokers[0][0])
        await asyncio.sleep(IDLE_S)
        idle_share = meter.used_s()["broker"] / IDLE_S
        for number, cell in enumerate(cells):
            cost = await _measure(stage, worker, cell, idle_share=idle_share, run_id=f"chunks-{number}")
            found[str(cell.chunks)][str(cell.tokens)] = cost
            progress(f"{cell.chunks} chunks of {cell.tokens}: " + ", ".join(f"{k} {short(v)}" for k, v in cost.items()))
    costs = [found[str(cell.chunks)][str(cell.tokens)]["broker_us_per_chunk"] for cell in cells]
    return {**fit(cells, costs), "cells": dict(found)}


def _show(result: Result) -> None:
    rows = [(name, short(value)) for name, value in result.items() if name != "cells"]
    cells = [
        (f"{chunks} chunks of {tokens} tokens", short(cost["broker_us_per_chunk"]))
        for chunks, costs in result["cells"].items()
        for tokens, cost in costs.items()
    ]
    print_table("Broker: CPU of token chunks, us", ("what", "value"), (rows, cells))


def main() -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--chunks", type=int, nargs="+", default=list(CHUNKS))
    parser.add_argument("--seconds", type=float, default=6.0, help="of each load")
    parser.add_argument("--spread", action="store_true", help="each group's samples at different generators")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cells = [
        Cell(tokens=tokens, chunks=chunks, seconds=options.seconds, is_spread=options.spread)
        for chunks in options.chunks
        for tokens in options.tokens
    ]
    return measure(lambda progress: run(cells, progress), _show, is_json=options.json)


if __name__ == "__main__":
    raise SystemExit(main())
