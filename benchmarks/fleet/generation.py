"""One step through real services: submit everything at once, and see when the last sample is decoded."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from benchmarks.broker.processes import Child, Stage, free_port
from benchmarks.fleet.machines import Machine
from benchmarks.fleet.services import ToldScheduler
from benchmarks.fleet.workload import MAX_NEW_TOKENS, Workload, prompts
from penstock.clients.broker import BrokerClient
from penstock.v1 import broker_pb2

READY_TIMEOUT_S = 60.0
STEP_TIMEOUT_S = 900.0
POLL_S = 0.03
LEASE_S = 15
"""As trainers ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What every measurement stands on."""

    stage: Stage
    scheduler: ToldScheduler
    address: str
    """Of scheduler and weights."""
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast pretended time passes, and how often real messages are sent."""

    time_scale: float
    tick_s: float = 0.05
    flush_interval_s: float = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a step took."""

    wall_s: float
    generation_s: float
    """Pretended time until the last sample was decoded."""


class Runs:
    """Runs that are open together, and the samples of each: one shared by all generators, or one each."""

    def __init__(self, name: str, workload: Workload, *, shares: Sequence[float], seed: int) -> None:
        self.ids = [f"{name}-{index}" for index in range(len(shares))]
        indices = list(range(len(workload.lengths)))
        random.Random(seed).shuffle(indices)
        ends = [round(len(indices) * end / sum(shares)) for end in accumulate(shares, initial=0.0)]
        self.indices = [indices[first:last] for first, last in pairwise(ends)]

    async def open(self, client: BrokerClient, *, dispatch: str) -> None:
        """Open them all, for one step."""
        for run_id, indices in zip(self.ids, self.indices, strict=True):
            limits = broker_pb2.RunLimits(
                groups_per_step=len(indices),
                group_size=1,
                max_staleness=0,
                max_queued_groups=len(indices),
                max_completion_tokens=MAX_NEW_TOKENS,
            )
            limits.generation_lease.FromSeconds(LEASE_S)
            policy = broker_pb2.RunPolicy(dispatch=dispatch)
            await client.open_run(run_id, limits=limits, policy_version=0, policy=policy)

    async def wait_for_generators(self, client: BrokerClient, *, num_generators: int) -> None:
        """Until so many, over all runs, hold weights and have room."""
        async with asyncio.timeout(READY_TIMEOUT_S):
            while True:
                views = [view for run_id in self.ids for view in (await client.get_run(run_id)).generators]
                if sum(view.num_free_leases > 0 for view in views) == num_generators:
                    return
                await asyncio.sleep(0.05)

    async def submit(self, client: BrokerClient) -> None:
        """Everything, in an order that says nothing of lengths."""
        answers = await asyncio.gather(
            *(
                client.submit_prompts(run_id, prompts(indices))
                for run_id, indices in zip(self.ids, self.indices, strict=True)
            )
        )
        errors = [error for answer in answers for error in answer.errors]
        if errors:
            raise RuntimeError(f"a prompt was refused: {errors[0].message}")

    async def wait_until_decoded(self, client: BrokerClient) -> None:
        """Until every sample has its last token."""
        async with asyncio.timeout(STEP_TIMEOUT_S):
            for run_id, indices in zip(self.ids, self.indices, strict=True):
                while True:
                    audit = (await client.get_run(run_id)).audit
                    if audit.dropped:
                        raise RuntimeError(f"samples were dropped: {dict(audit.dropped)}")
                    if audit.in_flight_by_state["finished"] == len(indices):
                        break
                    await asyncio.sleep(POLL_S)

    async def close(self, client: BrokerClient) -> None:
        """Close them all."""
        for run_id in self.ids:
            await client.close_run(run_id)


async def measure(
    around: Surroundings,
    *,
    name: str,
    machines: Sequence[Machine],
    workload: Workload,
    dispatch: str,
    forecast: str,
    pace: Pace,
    seed: int,
) -> Step:
    """Time one step.

    Args:
        around: Broker, scheduler, weights.
        name: Unique among the measurements.
        machines: The fleet.
        workload: The samples.
        dispatch: A policy of the broker; or `random`, which deals the samples to the generators beforehand, at random,
            as many as their rates bear, each of which then takes its own in order (StreamRL's baseline, where all
            are alike and have as many).
        forecast: Whose forecasts the scheduler gives.
        pace: How fast.
        seed: Of the order of submission.
    """
    is_dealt = dispatch == "random"
    shares = [machine.tokens_per_second for machine in machines] if is_dealt else [1.0]
    runs = Runs(name, workload, shares=shares, seed=seed)
    for run_id in runs.ids:
        around.scheduler.tell(run_id, workload.forecasts[forecast])
    lengths = around.folder / f"{name}.lengths"
    workload.write_lengths(lengths)
    async with BrokerClient(around.stage.brokers[0][1]) as client:
        await runs.open(client, dispatch="fifo" if is_dealt else dispatch)
        run_ids = runs.ids if is_dealt else runs.ids * len(machines)
        instances = [
            machine.instance(run_id=run_id, lengths=lengths, time_scale=pace.time_scale, tick_s=pace.tick_s)
            for machine, run_id in zip(machines, run_ids, strict=True)
        ]
        process = await start_generators(around, name=name, instances=instances, pace=pace)
        try:
            await runs.wait_for_generators(client, num_generators=len(machines))
            started_s = time.monotonic()
            await runs.submit(client)
            await runs.wait_until_decoded(client)
            wall_s = time.monotonic() - started_s
            await runs.close(client)
        finally:
            await process.stop()
    return Step(wall_s=wall_s, generation_s=wall_s * pace.time_scale)


async def start_generators(
    around: Surroundings, *, name: str, instances: Sequence[dict[str, object]], pace: Pace
) -> Child:
    """A generator process as `penstock serve generator` starts one, with all these generators."""
    (around.folder / "model").mkdir(exist_ok=True)
    config = {
        "listen": "127.0.0.1:0" if len(instances) > 1 else f"127.0.0.1:{free_port()}",
        "generator_id": name,
        "run_id": str(instances[0]["run_id"]),
        "broker": around.stage.brokers[0][1],
        "weights": around.address,
        "model_path": str(around.folder / "model"),
        "cache_dir": str(around.folder / "cache"),
        "flush_interval_s": pace.flush_interval_s,
        "engine": {"engine": "emulated"},
        "instances": list(instances),
    }
    path = around.folder / f"{name}.yaml"
    path.write_text(json.dumps(config), encoding="utf-8")
    return await around.stage.start(sys.executable, "-m", "console", "serve", "generator", "--config", str(path))
