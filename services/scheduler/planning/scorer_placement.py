"""Finds GPUs for scorers, around any search for the rest of a plan.

A scorer takes whole GPUs, and how many depends on the rate of everything else only. So each entry's machines are tried
for them, without those GPUs the rest is planned as ever, and the fastest plan counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from services.scheduler.cost_model.reference import CostModel, Infeasible
from services.scheduler.problem.plan_document import Scorers
from services.scheduler.problem.problem import NodeClass, Problem, TrainTask
from services.scheduler.solvers.interface import Solution, TimeLeft, part_of
from services.scheduler.solvers.scored import ordered_nodes

Search = Callable[[CostModel, TimeLeft], Solution]
"""A search for a plan without scorers."""


def with_scorers(model: CostModel, search: Search, *, time_left: TimeLeft, kept: tuple[Scorers, ...] = ()) -> Solution:
    """The best plan found with scorers on one entry's machines; without their task, what the search finds.

    Whether another plan is better is not proved, and there is no bound. Those that are `kept` stay where they are.
    """
    if model.problem.workload.scored_task is None:
        return search(model, time_left)
    if kept:
        return around(model, kept, search, time_left=time_left)
    best: Solution | None = None
    entries = [node for node in ordered_nodes(model.problem) if model.gpu_scoring_rate[node.name]]
    for index, node in enumerate(entries):
        # Room for the fewest, then for as many as keep up with what the rest reaches beside these.
        mine = part_of(time_left, 1 / (len(entries) - index))
        found = around(model, _packed(node, 1), search, time_left=part_of(mine, 1 / 2))
        wanted = math.ceil(_rest_rate(model, found) / model.gpu_scoring_rate[node.name] - 1e-9)
        sizes = dict.fromkeys(_sizes(node, wanted)) if wanted > 1 else {}
        for position, gpus in enumerate(sizes):
            other = around(model, _packed(node, gpus), search, time_left=part_of(mine, 1 / (len(sizes) - position)))
            found = max(found, other, key=lambda solution: solution.score.samples_per_second)
        if best is None or found.score.samples_per_second > best.score.samples_per_second:
            best = found
    # Where no GPU holds the scored model, the search says what else is wrong.
    return search(model, time_left) if best is None else best


def around(model: CostModel, scorers: tuple[Scorers, ...], search: Search, *, time_left: TimeLeft) -> Solution:
    """What the search finds on the GPUs that these scorers leave, with them."""
    taken = {each.node: each.gpus for each in scorers}
    rest = without(model.problem, taken, model.problem.workload.pool_tasks)
    if not rest.nodes:
        return Solution(None, Infeasible("score: scorers leave no GPU for the rest"), None, False, 0, "")
    found = search(model.over(rest), time_left)
    if found.plan is None:
        return found
    plan = found.plan.model_copy(update={"score": scorers})
    return replace(found, plan=plan, score=model.score(plan), upper_bound_samples_per_second=None, is_optimal=False)


def _rest_rate(model: CostModel, solution: Solution) -> float:
    """What a plan would reach with scorers that never limit it."""
    if solution.plan is None:
        return 0.0
    alone = model.over(without(model.problem, {}, model.problem.workload.pool_tasks))
    return alone.score(solution.plan.model_copy(update={"score": ()})).samples_per_second


def _sizes(node: NodeClass, wanted: int) -> Iterator[int]:
    """Numbers of GPUs to try: as many as are wanted, and a few more that leave machines that can be divided."""
    most = node.gpus * node.count
    yield min(wanted, most)
    rounded = 1
    while rounded < wanted:
        rounded *= 2
    yield min(rounded, most)
    yield min(math.ceil(wanted / node.gpus) * node.gpus, most)


def _packed(node: NodeClass, gpus: int) -> tuple[Scorers, ...]:
    """That many of an entry's GPUs, on its last machines."""
    found = []
    for index in reversed(range(node.count)):
        if gpus > 0:
            found.append(Scorers(node=node.machine(index), gpus=min(gpus, node.gpus)))
            gpus -= node.gpus
    return tuple(found)


def without(problem: Problem, taken: dict[str, int], tasks: tuple[TrainTask, ...]) -> Problem:
    """The problem without these GPUs of its machines, and with these tasks."""
    nodes = list[NodeClass]()
    for node in problem.nodes:
        names = [node.machine(index) for index in range(node.count)]
        for gpus in dict.fromkeys(node.gpus - taken.get(name, 0) for name in names):
            alike = tuple(name for name in names if node.gpus - taken.get(name, 0) == gpus)
            if gpus > 0:
                name = node.name if gpus == node.gpus else f"{node.name}-with-{gpus}"
                update = {"name": name, "gpus": gpus, "count": len(alike), "machines": alike}
                nodes.append(node.model_copy(update=update))
    workload = problem.workload.model_copy(update={"train_tasks": tasks})
    regions = {node.region for node in nodes}
    links = tuple(link for link in problem.links if {link.a, link.b} <= regions)
    return problem.model_copy(update={"nodes": tuple(nodes), "workload": workload, "links": links})
