"""One run with emulated generators: its phases, and the CPU time that each took in the brokers and in Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.broker.processes import Child, CpuMeter, Stage, Worker, free_port
from benchmarks.scratch import scratch_folder
from penstock.clients.broker import BrokerClient
from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.codec import int32_bytes

GROUP_SIZE = 8
NUM_PROMPT_TOKENS = 256
MAX_TOKENS = 32_768
LEASE_S = 15
"""The trainer's default."""
PROMPTS_PER_CALL = 500
_GENERATORS, _TRAINER = "benchmarks.scale.generators", "benchmarks.scale.trainer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How many generators there are, and what they do."""

    num_generators: int
    samples_each: int
    """Slots of each, all of them in use. Samples make groups of GROUP_SIZE."""
    period_s: float
    """Each generator sends a request, with a chunk for each of its samples, once in this time."""
    num_periods: int
    """Periods of a measured window."""
    num_shards: int = 0
    """Token shards of the run; 0 for none."""

    @property
    def num_samples(self) -> int:
        """Samples under way."""
        return self.num_generators * self.samples_each

    @property
    def num_groups(self) -> int:
        """Groups under way."""
        return self.num_samples // GROUP_SIZE

    def tokens_per_second(self, num_tokens: int) -> float:
        """Pretended rate of each sample with chunks of `num_tokens`."""
        return num_tokens / self.period_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A broker process."""

    process: Child
    address: str
    metrics_port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """What one phase took."""

    took_s: float
    brokers_s: float
    """CPU seconds of all brokers."""
    redis_s: float
    reports: list[dict[str, Any]]
    """Of the generators' processes."""

    def total(self, name: str) -> int:
        """The sum of a number of all reports."""
        return sum(int(report[name]) for report in self.reports)

    @property
    def brokers_share(self) -> float:
        """Cores that the brokers used."""
        return self.brokers_s / self.took_s

    @property
    def redis_share(self) -> float:
        """Cores that Redis used."""
        return self.redis_s / self.took_s


class Scene(NamedTuple):
    """A stage, and its broker."""

    stage: Stage
    broker: Served


@asynccontextmanager
async def make_scene(redis_server: Path) -> AsyncIterator[Scene]:
    """A stage in a folder of its own whose broker serves its metrics."""
    port = free_port()
    with scratch_folder() as folder:
        async with Stage(folder, redis_server, broker_settings=(f"metrics_port={port}",)) as stage:
            [(process, address)] = stage.brokers
            yield Scene(stage, Served(process=process, address=address, metrics_port=port))


async def start_served(stage: Stage) -> Served:
    """Start another broker that serves its metrics."""
    port = free_port()
    process, address = await stage.start_broker([f"metrics_port={port}"])
    return Served(process=process, address=address, metrics_port=port)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedRun:
    """A run whose generators are connected; made by `emulated_run`."""

    run_id: str
    load: Load
    stage: Stage
    brokers: Sequence[Served]
    workers: Sequence[Worker]
    client: BrokerClient

    async def lease(self, *, over_s: float = 0.0) -> Phase:
        """All generators ask for work, within this time, until every slot has a sample."""
        return await self._play("lease", over_s=over_s)

    async def idle(self, seconds: float) -> Phase:
        """Nothing but heartbeats."""
        meter, start_s = self._meter(), time.monotonic()
        await asyncio.sleep(seconds)
        return _phase(meter, time.monotonic() - start_s, [])

    async def stream(self, num_tokens: int) -> Phase:
        """One window of chunks of this many tokens. Raises RuntimeError unless every token is stored."""
        load = self.load
        phase = await self._play("stream", num_tokens=num_tokens, period_s=load.period_s, num_periods=load.num_periods)
        sent, stored, refused = phase.total("num_tokens"), phase.total("num_stored"), phase.total("num_refused")
        if sent != stored or refused:
            raise RuntimeError(f"{sent} tokens were sent, {stored} stored, and {refused} chunks refused")
        return phase

    async def finish(self, trainer: Worker, *, over_s: float) -> Phase:
        """End all samples; one reward worker scores them and one trainer takes them, in two steps.

        Raises RuntimeError unless every group is trained and the audit balances.
        """
        num_groups = self.load.num_groups
        await trainer.prepare(
            f"{_TRAINER}:train",
            broker=self.brokers[0].address,
            run_id=self.run_id,
            num_groups=num_groups,
            groups_per_step=_groups_per_step(num_groups),
        )
        taken = asyncio.create_task(trainer.go())
        try:
            phase = await self._play("finish", others=[taken], over_s=over_s)
        finally:
            taken.cancel()
        books = await self.client.audit(self.run_id)
        if not books.balanced or books.trained != self.load.num_samples:
            raise RuntimeError(f"not every sample was trained: {books}")
        return phase

    async def leave(self) -> float:
        """Disconnect the generators; returns how late they sent a heartbeat, at most."""
        reports = (await self._play("leave")).reports
        return max(float(report["heartbeat_sent_late_max_s"]) for report in reports)

    async def _play(self, role: str, others: Sequence[asyncio.Task[Any]] = (), **arguments: Any) -> Phase:
        """Let all generators' processes play a role, beside `others`."""
        for worker in self.workers:
            await worker.prepare(f"{_GENERATORS}:{role}", **arguments)
        meter, start_s = self._meter(), time.monotonic()
        reports = await asyncio.gather(*(worker.go() for worker in self.workers), *others)
        return _phase(meter, time.monotonic() - start_s, reports[: len(self.workers)])

    def _meter(self) -> CpuMeter:
        assert self.stage.redis is not None
        brokers = {f"broker_{number}": broker.process for number, broker in enumerate(self.brokers)}
        return CpuMeter(redis=self.stage.redis, **brokers)


