"""Finds GPUs for scorers, and for reward workers with a model, around any search for the rest of a plan.

Each takes whole GPUs, and how many depends on the rate of everything else only. So each entry's machines are tried for
them, without those GPUs the rest is planned as ever, and the fastest plan counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from services.scheduler.cost_model.reference import CostModel, Infeasible
from services.scheduler.problem.plan_document import GpuWorkers
from services.scheduler.problem.problem import NodeClass, Problem
from services.scheduler.solvers.interface import Solution, TimeLeft, is_over, part_of
from services.scheduler.solvers.scored import ordered_nodes

Search = Callable[[CostModel, TimeLeft], Solution]
"""A search for a plan without some services."""


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """Workers of one kind in one problem."""

    field: str
    """Of the plan."""
    rates: Mapping[str, float]
    """Samples per second of one, by node entry; 0 where its GPU is too small."""
    rest: Problem
    """The problem without their work."""


def scorers(model: CostModel) -> WorkerKind | None:
    """Those that compute a frozen model's log-probs; None if the workload needs none."""
    workload = model.problem.workload
    if workload.scored_task is None:
        return None
    return WorkerKind("score", model.gpu_scoring_rate, with_workload(model.problem, train_tasks=workload.pool_tasks))


def gpu_rewards(model: CostModel) -> WorkerKind | None:
    """Reward workers with a GPU each; None if the workload needs none."""
    work = model.problem.workload.reward
    if work is None or not work.gpu_memory_GB:
        return None
    rates = {
        node.name: work.samples_per_second(node.gpu) if model.reward.fits(node, 1) else 0.0
        for node in model.problem.nodes
    }
    return WorkerKind("reward_gpus", rates, with_workload(model.problem, reward=None))


def with_workers(
    model: CostModel,
    kind: WorkerKind | None,
    search: Search,
    *,
    time_left: TimeLeft,
    kept: tuple[GpuWorkers, ...] = (),
) -> Solution:
    """The best plan found with workers of a kind on one entry's machines; without any, what the search finds.

    Whether another plan is better is not proved, and there is no bound. Those that are `kept` stay where they are.
    Entries that time does not reach are left out, so that nested searches end in time on large clusters.
    """
    if kind is None:
        return search(model, time_left)
    if kept:
        return _around(model, kind, kept, search, time_left=time_left)
    best: Solution | None = None
    entries = [node for node in ordered_nodes(model.problem) if kind.rates[node.name]]
    for index, node in enumerate(entries):
        if best is not None and is_over(time_left, (best,)):
            break
        # Room for the fewest, then for as many as keep up with what the rest reaches beside these.
        mine = part_of(time_left, 1 / (len(entries) - index))
        found = _around(model, kind, packed(node, 1), search, time_left=part_of(mine, 1 / 2))
        wanted = math.ceil(_rest_rate(model, kind, found) / kind.rates[node.name] - 1e-9)
        sizes = dict.fromkeys(_sizes(node, wanted)) if wanted > 1 else {}
        for position, gpus in enumerate(sizes):
            if mine() <= 0:
                break
            share = 1 / (len(sizes) - position)
            other = _around(model, kind, packed(node, gpus), search, time_left=part_of(mine, share))
            found = max(found, other, key=lambda solution: solution.score.samples_per_second)
        if best is None or found.score.samples_per_second > best.score.samples_per_second:
            best = found
    # Where no GPU holds their model, the search says what else is wrong.
    return search(model, time_left) if best is None else best


def _around(
    model: CostModel, kind: WorkerKind, workers: tuple[GpuWorkers, ...], search: Search, *, time_left: TimeLeft
) -> Solution:
    """What the search finds on the GPUs that these workers leave, with them."""
    rest = without_gpus(kind.rest, {each.node: each.gpus for each in workers})
    if not rest.nodes:
        return nothing(f"{kind.field}: it leaves no GPU for the rest")
    found = search(model.over(rest), time_left)
    if found.plan is None:
        return found
    plan = found.plan.model_copy(update={kind.field: workers})
    return replace(found, plan=plan, score=model.score(plan), upper_bound_samples_per_second=None, is_optimal=False)


def _rest_rate(model: CostModel, kind: WorkerKind, solution: Solution) -> float:
    """What a plan would reach with workers that never limit it."""
    if solution.plan is None:
        return 0.0
    return model.over(kind.rest).score(solution.plan.model_copy(update={kind.field: ()})).samples_per_second


def _sizes(node: NodeClass, wanted: int) -> Iterator[int]:
    """Numbers of GPUs to try: as many as are wanted, and a few more that leave machines that can be divided."""
    most = node.gpus * node.count
    yield min(wanted, most)
    rounded = 1
    while rounded < wanted:
        rounded *= 2
    yield min(rounded, most)
    yield min(math.ceil(wanted / node.gpus) * node.gpus, most)


def packed(node: NodeClass, gpus: int, taken: Mapping[str, int] = MappingProxyType({})) -> tuple[GpuWorkers, ...]:
    """That many of an entry's GPUs, on its last machines; fewer where too many are `taken`, by machine."""
    found = []
    for name in map(node.machine, reversed(range(node.count))):
        here = min(gpus, node.gpus - taken.get(name, 0))
        if here > 0:
            found.append(GpuWorkers(node=name, gpus=here))
            gpus -= here
    return tuple(found)


def nothing(reason: str) -> Solution:
    """No plan, and why."""
    return Solution(None, Infeasible(reason), None, False, 0, "")


def with_workload(problem: Problem, **changed: object) -> Problem:
    """The problem with other fields of its workload."""
    return problem.model_copy(update={"workload": problem.workload.model_copy(update=changed)})


def without_gpus(problem: Problem, taken: Mapping[str, int]) -> Problem:
    """The problem without these GPUs of its machines."""
    nodes = list[NodeClass]()
    for node in problem.nodes:
        names = [node.machine(index) for index in range(node.count)]
        for gpus in dict.fromkeys(node.gpus - taken.get(name, 0) for name in names):
            alike = tuple(name for name in names if node.gpus - taken.get(name, 0) == gpus)
            if gpus > 0:
                name = node.name if gpus == node.gpus else f"{node.name}-with-{gpus}"
                update = {"name": name, "gpus": gpus, "count": len(alike), "machines": alike}
                nodes.append(node.model_copy(update=update))
    regions = {node.region for node in nodes}
    links = tuple(link for link in problem.links if {link.a, link.b} <= regions)
    return problem.model_copy(update={"nodes": tuple(nodes), "links": links})
