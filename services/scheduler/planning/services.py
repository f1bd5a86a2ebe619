"""Places what a plan's services need around any search for the rest: reward workers, a critic, scorers."""

from __future__ import annotations

from collections.abc import Collection

from services.scheduler.cost_model.reference import CostModel
from services.scheduler.planning.critic_placement import with_critic
from services.scheduler.planning.reward_placement import with_rewards
from services.scheduler.planning.worker_placement import Search, scorers, with_workers
from services.scheduler.problem.plan_document import PlanDocument
from services.scheduler.solvers.interface import Solution, TimeLeft

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
