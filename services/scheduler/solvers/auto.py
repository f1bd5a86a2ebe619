"""A portfolio: the truth where the problem is small, else each solver's best idea as the next one's beginning.

Exhaustive search first, as small problems are proved in a moment. Where it proved nothing, AReaL-Hex's alternation and
StreamRL's allocation take an instant; integer programs and local search go on from their plans, and HetRL's search
from the best of all. Each begins with the best so far, so what comes out is never worse than anything a member found
in there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from services.scheduler.cost_model.rm1 import Rm1
from services.scheduler.plan_document import PlanDocument
from services.scheduler.solvers.exhaustive import ExhaustiveSolver
from services.scheduler.solvers.interface import ProblemTooLargeError, Solution, Solver, TimeLeft, refused
from services.scheduler.solvers.milp import MilpSolver
from services.scheduler.solvers.multilevel import MultilevelSolver
from services.scheduler.solvers.partition import PartitionSolver
from services.scheduler.solvers.streamrl import StreamRlSolver

_MEMBERS: tuple[tuple[Solver, float], ...] = (
    (ExhaustiveSolver(), 0.5),
    (PartitionSolver(), 0.2),
    (StreamRlSolver(), 0.2),
    (MilpSolver(), 0.6),
    (MultilevelSolver(), 1.0),
)
"""Each member, and the share that it may take of the time that is left when its turn comes."""


class AutoSolver:
    """One member after the other."""

    name = "auto"

    def solve(self, rm1: Rm1, *, time_left: TimeLeft, seed: int, starts: Sequence[PlanDocument] = ()) -> Solution:
        """The best plan of all members, the lowest bound of any."""
        if (refusal := refused(rm1, self.name)) is not None:
            return refusal
        best: Solution | None = None
        for member, share in _MEMBERS:
            kept_s = (1 - share) * time_left()
            begins = starts if best is None or best.plan is None else (best.plan,)
            try:
                found = member.solve(rm1, time_left=_keeping(kept_s, time_left), seed=seed, starts=begins)
            except ProblemTooLargeError:
                continue
            best = found if best is None else _better(best, found)
            if best.is_optimal:
                return best
        assert best is not None, "StreamRL's allocation treats problems of any size"
        return best


def _keeping(kept_s: float, time_left: TimeLeft) -> TimeLeft:
    """The time left but for the last `kept_s` seconds."""
    return lambda: time_left() - kept_s


def _better(one: Solution, other: Solution) -> Solution:
    """The better of both, the first where they are equal, with what both know."""
    best = max((one, other), key=lambda each: each.score.samples_per_second)
    bounds = [
        each.upper_bound_samples_per_second for each in (one, other) if each.upper_bound_samples_per_second is not None
    ]
    return replace(
        best,
        upper_bound_samples_per_second=min(bounds, default=None),
        is_optimal=one.is_optimal or other.is_optimal,
        num_evaluated=one.num_evaluated + other.num_evaluated,
    )
