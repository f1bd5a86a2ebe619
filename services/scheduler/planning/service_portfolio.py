"""Runs the portfolio where services are placed as well: each member's whole search in turn, then all around the best.

Searches for services are nested: each place that is tried takes a search for the rest. With the portfolio as that
inner search, its members share every one of these moments, and one that ends by itself at once would find alone what
they do not. So each member first has a turn with the places of all services. In what is left, the portfolio plans the
rest beside the services of the best plan, from that plan on. The result is never worse than what a member finds in its
turn; with time for the turns of those that end by themselves, never worse than these at all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from services.scheduler.cost_model.reference import CostModel
from services.scheduler.planning.services import with_services
from services.scheduler.planning.worker_placement import Search
from services.scheduler.problem.plan_document import PlanDocument
from services.scheduler.problem.problem import Problem
from services.scheduler.solvers.interface import Plans, ProblemTooLargeError, Solution, TimeLeft, part_of
from services.scheduler.solvers.registry import AUTO

_TURNS = {"partition": 0.5, "exhaustive": 0.5, "streamrl": 0.4, "multilevel": 0.4, "milp": 0.4, AUTO: 1.0}
"""Members by turns, each with its share of the time left: first those that end by themselves soon, of these first those
that judge a place best."""

MakeSearch = Callable[[str, Plans], Search]
"""The search of a named solver that begins with plans."""


def is_nested(problem: Problem, kept: PlanDocument) -> bool:
    """Whether places of services are searched for: those that take GPUs, and that `kept` does not have."""
    workload = problem.workload
    takes_gpus = workload.reward is not None and workload.reward.gpu_memory_GB > 0
    return (
        (workload.scored_task is not None and not kept.score)
        or (bool(workload.critic_tasks) and kept.critic is None)
        or (takes_gpus and not kept.reward_gpus)
    )


def solve_with_services(
    model: CostModel,
    make_search: MakeSearch,
    *,
    time_left: TimeLeft,
    starts: Plans,
    kept: PlanDocument,
    critic_machines: Collection[str] | None = None,
) -> Solution:
    """The best plan of all turns.

    Args:
        model: The problem and its cost model.
        make_search: Makes the search of each member.
        time_left: Time left for all turns.
        starts: Plans that the first turn begins with, each further one with the best so far.
        kept: A plan whose services stay where they are.
        critic_machines: Those on which a critic may be placed that `kept` lacks; None for any.
    """
    best: Solution | None = None
    num_evaluated = 0
    for name, share in _TURNS.items():
        if best is not None and time_left() <= 0:
            break
        begins = starts if best is None or best.plan is None else (best.plan,)
        stays = kept if name != AUTO or best is None or best.plan is None else _with_services_of(kept, best.plan)
        try:
            found = with_services(
                model,
                make_search(name, begins),
                time_left=part_of(time_left, share),
                kept=stays,
                critic_machines=critic_machines,
            )
        except ProblemTooLargeError:
            continue
        num_evaluated += found.num_evaluated
        if best is None or found.score.samples_per_second > best.score.samples_per_second:
            best = found
    assert best is not None, "a member treats problems of any size"
    return replace(best, solver=AUTO, num_evaluated=num_evaluated)


def _with_services_of(kept: PlanDocument, plan: PlanDocument) -> PlanDocument:
    """What stays, with the services of a plan on GPUs of their own: those beside a trainer depend on where it is."""
    critic = plan.critic if plan.critic is not None and not plan.critic.is_beside_trainer else kept.critic
    return kept.model_copy(update={"score": plan.score, "reward_gpus": plan.reward_gpus, "critic": critic})
