"""Measures a broker under more tokens than it can carry at the generators' own flush interval of 0.2 s.

penstock bench broker.overload [--times N] [--longest S] [--seconds S] [--json]

First the CPU of a chunk is measured under a moderate load; then as many samples decode as would need N times one core
at 0.2 s. Pretended generators with real lease streams send one chunk of every sample at that interval, or at the one
that the broker asks for. Broker and Redis are real processes, the generators share another one.
"""

from __future__ import annotations

import argparse
import asyncio
import urllib.request
from collections import deque
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.broker.processes import CpuMeter, Stage, free_port
from benchmarks.broker.worker import Ready
from benchmarks.command import Progress, Result, measure, print_table, short
from benchmarks.scratch import scratch_folder
from console.launch.embedded_redis import redis_executable
from penstock.clients.broker import BrokerClient
from penstock.clients.leases import LeaseSession
from penstock.clients.tokens import MAX_UNACKNOWLEDGED
from penstock.flush_interval import asked_s
from penstock.network.connection import Connection
from penstock.process.tasks import end
from penstock.v1 import broker_pb2, broker_pb2_grpc, types_pb2
from penstock.wire.codec import encode_versions, float32_bytes, int32_bytes

OWN_INTERVAL_S = 0.2
TOKENS_PER_S = 10
"""Of each sample."""
NUM_SLOTS = 64
GROUP_SIZE = 8
MODERATE_GENERATORS = 16
MODERATE_S = 5.0
POLL_S = 0.5
START_TIMEOUT_S = 120.0
_EXPIRED, _STALLS = "penstock_broker_leases_expired_total", "penstock_broker_loop_stall_seconds_bucket"
_DELAY = "penstock_broker_heartbeat_longest_delay_seconds"


class _Generator:
    """A generator that decodes nothing: its tokens are made up."""

    def __init__(self, broker: str, run_id: str, number: int) -> None:
        connection = Connection(broker)
        names: dict[str, Any] = {"run_id": run_id, "generator_id": f"gen-{number:04}"}
        hello = broker_pb2.GeneratorHello(**names, engine="benchmark", max_context_tokens=1 << 21)
        self.leases = LeaseSession(connection, hello=hello, handler=self)
        self.interval_s = self.longest_interval_s = OWN_INTERVAL_S
        self.num_stored = self.num_sent = self.num_lost = 0
        self.lease_ids: list[str] = []
        self._stub = broker_pb2_grpc.BrokerServiceStub(connection.channel)
        self._request = broker_pb2.StreamTokensRequest(**names)
        self._unanswered: deque[int] = deque()
        self._window = asyncio.Semaphore(MAX_UNACKNOWLEDGED)

    def num_free_slots(self) -> int:
        return NUM_SLOTS - len(self.lease_ids)

    def beat(self) -> broker_pb2.GeneratorBeat:
        return broker_pb2.GeneratorBeat(active_lease_ids=self.lease_ids, num_running=len(self.lease_ids))

    def lease(self, lease: broker_pb2.Lease) -> None:
        self.lease_ids.append(lease.lease_id)
        self._request.chunks.add(key=lease.key, lease_id=lease.lease_id)

    def revoke(self, revocation: broker_pb2.LeaseRevocation) -> None:
        self.num_lost += 1

    def owned_by(self, owner: broker_pb2.RunOwner) -> None:
        """There is no trainer."""

    def run_closed(self) -> None:
        """The benchmark ends."""

    @property
    def num_requests(self) -> int:
        return self._request.sequence

    async def decode(self, duration_s: float, delay_s: float) -> None:
        """Send what has been decoded at each interval, and wait for the last answer."""
        loop = asyncio.get_running_loop()
        call = self._stub.StreamTokens()
        reading = asyncio.create_task(self._read(call))
        await asyncio.sleep(delay_s)
        start_s, num_tokens = loop.time(), 0
        while loop.time() < start_s + duration_s:
            await asyncio.sleep(self.interval_s)
            await self._window.acquire()
            await self._send(call, int((loop.time() - start_s) * TOKENS_PER_S) - num_tokens)
            num_tokens = self.num_sent // NUM_SLOTS
        await call.done_writing()
        await reading

    async def _send(self, call: Any, count: int) -> None:
        if not count:
            self._window.release()
            return
        offset = self.num_sent // NUM_SLOTS
        first, *others = self._request.chunks
        first.token_ids = int32_bytes(np.arange(100_000, 100_000 + count))
        first.logprobs = float32_bytes(np.full(count, -0.5))
        first.policy_versions.CopyFrom(encode_versions(np.zeros(count, dtype=np.int64)))
        first.offset = offset
        for chunk in others:
            chunk.offset, chunk.token_ids, chunk.logprobs = offset, first.token_ids, first.logprobs
            chunk.policy_versions.CopyFrom(first.policy_versions)
        self._request.sequence += 1
        self.num_sent += count * NUM_SLOTS
        self._unanswered.append(count * NUM_SLOTS)
        await call.write(self._request)

    async def _read(self, call: Any) -> None:
        async for response in call:
            self.num_lost += len(response.errors)
            self.num_stored += self._unanswered.popleft()
            self.interval_s = max(OWN_INTERVAL_S, asked_s(response.flush_interval))
            self.longest_interval_s = max(self.longest_interval_s, self.interval_s)
            self._window.release()


