"""Simulates a plan: takes a problem, a plan and a mode, and reports the outcome."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.v1 import broker_pb2
from services.broker.fleet.snapshot import MAX_GROUPS_MEASURED, SeenLengths, lengths_seen
from services.broker.rules.limits import Limits
from services.scheduler.cost_model.reference import CostModel
from services.scheduler.problem.plan_document import PlanDocument
from services.scheduler.problem.workload import Workload
from services.scheduler.solvers.interface import TimeLeft
from simulator.virtual_run.build_run import Mode, Setup, SetupError, colocated, from_plan
from simulator.virtual_run.drawn_lengths import forecaster, group_source
from simulator.virtual_run.event_loop import Options, Run
from simulator.virtual_run.ledger import Ledger

STEADY_SAMPLES = 16_384
STEADY_STEPS = (8, 48)
"""Least and most steps of a reliable rate: steps that wait for a long sample alternate with others."""
MAX_PLACED = 16
"""Most generators whose placing is simulated for a plan: each one looks at all others."""


def simulate_plan(
    model: CostModel, plan: PlanDocument, options: Options, *, time_left: TimeLeft = lambda: math.inf
) -> Run:
    """A run of this plan. Raises SetupError if it cannot run, RuntimeError if it gets stuck."""
    is_colocated = options.mode is Mode.COLOCATED_SYNC
    setup = colocated(model) if is_colocated else from_plan(model, plan, options.mode)
    return simulate_setup(model, setup, options, time_left=time_left)


def steady_rate(model: CostModel, plan: PlanDocument, *, time_left: TimeLeft, seed: int = 0) -> float | None:
    """Samples per second that a run of this plan reaches, `async`; None if it gets stuck, or time is too short.

    Runs dispatch by `auto`, which keeps the longest samples from slow generators where that pays: so for a fleet small
    enough to try both, the better rate counts. The first steps, in which the staleness bound lets nothing wait yet, are
    left out. Sessions with an environment wait in no simulation, so a run of them gets None.
    """
    if model.problem.workload.environment is not None:
        return None
    least, most = STEADY_STEPS
    skip = model.problem.workload.staleness + 3
    num_counted = min(most, max(least, math.ceil(STEADY_SAMPLES / model.demand.samples_per_step)))
    options = Options(mode=Mode.ASYNC, num_steps=skip + num_counted, skip=skip, seed=seed)
    num_generators = sum(replicas.count for replicas in plan.gen)
    found: list[float] = []
    for places in (False, True) if num_generators <= MAX_PLACED else (False,):
        try:
            run = simulate_plan(model, plan, replace(options, places=places), time_left=time_left)
        except (SetupError, RuntimeError):
            continue
        if len(run.record.steps) >= skip + least:
            found.append(run.samples_per_second)
    return max(found, default=None)


def simulate_setup(model: CostModel, setup: Setup, options: Options, *, time_left: TimeLeft = lambda: math.inf) -> Run:
    """A run of these generators and this trainer. Raises RuntimeError if it gets stuck.

    If time ends before the last step, the run ends there.
    """
    workload = model.problem.workload
    limits = Limits.from_proto(
        broker_pb2.RunLimits(
            groups_per_step=workload.prompts_per_step,
            group_size=workload.group_size,
            max_staleness=setup.staleness,
            max_completion_tokens=1 << 20,
        )
    )
    draw = group_source(workload, seed=options.seed, growth_per_step=options.growth_per_step)
    forecast = forecaster(options.seed) if options.longest_first else None
    ledger = Ledger(limits, draw, forecast)
    run = Run(setup, ledger, options, seen=_seen_before(workload, options) if options.can_move else None)
    run.play(time_left=time_left)
    return run


def _seen_before(workload: Workload, options: Options) -> SeenLengths:
    """What a broker learned from previous steps."""
    seed = options.seed + 1
    draw, forecast = group_source(workload, seed=seed), forecaster(seed)
    groups = [draw(0) for _ in range(MAX_GROUPS_MEASURED)]
    return lengths_seen([(forecast(group) if options.longest_first else 0.0, group) for group in groups])


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationReport:
    """A simulated run, as its JSON shows it; docs/planning.md describes the keys."""

    problem: str
    cost_model: str
    mode: str
    num_steps: int
    num_skipped: int
    num_generators: int
    num_events: int
    virtual_s: float
    samples_per_second: float
    tokens_per_second: float
    step_s: float
    predicted_samples_per_second: float | None
    generation_idle: float
    training_idle: float
    max_staleness: int
    staleness: Mapping[int, int]
    """Samples trained on, by age."""
    num_returned: int
    num_moves: int
    audit: Mapping[str, int]
    cpu_s: float


def report_of(model: CostModel, run: Run, *, predicted: float | None, cpu_s: float = 0.0) -> SimulationReport:
    """The report; `predicted` is the cost model's expectation, None if it has none for the mode."""
    record, ledger, skip = run.record, run.ledger, run.options.skip
    size = model.problem.workload.group_size
    end_s = record.steps[-1].end_s
    trained_s = sum(step.busy_s for step in record.steps[skip:])
    return SimulationReport(
        problem=model.problem.id,
        cost_model=model.name,
        mode=run.options.mode.value,
        num_steps=len(record.steps),
        num_skipped=skip,
        num_generators=record.num_generators,
        num_events=record.num_events,
        virtual_s=end_s,
        samples_per_second=run.samples_per_second,
        tokens_per_second=run.tokens_per_second,
        step_s=run.counted_s / (len(record.steps) - skip),
        predicted_samples_per_second=predicted,
        generation_idle=max(0.0, 1 - record.generating_s / (end_s * record.num_generators)),
        training_idle=max(0.0, 1 - trained_s / run.counted_s),
        max_staleness=run.setup.staleness,
        staleness={age: count * size for age, count in sorted(ledger.staleness.items())},
        num_returned=ledger.num_returned,
        num_moves=record.num_moves,
        audit=ledger.audit(),
        cpu_s=cpu_s,
    )
