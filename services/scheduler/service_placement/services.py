"""Places what a plan's services need around any search for the rest: reward workers, a critic, scorers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from services.scheduler.cost_model.reference import CostModel
from services.scheduler.problem.plan_document import PlanDocument
from services.scheduler.problem.problem import Problem
from services.scheduler.service_placement.critic_placement import with_critic
from services.scheduler.service_placement.every_placement import best_of_all_placements
from services.scheduler.service_placement.relaxed_placement import RelaxedPlacement
from services.scheduler.service_placement.reward_placement import most_rewarded, with_rewards
from services.scheduler.service_placement.worker_placement import Search, gpu_rewards, scorers, with_workers
from services.scheduler.solvers.interface import Plans, Solution, TimeLeft, is_over, part_of

NOTHING = PlanDocument()
Propose = Callable[[TimeLeft], Sequence[PlanDocument]]
"""Places of all services, the best first."""
_PROPOSED_SHARE = 0.25
"""Share of the time for proposing places of services."""
_PLACED = ("score", "reward_gpus", "critic")
"""What takes GPUs for services."""


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


def with_places(
    model: CostModel,
    alone: Search,
    *,
    time_left: TimeLeft,
    kept: PlanDocument,
    critic_machines: Collection[str] | None,
    propose: Propose,
) -> Solution:
    """The best plan around proposed places of all services, and of those found one by one with what time is left.

    `propose` has the places for the time that it is given; other arguments as in `with_services`.
    """
    proposals = propose(part_of(time_left, _PROPOSED_SHARE))
    num_evaluated, best = 0, None
    for index, places in enumerate((*proposals, None)):
        mine = part_of(time_left, 1 / (len(proposals) + 1 - index))
        update = (
            {} if places is None else {field: getattr(places, field) for field in ("score", "reward_gpus", "critic")}
        )
        stays = kept.model_copy(update=update)
        if best is not None and is_over(time_left, (best,)):
            break
        found = with_services(model, alone, time_left=mine, kept=stays, critic_machines=critic_machines)
        num_evaluated += found.num_evaluated
        if best is None or found.score.samples_per_second > best.score.samples_per_second:
            best = found
    assert best is not None, "the last turn proposes nothing"
    return replace(best, num_evaluated=num_evaluated)


def proposals_once(model: CostModel, critic_machines: Collection[str] | None) -> Propose:
    """Proposes places of all services, the same to all who ask: of any solver they are the best of linear programs."""
    found: list[Sequence[PlanDocument]] = []

    def propose(time_left: TimeLeft) -> Sequence[PlanDocument]:
        if not found:
            found.append(RelaxedPlacement(model).proposals(critic_machines, time_left=time_left))
        return found[0]

    return propose


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
