"""Implements HetRL's search: nested successive halving over training sites and GPU counts, evolution inside each arm.

Its five levels in this plan space. Level 1, task grouping: everything but generation shares the training pool, so
groupings differ in the regions of the pool. Level 2: how many GPUs train. Level 3: which, by swaps across the two
groups. Level 4: tensor-parallel degrees. Level 5: which GPUs of a machine form a replica, by changes inside a group.
The cost model balances batches, dividing work in proportion to speed; there are no pipeline stages to balance. Source:
HetRL, sections 4.1 and 4.2, whose Algorithm 1 was not available: halving is the standard one, nested as described
there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2
from random import Random

from services.scheduler.cost_model.reference import CostModel
from services.scheduler.solvers.evolution import Evolution
from services.scheduler.solvers.interface import Plans, Solution, TimeLeft
from services.scheduler.solvers.placement import Placement
from services.scheduler.solvers.scored import Parts, Scored, homes_of, parts_of

_FIRST_BUDGET = 256
"""Candidates of the first tournament; each further one has twice as many."""
_MAX_ARMS = 16
"""Counts of training GPUs that a tournament tries in each training site."""
_FRUITLESS = 3
"""Unsuccessful tournaments in a row after which the search ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MultilevelSolver:
    """Plays tournaments of arms, each evolved, until time is over or they stop helping."""

    name: str = "multilevel"
    max_candidates: int | None = None
    """Candidates in total; None tries as many as time allows."""

    def solve(self, model: CostModel, *, time_left: TimeLeft, seed: int, starts: Plans = ()) -> Solution:
        """The best plan of all arms."""
        scored, random = Scored(model), Random(seed)
        given = [parts_of(model, start) for start in starts]
        tournament = _Tournament(self, Placement(model, random), scored, time_left)
        tournament.add(given)
        budget, fruitless = _FIRST_BUDGET, 0
        while fruitless < _FRUITLESS and not tournament.is_over():
            before = scored.best_rate
            tournament.play(budget)
            fruitless = 0 if scored.best_rate > before * (1 + 1e-9) else fruitless + 1
            budget *= 2
        return scored.solution(self.name)


class _Tournament:
    """Arms that survive from one tournament to the next, with their populations."""

    def __init__(self, solver: MultilevelSolver, placement: Placement, scored: Scored, time_left: TimeLeft) -> None:
        self._solver, self._placement, self._scored, self._time_left = solver, placement, scored, time_left
        self._arms: dict[tuple[frozenset[str], int], Evolution] = {}
        self._homes = homes_of(placement.problem)
        self._num_candidates = 0

    def add(self, starts: Sequence[Parts]) -> None:
        """Start the arms of these plans with them."""
        for parts in starts:
            self._scored.rate(parts)
            training = [part for part in parts if part.train_gpus]
            regions = frozenset(part.node.region for part in training)
            home = next((home for home in self._homes if regions <= home), None)
            if home is not None and training:
                self._arm(home, sum(part.train_gpus for part in training)).add(parts)

    def is_over(self) -> bool:
        """Whether time or candidates have run out; the very first candidate is tried in any case."""
        most = self._solver.max_candidates
        is_spent = most is not None and self._num_candidates >= most
        return is_spent or (self._num_candidates > 0 and self._time_left() <= 0)

    def play(self, budget: int) -> None:
        """One tournament of `budget` candidates: after each round both levels are halved, so the arms left get more."""
        groups = {home: self._counts(home) for home in self._homes}
        groups = {home: counts for home, counts in groups.items() if counts}
        num_rounds = max(1, ceil(log2(max(len(groups), *map(len, groups.values()))))) if groups else 0
        for _ in range(num_rounds):
            for home, counts in groups.items():
                share = budget / num_rounds / len(groups) / len(counts)
                for count in counts:
                    self._evolve(home, count, max(1, round(share)))
                    if self.is_over():
                        return
            groups = {home: self._better_half(home, counts) for home, counts in groups.items()}
            kept = sorted(groups, key=lambda home: -self._arm(home, groups[home][0]).best_rate)
            groups = {home: groups[home] for home in kept[: (len(kept) + 1) // 2]}

    def _better_half(self, home: frozenset[str], counts: list[int]) -> list[int]:
        ranked = sorted(counts, key=lambda count: -self._arm(home, count).best_rate)
        return ranked[: (len(ranked) + 1) // 2]

    def _evolve(self, home: frozenset[str], count: int, num_candidates: int) -> None:
        arm = self._arm(home, count)
        for _ in range(num_candidates):
            if self.is_over():
                return
            arm.step()
            self._num_candidates += 1

    def _counts(self, home: frozenset[str]) -> list[int]:
        """Counts of training GPUs to try: evenly over the range, and close to the best one so far."""
        least, most = self._placement.training_range(home)
        if least > most:
            return []
        stride = max(1, ceil((most - least + 1) / _MAX_ARMS))
        counts = set(range(least, most + 1, stride))
        tried = {count: arm.best_rate for (place, count), arm in self._arms.items() if place == home}
        if tried:
            best = max(tried, key=lambda count: tried[count])
            near = (best + step * sign for step in (0, 1, 2, max(1, stride // 2)) for sign in (-1, 1))
            counts |= {count for count in near if least <= count <= most}
        return sorted(counts)

    def _arm(self, home: frozenset[str], count: int) -> Evolution:
        if (home, count) not in self._arms:
            self._arms[home, count] = Evolution(self._placement, self._scored, home, count)
        return self._arms[home, count]
