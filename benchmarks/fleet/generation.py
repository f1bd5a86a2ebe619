"""Runs one step through real services: submits everything at once, and times until the last sample is decoded."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Self

from benchmarks.broker.processes import Child, Stage, free_port
from benchmarks.fleet.machines import Machine
from benchmarks.fleet.workload import MAX_NEW_TOKENS, VOCAB_SIZE, Workload
from penstock.clients.broker import BrokerClient
from penstock.v1 import broker_pb2

READY_TIMEOUT_S = 60.0
STEP_TIMEOUT_S = 900.0
POLL_S = 0.03
MAX_TRIES = 2
MAX_STALL_SHARE = 0.05
LEASE_S = 15
"""The lease that trainers request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The services around every measurement."""

    stage: Stage
    broker: str
    """The broker's address."""
    weights: str
    """The weight store's address."""
    foresee: Callable[[str, Sequence[float | None]], Awaitable[None]]
    """Called with a run and its forecasts, before the run's prompts are submitted."""
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast emulated time passes, and how often engines yield and send tokens, in real time."""

    time_scale: float
    tick_s: float
    flush_interval_s: float

    @classmethod
    def scaled(cls, time_scale: float) -> Self:
        """The rates of every emulated second, and of every five, so that scales differ in nothing else."""
        return cls(time_scale=time_scale, tick_s=1.0 / time_scale, flush_interval_s=5.0 / time_scale)


REAL_PACE = Pace(time_scale=1.0, tick_s=0.05, flush_interval_s=0.2)
"""The rates of real generators."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Result of a step."""

    wall_s: float
    generation_s: float
    """Emulated time until the last sample was decoded."""
    longest_stall_s: float
    """Longest time, in emulated seconds, that this process waited for the broker or a core: other work on the machine,
    which would be mistaken for slow dispatch."""
    is_foreseen: bool
    """Whether the scheduler answered the broker within its half second; without forecasts every policy is `fifo`."""

    @property
    def is_undisturbed(self) -> bool:
        """Whether forecasts arrived, and stalls are short compared with the step."""
        return self.is_foreseen and self.longest_stall_s <= MAX_STALL_SHARE * self.generation_s

    @property
    def trouble(self) -> str:
        """What disturbed it, in words; empty if nothing did."""
        if not self.is_foreseen:
            return ", forecasts came too late"
        return "" if self.is_undisturbed else f", held up for {self.longest_stall_s:.1f}"


