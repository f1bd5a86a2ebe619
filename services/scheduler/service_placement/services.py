"""Places what a plan's services need around any search for the rest: reward workers, a critic, scorers."""

from __future__ import annotations

import math
from collections.abc import Collection

from services.scheduler.cost_model.reference import CostModel
from services.scheduler.problem.plan_document import PlanDocument
from services.scheduler.problem.problem import Problem
from services.scheduler.service_placement.critic_placement import with_critic
from services.scheduler.service_placement.every_placement import best_of_all_placements
from services.scheduler.service_placement.reward_placement import most_rewarded, with_rewards
from services.scheduler.service_placement.worker_placement import Search, gpu_rewards, scorers, with_workers
from services.scheduler.solvers.interface import Plans, Solution, TimeLeft

NOTHING = PlanDocument()


def with_services(
    model: CostModel,
    alone: Search,
    *,
    time_left: TimeLeft,
    kept: PlanDocument = NOTHING,
    critic_machines: Collection[str] | None = None,
) -> Solution:
    """The best plan found with everything that the workload's services need; without any, what the search finds.

    Args:
        model: The problem and its cost model.
        alone: Finds plans without services.
        time_left: Time left for all searches.
        kept: A plan whose services stay where they are; those that it lacks are placed.
        critic_machines: Those on which a critic may be placed; None for any.
    """

    def with_scorers(rest: CostModel, time_left: TimeLeft) -> Solution:
        return with_workers(rest, scorers(rest), alone, time_left=time_left, kept=kept.score)

    def with_values(rest: CostModel, time_left: TimeLeft) -> Solution:
        return with_critic(rest, with_scorers, time_left=time_left, kept=kept.critic, machines=critic_machines)

    return with_rewards(model, with_values, time_left=time_left, kept=kept)


def has_all_to_place(problem: Problem, kept: PlanDocument) -> bool:
    """Whether services take GPUs, and a plan has places for none of them."""
    workload = problem.workload
    takes_gpus = (
        workload.scored_task is not None
        or bool(workload.critic_tasks)
        or (workload.reward is not None and workload.reward.gpu_memory_GB > 0)
    )
    return takes_gpus and not (kept.score or kept.reward_gpus) and kept.critic is None


def with_all_placements(model: CostModel, *, time_left: TimeLeft, starts: Plans, kept: PlanDocument) -> Solution:
    """The best plan with any placement of the services that take GPUs. Raises ProblemTooLargeError.

    Args:
        model: The problem and its cost model.
        time_left: Time left for the search.
        starts: Plans to begin with.
        kept: A plan whose reward workers without GPUs stay where they are.
    """
    enough = math.inf if kept.reward else most_rewarded(model)

    def search(rest: CostModel, time_left: TimeLeft) -> Solution:
        return best_of_all_placements(rest, time_left=time_left, starts=starts, enough=enough)

    if gpu_rewards(model) is not None:
        return search(model, time_left)
    return with_rewards(model, search, time_left=time_left, kept=kept)
