"""Finds the best simulated plan of a problem in a mode: roles by whole machines, or as the planner divides them.

Ours and every baseline go through the same search, so that each is shown in its best configuration.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from services.scheduler.cost_model.calibrated import CALIBRATED, make_model
from services.scheduler.cost_model.reference import CostModel
from services.scheduler.planning.solve import solve
from services.scheduler.problem.plan_document import PlanDocument, Replicas, TrainShare
from services.scheduler.problem.problem import NodeClass, Problem
from services.scheduler.solvers.registry import AUTO
from simulator.virtual_run.build_run import Mode, SetupError, colocated, with_staleness
from simulator.virtual_run.event_loop import Options, Run
from simulator.virtual_run.simulation import simulate_plan, simulate_setup

NUM_SIMULATED = 14
"""Plans to simulate, the best by the cost model."""
SOLVE_S = 6.0
"""CPU time that the planner's search may take for a further plan."""
_FINAL_STEPS, _SKIPPED = 9, 3

Allowed = Callable[[Sequence[NodeClass], Sequence[int]], bool]
"""Whether this many machines of each entry may train."""


def anything(nodes: Sequence[NodeClass], training: Sequence[int]) -> bool:
    """Allow every division."""
    return True


def whole_types(nodes: Sequence[NodeClass], training: Sequence[int]) -> bool:
    """Machines with the same GPU type have the same role: two groups, each of one type or several."""
    does: dict[str, set[bool]] = {}
    for node, count in zip(nodes, training, strict=True):
        if 0 < count < node.count:
            return False
        does.setdefault(node.gpu, set()).add(count > 0)
    return all(len(each) == 1 for each in does.values())


@dataclass(frozen=True, slots=True)
class Best:
    """A configuration and its results."""

    samples_per_second: float
    tokens_per_second: float
    shown: str
    """In a few words."""


def best_plan(problem: Problem, options: Options, *, allowed: Allowed = anything) -> Best:
    """The best division of machines. Raises RuntimeError if none can run."""
    model = make_model(problem, CALIBRATED)
    staleness = options.mode.staleness(problem.workload.staleness)
    judge = with_staleness(model, staleness)
    plans = sorted(_plans(model, allowed), key=lambda plan: -judge.score(plan).samples_per_second)
    found: list[tuple[Run, PlanDocument]] = []
    candidates = plans[:NUM_SIMULATED]
    if allowed is anything and (searched := _searched(judge)) is not None:
        candidates.append(searched)
    for plan in candidates:
        try:
            found.append((simulate_plan(model, plan, _final(options)), plan))
        except (SetupError, RuntimeError):
            continue
    if not found:
        raise RuntimeError(f"{problem.id}: no plan can run")
    run, plan = max(found, key=lambda each: each[0].samples_per_second)
    return _as_best(run, _shown(model, plan))


def _searched(judge: CostModel) -> PlanDocument | None:
    """The planner's own plan, which also divides machines."""
    began_s = time.process_time()
    return solve(judge, AUTO, time_left=lambda: began_s + SOLVE_S - time.process_time()).plan


def best_colocated(problem: Problem, options: Options, *, is_blind: bool = False) -> Best:
    """All machines in turn, at the best tensor-parallel degree that all can have."""
    model = make_model(problem, CALIBRATED)
    runs = []
    for tp in (None, 1, 2, 4, 8):
        try:
            setup = colocated(model, is_blind=is_blind, tp=tp)
        except SetupError:
            continue
        runs.append((simulate_setup(model, setup, _final(options)), tp))
    if not runs:
        raise RuntimeError(f"{problem.id}: colocated, nothing can run")
    run, tp = max(runs, key=lambda each: each[0].samples_per_second)
    return _as_best(run, f"all colocated, tp {tp or 'by GPU'}")


def _final(options: Options) -> Options:
    # Staler runs take longer to reach steady state.
    more = 9 if options.mode is Mode.ASYNC else 0
    return replace(options, num_steps=_FINAL_STEPS + 2 * more, skip=_SKIPPED + more)


def _as_best(run: Run, shown: str) -> Best:
    return Best(run.samples_per_second, run.tokens_per_second, shown)


def _plans(model: CostModel, allowed: Allowed) -> Iterator[PlanDocument]:
    nodes = model.problem.nodes
    counts = [range(node.count + 1) for node in nodes]
    degrees = [model.degrees[node.name] or (0,) for node in nodes]
    if len(nodes) > 1:
        # With unlike GPUs each takes its best degree; otherwise all degrees are tried.
        degrees = [(_busiest(model, node),) for node in nodes]
    for training in itertools.product(*counts):
        if not allowed(nodes, training):
            continue
        for chosen in itertools.product(*degrees):
            plan = _plan(model, training, chosen)
            if plan.gen and plan.train:
                yield plan


def _plan(model: CostModel, training: tuple[int, ...], degrees: tuple[int, ...]) -> PlanDocument:
    gen, train = list[Replicas](), list[TrainShare]()
    for node, count, tp in zip(model.problem.nodes, training, degrees, strict=True):
        for index in range(node.count):
            name = f"{node.name}-{index}"
            if index < count:
                train.append(TrainShare(node=name, gpus=node.gpus))
            elif tp:
                gen.append(Replicas(node=name, tp=tp, count=node.gpus // tp))
    pool, mesh = model.pools.arranged(train, model.nodes)
    return PlanDocument(gen=tuple(gen), train=pool, mesh=mesh)


def _busiest(model: CostModel, node: NodeClass) -> int:
    def rate(tp: int) -> float:
        state = model.replica(node, tp)
        return state.samples_per_second / tp if state is not None else 0.0

    return max(model.degrees[node.name], key=rate, default=0)


def _shown(model: CostModel, plan: PlanDocument) -> str:
    gen: Counter[str] = Counter()
    for each in plan.gen:
        gen[f"{model.nodes[each.node].gpu} generate (tp {each.tp})"] += each.tp * each.count
    train: Counter[str] = Counter()
    for share in plan.train:
        train[f"{model.nodes[share.node].gpu} train"] += share.gpus
    return ", ".join(f"{count} {does}" for does, count in (*gen.items(), *train.items()))