class Runs:
    """Concurrently open runs, and the samples of each: one shared by all generators, or one each."""

    def __init__(self, name: str, workload: Workload, *, shares: Sequence[float], seed: int) -> None:
        self._workload = workload
        self.ids = [f"{name}-{index}" for index in range(len(shares))]
        indices = list(range(len(workload.lengths)))
        random.Random(seed).shuffle(indices)
        ends = [round(len(indices) * end / sum(shares)) for end in accumulate(shares, initial=0.0)]
        self.indices = [indices[first:last] for first, last in pairwise(ends)]

    async def open(self, client: BrokerClient, *, dispatch: str) -> None:
        """Open all runs, for one step."""
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
        """Wait until this many generators, over all runs, have loaded weights and free leases."""
        async with asyncio.timeout(READY_TIMEOUT_S):
            while True:
                views = [view for run_id in self.ids for view in (await client.get_run(run_id)).generators]
                if sum(view.num_free_leases > 0 for view in views) == num_generators:
                    return
                await asyncio.sleep(0.05)

    async def submit(self, client: BrokerClient) -> None:
        """Submit everything, in an order independent of lengths."""
        answers = await asyncio.gather(
            *(
                client.submit_prompts(run_id, self._workload.prompts(indices))
                for run_id, indices in zip(self.ids, self.indices, strict=True)
            )
        )
        errors = [error for answer in answers for error in answer.errors]
        if errors:
            raise RuntimeError(f"a prompt was refused: {errors[0].message}")

    async def are_foreseen(self, client: BrokerClient) -> bool:
        """Whether the scheduler answered the broker's latest request."""
        states = [(await client.get_run(run_id)).dispatch_state for run_id in self.ids]
        return all("forecasts of the scheduler" in state for state in states)

    async def wait_until_decoded(self, client: BrokerClient) -> float:
        """Wait until every sample has its last token; returns the longest duration of a poll, in seconds."""
        longest_s, looked_s = 0.0, time.monotonic()
        async with asyncio.timeout(STEP_TIMEOUT_S):
            for run_id, indices in zip(self.ids, self.indices, strict=True):
                while True:
                    audit = (await client.get_run(run_id)).audit
                    if audit.dropped:
                        raise RuntimeError(f"samples were dropped: {dict(audit.dropped)}")
                    if audit.in_flight_by_state["finished"] == len(indices):
                        break
                    await asyncio.sleep(POLL_S)
                    longest_s = max(longest_s, time.monotonic() - looked_s - POLL_S)
                    looked_s = time.monotonic()
        return longest_s

    async def close(self, client: BrokerClient) -> None:
        """Close all runs."""
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
        around: The services: broker, scheduler, weights.
        name: Unique among the measurements.
        machines: The fleet.
        workload: The samples.
        dispatch: A policy of the broker; or `random`, which deals the samples to the generators beforehand, at random,
            in proportion to their rates; each then takes its own in order (StreamRL's baseline, where all are alike and
            have equally many).
        forecast: Source of the scheduler's forecasts.
        pace: Speed of emulated time.
        seed: Seed of the order of submission.
    """
    is_dealt = dispatch == "random"
    shares = [machine.tokens_per_second for machine in machines] if is_dealt else [1.0]
    runs = Runs(name, workload, shares=shares, seed=seed)
    for run_id in runs.ids:
        await around.foresee(run_id, workload.forecasts[forecast])
    lengths = around.folder / f"{name}.lengths"
    workload.write_lengths(lengths)
    async with BrokerClient(around.broker) as client:
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
            is_foreseen = is_dealt or await runs.are_foreseen(client)
            stall_s = await runs.wait_until_decoded(client)
            wall_s = time.monotonic() - started_s
            await runs.close(client)
        finally:
            await process.stop()
    return Step(
        wall_s=wall_s,
        generation_s=wall_s * pace.time_scale,
        longest_stall_s=stall_s * pace.time_scale,
        is_foreseen=is_foreseen,
    )


async def measure_undisturbed(
    around: Surroundings, *, progress: Callable[[str], None], name: str, **arguments: Any
) -> Step:
    """`measure`, repeated up to MAX_TRIES times while other work disturbs it; the least disturbed result."""
    steps: list[Step] = []
    while len(steps) < MAX_TRIES:
        step = await measure(around, name=f"{name}-{len(steps)}", **arguments)
        steps.append(step)
        progress(f"{name}: {step.generation_s:.1f} emulated seconds in {step.wall_s:.1f} real ones{step.trouble}")
        if step.is_undisturbed:
            break
    return min(steps, key=lambda step: (not step.is_foreseen, step.longest_stall_s))


async def start_generators(
    around: Surroundings, *, name: str, instances: Sequence[dict[str, object]], pace: Pace
) -> Child:
    """A generator process as `penstock serve generator` starts one, with all these generators."""
    model = around.folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE}), encoding="utf-8")
    config = {
        "listen": "127.0.0.1:0" if len(instances) > 1 else f"127.0.0.1:{free_port()}",
        "generator_id": name,
        "run_id": str(instances[0]["run_id"]),
        "broker": around.broker,
        "weights": around.weights,
        "model_path": str(model),
        "cache_dir": str(around.folder / "cache"),
        "flush_interval_s": pace.flush_interval_s,
        "engine": {"engine": "emulated"},
        "instances": list(instances),
    }
    path = around.folder / f"{name}.yaml"
    path.write_text(json.dumps(config), encoding="utf-8")
    return await around.stage.start(sys.executable, "-m", "console", "serve", "generator", "--config", str(path))