def _phase(meter: CpuMeter, took_s: float, reports: list[dict[str, Any]]) -> Phase:
    used_s = meter.used_s()
    redis_s = used_s.pop("redis")
    return Phase(took_s=took_s, brokers_s=sum(used_s.values()), redis_s=redis_s, reports=reports)


@asynccontextmanager
async def emulated_run(
    stage: Stage, brokers: Sequence[Served], workers: Sequence[Worker], load: Load, *, run_id: str
) -> AsyncIterator[EmulatedRun]:
    """Open a run, queue its prompts, and connect its generators; it is closed at the end."""
    async with BrokerClient(brokers[0].address) as client:
        policy = broker_pb2.RunPolicy(token_shards=load.num_shards)
        await client.open_run(run_id, limits=_limits(load), policy=policy, policy_version=0)
        await _submit(client, run_id, load.num_groups)
        run = EmulatedRun(run_id=run_id, load=load, stage=stage, brokers=brokers, workers=workers, client=client)
        for index, worker in enumerate(workers):
            await worker.prepare(
                f"{_GENERATORS}:connect",
                brokers=[broker.address for broker in brokers],
                run_id=run_id,
                numbers=list(range(index, load.num_generators, len(workers))),
                num_slots=load.samples_each,
            )
        await asyncio.gather(*(worker.go() for worker in workers))
        yield run
        await client.close_run(run_id, drop_reason="run_complete")


def _groups_per_step(num_groups: int) -> int:
    """Two steps hold all groups, which a staleness bound of 1 admits at once."""
    return (num_groups + 1) // 2


def _limits(load: Load) -> broker_pb2.RunLimits:
    limits = broker_pb2.RunLimits(
        groups_per_step=_groups_per_step(load.num_groups),
        group_size=GROUP_SIZE,
        max_staleness=1,
        max_queued_groups=load.num_groups,
        max_completion_tokens=MAX_TOKENS,
    )
    limits.generation_lease.FromSeconds(LEASE_S)
    return limits


async def _submit(client: BrokerClient, run_id: str, num_groups: int) -> None:
    ids = int32_bytes(np.arange(NUM_PROMPT_TOKENS))
    for first in range(0, num_groups, PROMPTS_PER_CALL):
        prompts = [
            types_pb2.Prompt(
                group_id=f"g{number}",
                token_ids=ids,
                group_size=GROUP_SIZE,
                sampling=types_pb2.SamplingParams(max_new_tokens=MAX_TOKENS, temperature=1.0),
                purpose=types_pb2.PURPOSE_TRAIN,
            )
            for number in range(first, min(num_groups, first + PROMPTS_PER_CALL))
        ]
        response = await client.submit_prompts(run_id, prompts)
        if response.errors:
            raise RuntimeError(f"a prompt was refused: {response.errors[0].message}")
