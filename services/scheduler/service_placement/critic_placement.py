"""Finds the place of a critic of its own, around any search for the rest of a plan.

    on its own GPUs      for each entry 1, 2, 4, ... of a machine's, as long as the critic is what limits; the rest is
                         planned without these
    beside the trainer   the rest is planned as if the pool computed the critic's tasks, then each machine of that pool
                         is tried

The fastest plan counts. Which places are tried depends on nothing but the rates found and the time left, and a faster
search tries no fewer of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from services.scheduler.cost_model.reference import CostModel, Limit, Score
from services.scheduler.problem.plan_document import CriticPlace, PlanDocument
from services.scheduler.problem.problem import NodeClass
from services.scheduler.problem.workload import TrainTask
from services.scheduler.service_placement.worker_placement import Search, nothing, with_workload, without_gpus
from services.scheduler.solvers.interface import Solution, TimeLeft, is_over, part_of
from services.scheduler.solvers.scored import ordered_nodes


def with_critic(
    model: CostModel,
    search: Search,
    *,
    time_left: TimeLeft,
    kept: CriticPlace | None,
    machines: Collection[str] | None = None,
) -> Solution:
    """The best plan found with a critic; what the search finds if the workload has none.

    Args:
        model: The problem and its cost model.
        search: Finds the rest of a plan.
        time_left: Time left for all searches.
        kept: The place that it keeps; None if it is to be placed.
        machines: Those on which it may be placed; None for any.
    """
    if not model.problem.workload.critic_tasks:
        return search(model, time_left)
    if kept is not None:
        return _at(model, kept, search, time_left=time_left)
    allowed = frozenset(model.nodes if machines is None else machines)
    found = list[Solution]()
    fitting = [node for node in ordered_nodes(model.problem) if model.critic.fits(node, node.gpus)]
    entries = [(node, name) for node in fitting if (name := _last(node, allowed)) is not None]
    for index, (node, name) in enumerate(entries):
        if found and is_over(time_left, found):
            break
        share = 1 / (len(entries) - index + 1)
        found += _on_own_gpus(model, node, name, search, time_left=part_of(time_left, share))
    if not (found and is_over(time_left, found)):
        found.append(_beside_trainer(model, search, allowed, time_left=time_left))
    return max(found, key=lambda solution: solution.score.samples_per_second)


def _last(node: NodeClass, allowed: Collection[str]) -> str | None:
    """The last machine of an entry that may have the critic."""
    names = map(node.machine, reversed(range(node.count)))
    return next((name for name in names if name in allowed), None)


def _on_own_gpus(
    model: CostModel, node: NodeClass, name: str, search: Search, *, time_left: TimeLeft
) -> Iterator[Solution]:
    """Plans with a critic on a machine of an entry, on more of its GPUs as long as it limits."""
    sizes = [gpus for gpus in _sizes(node) if model.critic.fits(node, gpus)]
    for index, gpus in enumerate(sizes):
        place = CriticPlace(node=name, gpus=gpus)
        solution = _at(model, place, search, time_left=part_of(time_left, 1 / (len(sizes) - index)))
        yield solution
        is_limited = isinstance(solution.score, Score) and solution.score.limit is Limit.CRITIC
        if not is_limited or time_left() <= 0:
            return


def _sizes(node: NodeClass) -> Iterator[int]:
    """Powers of two below the machine's GPUs, and these."""
    gpus = 1
    while gpus < node.gpus:
        yield gpus
        gpus *= 2
    yield node.gpus


def _beside_trainer(model: CostModel, search: Search, allowed: Collection[str], *, time_left: TimeLeft) -> Solution:
    """The best plan with the critic on the GPUs of one allowed machine that train."""
    pooled = [task.model_copy(update={"is_service": False}) for task in model.problem.workload.critic_tasks]
    tasks = _others(model)
    rest = with_workload(model.problem, train_tasks=(*tasks, *pooled))
    found = search(model.over(rest), time_left)
    if found.plan is None:
        return found
    places = [
        CriticPlace(node=share.node, gpus=share.gpus, is_beside_trainer=True)
        for share in found.plan.train
        if share.node in allowed
    ]
    return max(
        (_placed(model, found, found.plan, place) for place in places),
        key=lambda solution: solution.score.samples_per_second,
        default=nothing("critic: none of the machines that train may have it"),
    )


def _at(model: CostModel, place: CriticPlace, search: Search, *, time_left: TimeLeft) -> Solution:
    """What the search finds beside a critic there."""
    if place.node not in model.nodes:
        return nothing(f"critic.node: there is no machine {place.node!r}, which has the critic's steps; bring it back")
    taken = {} if place.is_beside_trainer else {place.node: place.gpus}
    rest = without_gpus(with_workload(model.problem, train_tasks=_others(model)), taken)
    if not rest.nodes:
        return nothing("critic: it leaves no GPU for the rest")
    found = search(model.over(rest), time_left)
    return found if found.plan is None else _placed(model, found, found.plan, place)


def _others(model: CostModel) -> tuple[TrainTask, ...]:
    """Tasks that are not the critic's."""
    return tuple(task for task in model.problem.workload.train_tasks if not task.is_critics)


def _placed(model: CostModel, solution: Solution, plan: PlanDocument, place: CriticPlace) -> Solution:
    """The solution with a critic there; none if it has no room."""
    plan = plan.model_copy(update={"critic": place})
    score = model.score(plan)
    kept = plan if isinstance(score, Score) else None
    return replace(solution, plan=kept, score=score, upper_bound_samples_per_second=None, is_optimal=False)