async def generate(ready: Ready, *, broker: str, run_id: str, num_generators: int, duration_s: float) -> dict[str, Any]:
    """The role of all generators."""
    generators = [_Generator(broker, run_id, number) for number in range(num_generators)]
    beating = [asyncio.create_task(generator.leases.run()) for generator in generators]
    async with asyncio.timeout(START_TIMEOUT_S):
        while any(generator.num_free_slots() for generator in generators):  # noqa: ASYNC110 -- no event says so
            await asyncio.sleep(0.05)
    await ready()
    delays = np.linspace(0.0, OWN_INTERVAL_S, num_generators, endpoint=False)
    await asyncio.gather(
        *(generator.decode(duration_s, delay_s) for generator, delay_s in zip(generators, delays, strict=True))
    )
    await end(*beating)
    return {
        "num_requests": sum(generator.num_requests for generator in generators),
        "num_sent": sum(generator.num_sent for generator in generators),
        "num_stored": sum(generator.num_stored for generator in generators),
        "num_lost": sum(generator.num_lost for generator in generators),
        "longest_interval_s": max(generator.longest_interval_s for generator in generators),
    }


class _Run:
    """One run of pretended generators at a broker."""

    def __init__(self, stage: Stage, run_id: str, num_generators: int, metrics_port: int) -> None:
        self._stage, self._run_id, self._num_generators = stage, run_id, num_generators
        self._metrics_port = metrics_port
        self.asked_s = 0.0

    async def measure(self, duration_s: float) -> dict[str, Any]:
        """Play it."""
        broker, address = self._stage.brokers[0]
        worker = await self._stage.start_worker()
        num_groups = self._num_generators * NUM_SLOTS // GROUP_SIZE
        limits = broker_pb2.RunLimits(
            groups_per_step=num_groups, group_size=GROUP_SIZE, max_staleness=0, max_completion_tokens=1 << 16
        )
        async with BrokerClient(address) as client:
            await client.open_run(self._run_id, limits=limits, policy_version=0)
            for first in range(0, num_groups, 1_000):
                prompts = [_prompt(number) for number in range(first, min(num_groups, first + 1_000))]
                await client.submit_prompts(self._run_id, prompts)
            await worker.prepare(
                "overload:generate",
                broker=address,
                run_id=self._run_id,
                num_generators=self._num_generators,
                duration_s=duration_s,
            )
            before, meter = await self._metrics(), CpuMeter(broker=broker)
            watching = asyncio.create_task(self._watch(client))
            loop = asyncio.get_running_loop()
            start_s = loop.time()
            report = await worker.go()
            took_s, cpu_s = loop.time() - start_s, meter.used_s()["broker"]
            await end(watching)
            after = await self._metrics()
            await client.close_run(self._run_id, drop_reason="run_complete")
            await client.delete_run(self._run_id, force=True)
        await worker.stop()
        return report | {
            "took_s": took_s,
            "broker_share": cpu_s / took_s,
            "broker_cpu_s": cpu_s,
            "interval_s": self.asked_s or OWN_INTERVAL_S,
            "heartbeat_late_max_s": _total(after, _DELAY),
            "num_expired": _total(after, _EXPIRED) - _total(before, _EXPIRED),
            "loop_lag_p50_s": _quantile(before, after, 0.5),
            "loop_lag_p99_s": _quantile(before, after, 0.99),
            "loop_lag_max_s": _quantile(before, after, 1.0),
        }

    async def _watch(self, client: BrokerClient) -> None:
        while True:
            run = await client.get_run(self._run_id)
            self.asked_s = asked_s(run.flush_interval)
            await asyncio.sleep(POLL_S)

    async def _metrics(self) -> dict[str, dict[str, float]]:
        """Values by metric and bucket."""
        url = f"http://127.0.0.1:{self._metrics_port}/metrics"

        def read() -> str:
            with urllib.request.urlopen(url, timeout=10) as response:
                text: str = response.read().decode()
                return text

        found: dict[str, dict[str, float]] = {_EXPIRED: {}, _STALLS: {}, _DELAY: {}}
        for family in text_string_to_metric_families(await asyncio.to_thread(read)):
            for sample in family.samples:
                if sample.name in found:
                    found[sample.name][sample.labels.get("le", str(sample.labels))] = sample.value
        return found


