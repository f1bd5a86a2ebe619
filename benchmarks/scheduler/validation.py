"""Validates the simulator: the same samples through real services and through both simulators.

penstock bench scheduler.validation [--only WORD] [--samples N] [--length-scale X] [--time-scale X]

Real: Redis, a broker and eight emulated GPUs in real time, from submission to the last token (`benchmarks/fleet`).
`dispatch` is `benchmarks/dispatch`, which runs the broker's dispatch policies and moves; `run` is
`simulator/virtual_run`, which serves in order of arrival or longest forecast first, places as `lpt` does and moves
running samples. Both simulate real seconds, since the broker's own times do not scale with emulated ones. Needs an
otherwise idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.dispatch.emulated_fleet import EmulatedGenerator
from benchmarks.dispatch.queue_simulation import Scenario, simulate
from benchmarks.fleet.generation import Pace, measure_undisturbed
from benchmarks.fleet.machines import Machine, machines
from benchmarks.fleet.surroundings import staged
from benchmarks.fleet.workload import NUM_PROMPT_TOKENS, Workload, make_workload
from penstock.batching.step_times import STREAMRL_TABLE, TableSteps
from penstock.v1 import broker_pb2
from services.broker.dispatch.latency import DEFAULT_BASE_S, DEFAULT_PER_SAMPLE_S, LatencyModel
from services.broker.fleet.snapshot import lengths_seen
from services.broker.rules.limits import Limits
from simulator.virtual_run.build_run import Mode, Setup, TrainerSpec
from simulator.virtual_run.event_loop import Options, Run
from simulator.virtual_run.ledger import Ledger
from simulator.virtual_run.virtual_generator import GeneratorSpec

SEED = 0


@dataclass(frozen=True, slots=True)
class Case:
    """One scenario."""

    fleet: str
    regime: str
    dispatch: str
    forecast: str

    @property
    def name(self) -> str:
        """Its name."""
        return f"{self.fleet}, {self.regime}, {self.dispatch}, {self.forecast}"


CASES = (
    Case("alike", "kv_limited", "fifo", "none"),
    Case("unlike", "kv_limited", "fifo", "none"),
    Case("alike", "kv_limited", "lpt", "ranker"),
    Case("unlike", "kv_limited", "lpt", "oracle"),
    Case("unlike", "kv_limited", "lpt", "ranker"),
    Case("alike", "roomy", "streamrl", "oracle"),
    Case("unlike", "roomy", "lpt", "ranker"),
)


def main() -> int:
    """Measure, simulate, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run only scenarios whose name contains this")
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--length-scale", type=float, default=1.0, help="factor on StreamRL's lengths")
    parser.add_argument("--time-scale", type=float, default=10.0, help="emulated seconds per real second")
    parser.add_argument("--redis", type=Path, default=shutil.which("redis-server"), help="path of redis-server")
    options = parser.parse_args()
    if options.redis is None:
        parser.error("no redis-server is on the PATH; name one with --redis")
    cases = [case for case in CASES if options.only in case.name]
    workload = make_workload(num_samples=options.samples, scale=options.length_scale, seed=SEED)
    print("| scenario | real | dispatch | run |\n|---|---|---|---|")
    asyncio.run(_compare(cases, workload, options.time_scale, Path(options.redis)))
    return 0


async def _compare(cases: Sequence[Case], workload: Workload, time_scale: float, redis_server: Path) -> None:
    async with staged(redis_server) as around:
        for number, case in enumerate(cases):
            step = await measure_undisturbed(
                around,
                progress=lambda text: print(text, file=sys.stderr, flush=True),
                name=f"case{number}",
                machines=machines(case.fleet, case.regime),
                workload=workload,
                dispatch=case.dispatch,
                forecast=case.forecast,
                pace=Pace.scaled(time_scale),
                seed=SEED,
            )
            real_s = step.generation_s
            found = (_dispatched(case, workload, time_scale), _run(case, workload, time_scale))
            told = " | ".join(f"{each:.1f} s ({each / real_s:.2f})" for each in found)
            print(f"| {case.name} | {real_s:.1f} s | {told} |", flush=True)


def _dispatched(case: Case, workload: Workload, time_scale: float) -> float:
    """Emulated seconds until the last token, by the simulator of dispatch."""
    order = _order(workload)
    forecasts = workload.forecasts[case.forecast]
    scenario = Scenario(
        name=case.name,
        generators=[
            EmulatedGenerator(generator_id=f"g{index}", model=_latency(machine).scaled(1 / time_scale))
            for index, machine in enumerate(machines(case.fleet, case.regime))
        ],
        lengths=[[workload.lengths[index]] for index in order],
        forecasts=[forecasts[index] for index in order],
        num_prompt_tokens=NUM_PROMPT_TOKENS,
    )
    return simulate(scenario, case.dispatch).makespan_s * time_scale


def _run(case: Case, workload: Workload, time_scale: float) -> float:
    """The same by the simulator of runs: one step, no training."""
    specs = [
        GeneratorSpec(
            name=f"g{index}",
            node=f"g{index}",
            region="r",
            steps_s=_steps(machine, time_scale),
            prefill_s=0.0,
            pause_s=0.0,
        )
        for index, machine in enumerate(machines(case.fleet, case.regime))
    ]
    order, forecasts = _order(workload), workload.forecasts[case.forecast]
    indices = iter(order)
    waiting: list[float] = []

    def draw(_version: int) -> list[float]:
        index = next(indices)
        waiting.append(forecasts[index] or 0.0)
        return [float(workload.lengths[index])]

    limits = Limits.from_proto(
        broker_pb2.RunLimits(groups_per_step=len(order), group_size=1, max_completion_tokens=1 << 20)
    )
    ledger = Ledger(limits, draw, None if case.dispatch == "fifo" else lambda _lengths: waiting[-1])
    trainer = TrainerSpec(sample_s=0.0, mean_tokens=1.0, prompt_tokens=NUM_PROMPT_TOKENS, end_s=0.0)
    setup = Setup(generators=tuple(specs), trainer=trainer, transfer_s={}, staleness=0)
    seen = lengths_seen([(forecasts[index] or 0.0, [workload.lengths[index]]) for index in order])
    options = Options(mode=Mode.DISAGGREGATED_SYNC, num_steps=1, places=case.dispatch == "lpt")
    return Run(setup, ledger, options, seen=seen).play().steps[0].end_s * time_scale


def _order(workload: Workload) -> list[int]:
    """Prompts in the order in which `benchmarks.fleet` submits them."""
    order = list(range(len(workload.lengths)))
    random.Random(SEED).shuffle(order)
    return order


def _steps(machine: Machine, time_scale: float) -> tuple[float, ...]:
    times = TableSteps(table=STREAMRL_TABLE, slowdown=machine.slowdown / time_scale)
    return (0.0, *(times.step_s(count, 0.0) for count in range(1, machine.max_samples + 1)))


def _latency(machine: Machine) -> LatencyModel:
    """The straight line through StreamRL's table that brokers assume."""
    line = LatencyModel(base_s=DEFAULT_BASE_S, per_sample_s=DEFAULT_PER_SAMPLE_S, max_samples=machine.max_samples)
    return line.scaled(machine.slowdown)


if __name__ == "__main__":
    sys.exit(main())
