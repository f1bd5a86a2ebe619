"""Runs the portfolio `auto`: every member alone for its share of the time, then on from the best of their plans.

A member's turn is what it would do if it were called by its name for that long: with the same seed, from the same
plans, with all places of services, checked alike. So `auto` is never worse than any member with its share of the time,
nor than one that ends by itself within it; and where exhaustive search proves its plan, which is first, than any at
all. What members leave is for exhaustive search from the best plan, and for those that go on around its services.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from services.scheduler.problem.plan_document import PlanDocument
from services.scheduler.solvers.exhaustive import ExhaustiveSolver
from services.scheduler.solvers.interface import Plans, ProblemTooLargeError, Solution, TimeLeft, at_most, part_of
from services.scheduler.solvers.portfolio import better
from services.scheduler.solvers.registry import AUTO, members

Turn = Callable[[str, Plans, PlanDocument, TimeLeft], Solution]
"""A named solver's checked plan from plans to begin with, with services that stay. Raises ProblemTooLargeError."""

_PROOF_SHARE = 0.5
"""Share of what members leave for exhaustive search from their best plan."""


def best_of_members(turn: Turn, *, time_left: TimeLeft, starts: Plans, kept: PlanDocument) -> Solution:
    """The best plan of all turns, and the lowest bound of any.

    Args:
        turn: Runs one solver.
        time_left: Time left for all turns.
        starts: Plans that each member begins with.
        kept: A plan whose services stay where they are.
    """
    budget_s, shares = time_left(), members()
    best: Solution | None = None
    has_small_problem = True
    for name, share in shares.items():
        if best is not None and best.is_optimal:
            break
        try:
            found = turn(name, starts, kept, at_most(time_left, share * budget_s))
        except ProblemTooLargeError:
            has_small_problem = has_small_problem and name != ExhaustiveSolver.name
            continue
        best = found if best is None else better(best, found)
    assert best is not None, "StreamRL's allocation treats problems of any size"
    for name, share in ((ExhaustiveSolver.name, _PROOF_SHARE), (AUTO, 1.0)):
        if best.is_optimal or best.plan is None or time_left() <= 0:
            break
        if name == AUTO or (name in shares and has_small_problem):
            stays = _with_services_of(kept, best.plan) if name == AUTO else kept
            # Plans that could be listed in the member's own turn may be too many for what is left.
            with suppress(ProblemTooLargeError):
                best = better(best, turn(name, (best.plan,), stays, part_of(time_left, share)))
    # Nobody's: all say why there is no plan.
    return best if best.plan is not None else replace(best, solver=AUTO)


def _with_services_of(kept: PlanDocument, plan: PlanDocument) -> PlanDocument:
    """What stays, with the services of a plan on GPUs of their own: those beside a trainer depend on where it is."""
    critic = plan.critic if plan.critic is not None and not plan.critic.is_beside_trainer else kept.critic
    return kept.model_copy(update={"score": plan.score, "reward_gpus": plan.reward_gpus, "critic": critic})
