"""Scores plans, each once, and keeps the best: the state of every search."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from services.scheduler.cost_model.reference import CostModel, Infeasible, Limit, Score
from services.scheduler.problem.plan_document import PlanDocument
from services.scheduler.problem.problem import NodeClass, Problem
from services.scheduler.solvers.divisions import Division, Split, plan_of
from services.scheduler.solvers.interface import Solution, TimeLeft

Parts = tuple[Division, ...]
"""The use of the machines of each entry, one division per entry."""
BETTER = 1 + 1e-9
"""Ratio above which a rate is better than another, and not the same sum in another order."""


class Scored:
    """Scores plans and caches the results."""

    def __init__(
        self, model: CostModel, starts: Iterable[PlanDocument] = (), *, kept: PlanDocument | None = None
    ) -> None:
        """`starts` are scored first; all plans train as `kept` does, if there is one."""
        self._model, self._kept = model, kept
        self._known: dict[tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...], tuple[float, Limit | None]] = {}
        self.best: Parts | None = None
        self.best_rate = 0.0
        """Samples per second of the best plan."""
        self.answer: Score | Infeasible = Infeasible("no plan was found in this time")
        """Of the best, or why the first one tried cannot run."""
        self.num_evaluated = 0
        for start in starts:
            self.rate(parts_of(model, start))

    def rate(self, parts: Parts) -> float:
        """Samples per second; 0 if it cannot run."""
        return self.look_at(parts)[0]

    def look_at(self, parts: Parts) -> tuple[float, Limit | None]:
        """Samples per second and their limit; 0 and None if it cannot run."""
        has_meshes = self._model.pool_memory.is_even
        key = tuple((part.node.name, part.sums, part.trained if has_meshes else ()) for part in parts)
        if key not in self._known:
            self.num_evaluated += 1
            score = self._model.score(plan_of(self._model, parts, self._kept))
            self._known[key] = (score.samples_per_second, score.limit if isinstance(score, Score) else None)
            if score.samples_per_second > self.best_rate or self.num_evaluated == 1:
                self.answer = score
            if score.samples_per_second > self.best_rate:
                self.best, self.best_rate = parts, score.samples_per_second
        return self._known[key]

    def settle_for(self, parts: Parts) -> None:
        """Make this the best: equally fast, and preferable."""
        self.best, self.answer = parts, self._model.score(plan_of(self._model, parts, self._kept))

    def solution(self, solver: str, *, bound: float | None = None, is_optimal: bool = False) -> Solution:
        """The best so far as a solver's result."""
        plan = plan_of(self._model, self.best, self._kept) if self.best is not None else None
        return Solution(plan, self.answer, bound, is_optimal and plan is not None, self.num_evaluated, solver)


def climb(scored: Scored, parts: Parts, neighbours: Callable[[Parts], Iterator[Parts]], *, time_left: TimeLeft) -> None:
    """Move to the first better neighbour until there is none, or no time."""
    rate = scored.rate(parts)
    is_better = True
    while is_better:
        is_better = False
        for neighbour in neighbours(parts):
            if time_left() <= 0:
                return
            if (found := scored.rate(neighbour)) > rate * BETTER:
                parts, rate, is_better = neighbour, found, True
                break


def with_part(parts: Parts, index: int, part: Division) -> Parts:
    """The plan with another division of one entry."""
    return (*parts[:index], part, *parts[index + 1 :])


def homes_of(problem: Problem) -> list[frozenset[str]]:
    """Training sites: each region alone, and all regions if pools may span them."""
    regions = list(dict.fromkeys(node.region for node in ordered_nodes(problem)))
    homes = [frozenset((region,)) for region in regions]
    if len(regions) > 1 and not problem.constraints.train_single_region:
        homes.append(frozenset(regions))
    return homes


def parts_of(model: CostModel, plan: PlanDocument) -> Parts:
    """The plan on this problem's machines; unnamed machines idle, and what does not fit is left out."""
    parts = []
    for node in ordered_nodes(model.problem):
        splits = [_split_of(model, node, node.machine(index), plan) for index in range(node.count)]
        parts.append(Division(node, tuple(splits)))
    return tuple(parts)


def _split_of(model: CostModel, node: NodeClass, machine: str, plan: PlanDocument) -> Split:
    degrees = model.degrees[node.name]
    free = node.gpus
    train_gpus = min(free, sum(share.gpus for share in plan.train if share.node == machine))
    free -= train_gpus
    replicas = [0] * len(degrees)
    for each in plan.gen:
        gpus = each.layout.gpus
        if each.node == machine and gpus in degrees:
            count = min(each.count, free // gpus)
            replicas[degrees.index(gpus)] += count
            free -= count * gpus
    return Split(tuple(replicas), train_gpus)


def ordered_nodes(problem: Problem) -> list[NodeClass]:
    """The machines' entries in an order independent of their names and their order in the file.

    Random searches visit entries in this order, so that renaming or reordering changes nothing.
    """
    alike = {node.name: _character(problem, node) for node in problem.nodes}
    regions = {
        region: sorted(alike[node.name] for node in problem.nodes if node.region == region)
        for region in {node.region for node in problem.nodes}
    }
    links = {
        region: sorted((link.bw_Gbps, link.latency_ms) for link in problem.links if region in (link.a, link.b))
        for region in regions
    }
    return sorted(
        problem.nodes, key=lambda node: (alike[node.name], regions[node.region], links[node.region], node.name)
    )


def _character(problem: Problem, node: NodeClass) -> tuple[float, ...]:
    gpu = problem.gpu_types[node.gpu]
    return (
        gpu.tflops_bf16,
        gpu.hbm_GB,
        gpu.hbm_GBps,
        gpu.ar_bus_GBps,
        gpu.ar_latency_us,
        problem.cost_model.mfu(node.gpu, "train"),
        problem.cost_model.mfu(node.gpu, "infer"),
        node.gpus,
        node.count,
        node.nic_Gbps,
        node.price_per_gpu_hour,
    )