def _total(metrics: dict[str, dict[str, float]], name: str) -> float:
    return sum(metrics[name].values())


def _quantile(before: dict[str, dict[str, float]], after: dict[str, dict[str, float]], share: float) -> float:
    """Upper bound of the bucket with this share of the loop's lags."""
    counts = {float(le): count - before[_STALLS].get(le, 0.0) for le, count in after[_STALLS].items()}
    total = max(counts.values())
    return min(le for le, count in counts.items() if count >= share * total)


def _prompt(number: int) -> types_pb2.Prompt:
    return types_pb2.Prompt(
        group_id=f"group-{number:06}",
        token_ids=int32_bytes(np.arange(64)),
        group_size=GROUP_SIZE,
        sampling=types_pb2.SamplingParams(max_new_tokens=1 << 16, temperature=1.0),
        purpose=types_pb2.PURPOSE_TRAIN,
    )


async def run(times: float, longest_s: float, seconds: float, progress: Progress) -> Result:
    """Measure the moderate load, then the overload."""
    async with AsyncExitStack() as stack:
        port = free_port()
        folder = stack.enter_context(scratch_folder())
        settings = (f"metrics_port={port}", f"max_flush_interval_s={longest_s}")
        stage = await stack.enter_async_context(Stage(folder, redis_executable(), broker_settings=settings))
        moderate = await _Run(stage, "moderate", MODERATE_GENERATORS, port).measure(MODERATE_S)
        capacity = moderate["num_requests"] * NUM_SLOTS / moderate["broker_cpu_s"]
        share = short(moderate["broker_share"])
        progress(f"moderate load: {share} of a core, {capacity:.0f} chunks a second fit in one")
        num_generators = round(times * capacity * OWN_INTERVAL_S / NUM_SLOTS)
        progress(f"{num_generators} generators of {NUM_SLOTS} samples")
        overload = await _Run(stage, "overload", num_generators, port).measure(seconds)
    if overload["num_lost"] or overload["num_expired"] or overload["num_stored"] != overload["num_sent"]:
        raise RuntimeError(f"not every token was stored: {overload}")
    return {"times": times, "num_samples": num_generators * NUM_SLOTS, "chunks_per_s_of_a_core": capacity, **overload}


def _show(result: Result) -> None:
    print_table("Broker under overload", ("what", "value"), [[(name, short(value)) for name, value in result.items()]])


def main() -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=float, default=3.0, help="of the load that one core can carry")
    parser.add_argument("--longest", type=float, default=2.0, help="the broker's max_flush_interval_s; 0: none")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    return measure(
        lambda progress: run(options.times, options.longest, options.seconds, progress), _show, is_json=options.json
    )


if __name__ == "__main__":
    raise SystemExit(main())
