"""Goes on from the best plan of the portfolio's members: two that rival each other, then exhaustive search.

HetRL's search and the integer programs' local search each begin with the best so far. The one that gained continues,
the other one when it gains nothing, until both have ended or time is over.
"""

from __future__ import annotations

from dataclasses import replace

from services.scheduler.cost_model.reference import CostModel
from services.scheduler.solvers.exhaustive import ExhaustiveSolver
from services.scheduler.solvers.interface import Plans, ProblemTooLargeError, Solution, Solver, TimeLeft, part_of
from services.scheduler.solvers.milp import MilpSolver
from services.scheduler.solvers.multilevel import MultilevelSolver
from services.scheduler.solvers.registry import AUTO

_RIVALS: tuple[Solver, Solver] = (MultilevelSolver(), MilpSolver(has_programs=False))
_TURN = 0.5
"""Share of the time left for each turn."""
_NUM_TURNS = 8
"""Most turns of rivals; the last takes all the time left."""


class AutoSolver:
    """What `auto` does once each of its members had its turn."""

    name = AUTO

    def solve(self, model: CostModel, *, time_left: TimeLeft, seed: int, starts: Plans = ()) -> Solution:
        """The best plan of both rivals, never worse than a start."""
        turns = _Turns(model, time_left, seed, starts)
        chosen, num_ended = 0, 0
        for number in range(_NUM_TURNS):
            gain = turns.take(_RIVALS[chosen], _TURN if number < _NUM_TURNS - 1 else 1.0)
            num_ended = num_ended + 1 if turns.has_ended and not gain else 0
            if num_ended == len(_RIVALS):
                break
            chosen = chosen if gain else 1 - chosen
        turns.take(ExhaustiveSolver(), 1.0)
        assert turns.best is not None, "HetRL's search treats problems of any size"
        return turns.best


class _Turns:
    """Runs solvers one after the other, each from the best so far, until one proves its plan optimal."""

    def __init__(self, model: CostModel, time_left: TimeLeft, seed: int, starts: Plans) -> None:
        self._model, self._time_left, self._seed, self._starts = model, time_left, seed, starts
        self.best: Solution | None = None
        self.has_ended = False
        """Whether the last one ended before its time did."""

    def take(self, member: Solver, share: float) -> float:
        """Run a solver for a share of the time left; returns by what share the plan got better."""
        if self.best is not None and (self.best.is_optimal or self._time_left() <= 0):
            return 0.0
        time_left = part_of(self._time_left, share)
        begins = self._starts if self.best is None or self.best.plan is None else (self.best.plan,)
        before = self.best.score.samples_per_second if self.best is not None else 0.0
        # Not the members' own walk again.
        self._seed += 1
        try:
            found = member.solve(self._model, time_left=time_left, seed=self._seed, starts=begins)
        except ProblemTooLargeError:
            self.has_ended = True
            return 0.0
        self.has_ended = time_left() > 0
        self.best = found if self.best is None else better(self.best, found)
        after = self.best.score.samples_per_second
        return after / before - 1 if before else after


def better(one: Solution, other: Solution) -> Solution:
    """The better of both, the first on a tie, with the bounds of both."""
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
