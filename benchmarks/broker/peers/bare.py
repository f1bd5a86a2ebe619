"""Measures gRPC alone: the same bytes over a bare bidirectional stream, 32 opaque trajectories per message.

The server forwards messages unparsed, in memory, and acknowledges each with one byte. No store, no checks, no
exactly-once delivery: this is the floor for the broker's numbers of the same run.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from benchmarks.broker.peers.arrays import NUM_TEMPLATES
from benchmarks.broker.processes import CpuMeter, Worker
from benchmarks.broker.worker import Ready
from benchmarks.broker.workload import WORKLOADS, Workload
from benchmarks.broker.workloads.throughput import play, rates
from penstock.network.rpc import open_channel

SERVICE = "penstock.benchmarks.Bare"
MAX_QUEUED_MESSAGES = 64
MAX_UNANSWERED = 8
_OPTIONS = (("grpc.max_receive_message_length", 1 << 28), ("grpc.max_send_message_length", 1 << 28))
_HEADER = struct.Struct("<II")
"""Producer and number of a trajectory."""


async def serve(ready: Ready, *, address: str) -> dict[str, Any]:
    """The server's role: serves from readiness until stopped."""
    queue: asyncio.Queue[bytes] = asyncio.Queue(MAX_QUEUED_MESSAGES)

    async def put(requests: AsyncIterator[bytes], _context: object) -> AsyncIterator[bytes]:
        async for request in requests:
            await queue.put(request)
            yield b"\0"

    async def get(_requests: AsyncIterator[bytes], _context: object) -> AsyncIterator[bytes]:
        while True:
            yield await queue.get()

    server = grpc.aio.server(options=_OPTIONS)
    handlers: dict[str, Any] = {
        "Put": grpc.stream_stream_rpc_method_handler(put),
        "Get": grpc.stream_stream_rpc_method_handler(get),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    server.add_insecure_port(address)
    await server.start()
    await ready()
    await server.stop(0)
    return {}


def _bodies(workload: Workload) -> list[bytes]:
    """Wire form of each kind of trajectory."""
    return [workload.group("p0-1000000", number).SerializeToString()[_HEADER.size :] for number in range(NUM_TEMPLATES)]


async def produce(ready: Ready, *, address: str, name: int, workload: str, count: int) -> dict[str, Any]:
    """A producer's role."""
    made = WORKLOADS[workload]
    bodies = _bodies(made)
    async with open_channel(address) as channel:
        call: Any = channel.stream_stream(f"/{SERVICE}/Put")()
        await ready()
        start_s = time.monotonic()
        num_unanswered = 0
        for first in range(0, count, 32):
            parts: list[bytes] = []
            for number in range(first, min(count, first + 32)):
                parts += (_HEADER.pack(name, number), bodies[number % NUM_TEMPLATES])
            if num_unanswered >= MAX_UNANSWERED:
                await call.read()
                num_unanswered -= 1
            await call.write(b"".join(parts))
            num_unanswered += 1
        for _ in range(num_unanswered):
            await call.read()
        call.cancel()
    return {"start_s": start_s}


async def consume(ready: Ready, *, address: str, workload: str, count: int) -> dict[str, Any]:
    """The consumer's role: checks every trajectory as the other side's trainer does."""
    made = WORKLOADS[workload]
    bodies = _bodies(made)
    size, header = made.size_bytes, _HEADER.size
    seen: set[tuple[int, int]] = set()
    num_bad = 0
    async with open_channel(address) as channel:
        call: Any = channel.stream_stream(f"/{SERVICE}/Get")()
        await ready()
        while len(seen) + num_bad < count:
            message: bytes = await call.read()
            for start in range(0, len(message), size):
                key = _HEADER.unpack_from(message, start)
                is_good = message[start + header : start + size] == bodies[key[1] % NUM_TEMPLATES] and key not in seen
                num_bad += not is_good
                seen.add(key)
        end_s = time.monotonic()
        call.cancel()
    return {"end_s": end_s, "num_bad": num_bad}


async def measure(
    address: str, server: Worker, workers: list[Worker], *, workload: str, count: int
) -> dict[str, float]:
    """One repetition, as `throughput.measure`; the server is already running."""
    *producers, consumer = workers
    made = WORKLOADS[workload]
    share = count // len(producers)
    count = share * len(producers)
    for name, producer in enumerate(producers):
        await producer.prepare("peers.bare:produce", address=address, name=name, workload=workload, count=share)
    await consumer.prepare("peers.bare:consume", address=address, workload=workload, count=count)
    clients = {f"producer_{number}": producer for number, producer in enumerate(producers)}
    meter = CpuMeter(server=server, **clients, consumer=consumer)
    *sent, received = await play(workers)
    cpu_s = meter.used_s()
    if received["num_bad"]:
        raise RuntimeError(f"{received['num_bad']} trajectories were damaged or doubled")
    return rates(made, count=count, sent=sent, received=received, cpu_s=cpu_s)
