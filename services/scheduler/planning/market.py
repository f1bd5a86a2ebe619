"""Computes what a cluster's next dollar would buy: plans for slightly larger and smaller clusters.

Found by quick searches that start from the current plan, so that a gain is certain but may not be the largest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from services.scheduler.cost_model.reference import CostModel
from services.scheduler.problem.plan_document import PlanDocument
from services.scheduler.problem.problem import NodeClass, Problem
from services.scheduler.service_placement.services import with_services
from services.scheduler.solvers.interface import Solution, Solver, TimeLeft, infeasibility, part_of
from services.scheduler.solvers.multilevel import MultilevelSolver
from services.scheduler.solvers.partition import PartitionSolver
from services.scheduler.solvers.streamrl_allocation import StreamRlSolver

_MAX_PURCHASES = 12
"""Offers to try."""
_MAX_ALTERNATIVES = 12
_STEPS_TO_NOTHING = 8
"""An entry with more machines than this loses several at a time on the way to cheaper clusters."""
_QUICK: tuple[Solver, ...] = (StreamRlSolver(), PartitionSolver(), MultilevelSolver(max_candidates=150))


@dataclass(frozen=True, slots=True)
class Purchase:
    """GPUs to add, in one more machine."""

    num_gpus: int
    gpu: str
    region: str
    usd_per_hour: float
    """Their price."""
    samples_per_second: float
    """Throughput of the cluster with them."""
    gain: float
    """Gain over the current plan: 0.11 is eleven percent more samples per second."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """A cheaper cluster: fewer machines of some entries."""

    usd_per_hour: float
    samples_per_second: float
    machines: Mapping[str, int]
    """Number of machines kept, by entry."""
    plan: PlanDocument


def usd_per_hour(problem: Problem) -> float:
    """Price of the whole cluster: idle GPUs are paid for too."""
    return sum(node.price_per_gpu_hour * node.gpus * node.count for node in problem.nodes)


def purchases(model: CostModel, solution: Solution, *, time_left: TimeLeft, seed: int) -> list[Purchase]:
    """Offers that make the plan faster, by gain per dollar, or by gain if prices are not stated."""
    assert solution.plan is not None
    offers = list(_offers(model.problem))[:_MAX_PURCHASES]
    found = []
    for index, offer in enumerate(offers):
        if time_left() <= 0:
            break
        larger = model.problem.model_copy(update={"nodes": (*model.problem.nodes, offer)})
        better = _quickly(model.over(larger), solution.plan, part_of(time_left, 1 / (len(offers) - index)), seed)
        if better is not None and (gain := better[0] / solution.score.samples_per_second - 1) > 1e-6:
            price = offer.price_per_gpu_hour * offer.gpus
            found.append(Purchase(offer.gpus, offer.gpu, offer.region, price, better[0], gain))
    are_priced = all(offer.price_per_gpu_hour > 0 for offer in offers)
    return sorted(found, key=lambda each: -each.gain / each.usd_per_hour if are_priced else -each.gain)


def alternatives(model: CostModel, solution: Solution, *, time_left: TimeLeft, seed: int) -> list[Alternative]:
    """The front of cost and throughput from the whole cluster down, dearest first; unpriced, only the whole cluster.

    The whole cluster is not on it if fewer machines are as fast.

    Each step gives up the machines that cost least throughput for each dollar they save.
    """
    assert solution.plan is not None
    kept = {node.name: node.count for node in model.problem.nodes}
    found = [Alternative(usd_per_hour(model.problem), solution.score.samples_per_second, dict(kept), solution.plan)]
    while len(found) < _MAX_ALTERNATIVES and usd_per_hour(model.problem) > 0:
        smaller = [
            each for each in _smaller(model, found[-1], time_left, seed) if each.usd_per_hour < found[-1].usd_per_hour
        ]
        if not smaller:
            break
        found.append(min(smaller, key=lambda each: _lost_for_saved(found[-1], each)))
    return [
        each
        for each in found
        if not any(
            other.usd_per_hour < each.usd_per_hour and other.samples_per_second >= each.samples_per_second
            for other in found
        )
    ]


def _lost_for_saved(before: Alternative, after: Alternative) -> float:
    return (before.samples_per_second - after.samples_per_second) / (before.usd_per_hour - after.usd_per_hour)


def _smaller(model: CostModel, before: Alternative, time_left: TimeLeft, seed: int) -> Iterator[Alternative]:
    for node in model.problem.nodes:
        kept = before.machines[node.name] - max(1, node.count // _STEPS_TO_NOTHING)
        if kept < 0 or time_left() <= 0:
            continue
        machines = {**before.machines, node.name: kept}
        problem = _with_machines(model.problem, machines)
        if problem is None:
            continue
        found = _quickly(model.over(problem), before.plan, part_of(time_left, 1 / 4), seed)
        if found is not None:
            yield Alternative(usd_per_hour(problem), found[0], machines, found[1])


def _with_machines(problem: Problem, machines: Mapping[str, int]) -> Problem | None:
    nodes = [node.model_copy(update={"count": machines[node.name]}) for node in problem.nodes if machines[node.name]]
    regions = {node.region for node in nodes}
    links = [link for link in problem.links if link.a in regions and link.b in regions]
    return problem.model_copy(update={"nodes": tuple(nodes), "links": tuple(links)}) if nodes else None


def _offers(problem: Problem) -> Iterator[NodeClass]:
    """One more machine of each kind: whole, and with a quarter of its GPUs."""
    seen = set()
    for node in problem.nodes:
        for gpus in sorted({max(1, node.gpus // 4), node.gpus}):
            if (kind := (node.gpu, node.region, gpus)) not in seen:
                seen.add(kind)
                yield node.model_copy(update={"name": f"{node.name}-more", "gpus": gpus, "count": 1, "machines": ()})


def _quickly(
    model: CostModel, start: PlanDocument, time_left: TimeLeft, seed: int
) -> tuple[float, PlanDocument] | None:
    """Samples per second and plan, no worse than the starting one; None if nothing can run."""
    if infeasibility(model) is not None:
        return None

    def search(rest: CostModel, time_left: TimeLeft) -> Solution:
        found = _QUICK[0].solve(rest, time_left=time_left, seed=seed, starts=(start,))
        for solver in _QUICK[1:]:
            starts = (start,) if found.plan is None else (found.plan,)
            found = solver.solve(rest, time_left=time_left, seed=seed, starts=starts)
        return found

    found = with_services(model, search, time_left=time_left)
    if found.plan is None or found.score.samples_per_second <= 0:
        return None
    return found.score.samples_per_second, found.plan
