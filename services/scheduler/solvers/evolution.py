"""Evolution inside one arm: a few plans with the same training GPUs in one place; crossed, mutated, the worst replaced.

Source: HetRL, section 4.2 (swaps between task groups and inside them, evaluated by the cost model, the worst individual
replaced), on the operators of DT-FM (crossover with repair of the sizes).
"""

from __future__ import annotations

from services.scheduler.solvers.placement import Placement
from services.scheduler.solvers.scored import Parts, Scored

_POPULATION = 8
_BREEDS = 0.25
"""Share of the candidates that have two parents."""


class Evolution:
    """The population of one arm."""

    def __init__(self, placement: Placement, scored: Scored, home: frozenset[str], num_training: int) -> None:
        self._placement, self._scored = placement, scored
        self._home, self._num_training = home, num_training
        self._members: list[tuple[float, Parts]] = []
        self._first = placement.first_plans(home, num_training)

    @property
    def best_rate(self) -> float:
        """Samples per second of the best member; 0 while none can run."""
        return max((rate for rate, _ in self._members), default=0.0)

    def step(self) -> None:
        """Breed and score one more candidate."""
        self.add(next(self._first, ()) or self._child())

    def add(self, parts: Parts) -> None:
        """Add a plan; once full, it replaces the worst if it is no worse."""
        rate = self._scored.rate(parts)
        if any(parts == other for _, other in self._members):
            return
        if len(self._members) < _POPULATION:
            self._members.append((rate, parts))
            return
        worst = min(range(_POPULATION), key=lambda index: self._members[index][0])
        if rate >= self._members[worst][0]:
            self._members[worst] = (rate, parts)

    def _child(self) -> Parts:
        random = self._placement.random
        # The better of two drawn members is the parent, so that the best breed more and all can breed.
        parent = max(random.choice(self._members), random.choice(self._members), key=lambda member: member[0])[1]
        if random.random() < _BREEDS:
            other = random.choice(self._members)[1]
            parent = self._placement.crossed(parent, other, self._home, self._num_training)
        return self._placement.changed(parent, self._home)
