"""Implements StreamRL's resource allocation: two groups of equal GPUs, sized by a profiler so that neither stage waits.

In one site: every split of the GPUs of one type, each side at its best parallelism. Across sites, or between types:
both stages at their full budget, then the faster one shrinks until the two times are closest. The cost model is the
profiler. Machines of other types stay idle, since the method has only two groups. Source: StreamRL, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product

from services.scheduler.cost_model.reference import CostModel, Limit
from services.scheduler.problem.problem import NodeClass
from services.scheduler.solvers.divisions import Division, Split, best_split, packed
from services.scheduler.solvers.interface import Plans, Solution, TimeLeft
from services.scheduler.solvers.scored import Parts, Scored, ordered_nodes

_Group = tuple[NodeClass, ...]
"""Entries of one GPU type in one region."""


class StreamRlSolver:
    """One group generates, one trains."""

    name = "streamrl"

    def solve(self, model: CostModel, *, time_left: TimeLeft, seed: int, starts: Plans = ()) -> Solution:
        """Finds the best of all pairs of groups."""
        scored = Scored(model, starts)
        groups = _groups(ordered_nodes(model.problem))
        for generating, training in product(groups, groups):
            for degree in _degrees(model, generating):
                if scored.num_evaluated and time_left() <= 0:
                    return scored.solution(self.name)
                allocation = _Allocation(model, scored, generating, training, degree)
                if generating == training:
                    allocation.split_one_site(time_left)
                else:
                    allocation.shrink_the_faster()
        return scored.solution(self.name)


def _groups(nodes: Sequence[NodeClass]) -> list[_Group]:
    found: dict[tuple[str, str], list[NodeClass]] = {}
    for node in nodes:
        found.setdefault((node.gpu, node.region), []).append(node)
    return [tuple(group) for group in found.values()]


def _degrees(model: CostModel, group: _Group) -> list[int]:
    return sorted({degree for node in group for degree in model.degrees[node.name]})


def _num_gpus(group: _Group) -> int:
    return sum(node.gpus * node.count for node in group)


class _Allocation:
    """Sizes one pair of groups at one tensor-parallel degree."""

    def __init__(self, model: CostModel, scored: Scored, generating: _Group, training: _Group, degree: int) -> None:
        self._model, self._scored, self._degree = model, scored, degree
        self._generating, self._training = generating, training

    def split_one_site(self, time_left: TimeLeft) -> None:
        """Try every (x, y) with x + y = n, until time is over."""
        for num_training in range(1, _num_gpus(self._training)):
            if self._scored.num_evaluated and time_left() <= 0:
                return
            self._limit(_num_gpus(self._generating), num_training)

    def shrink_the_faster(self) -> None:
        """Start at full size, then shrink the faster to the least size that is not slower, or one less."""
        most_generating, most_training = _num_gpus(self._generating), _num_gpus(self._training)
        if self._limit(most_generating, most_training) is Limit.TRAINING:
            smallest = _smallest(most_generating, lambda count: self._limit(count, most_training) is Limit.TRAINING)
            self._limit(max(1, smallest - 1), most_training)
        else:
            smallest = _smallest(
                most_training, lambda count: self._limit(most_generating, count) in (Limit.GENERATION, Limit.TAIL)
            )
            self._limit(most_generating, max(1, smallest - 1))

    def _limit(self, num_generating: int, num_training: int) -> Limit | None:
        return self._scored.look_at(self._parts(num_generating, num_training))[1]

    def _parts(self, num_generating: int, num_training: int) -> Parts:
        """GPUs train from the first machine on; of the rest, the first `num_generating` generate."""
        parts = []
        for node in ordered_nodes(self._model.problem):
            trains = min(num_training, node.gpus * node.count) if node in self._training else 0
            num_training -= trains
            splits = []
            for train_gpus in packed(node, trains):
                generates = min(num_generating, node.gpus - train_gpus) if node in self._generating else 0
                num_generating -= generates
                splits.append(self._split(node, train_gpus, generates))
            parts.append(Division(node, tuple(splits)))
        return tuple(parts)

    def _split(self, node: NodeClass, train_gpus: int, generates: int) -> Split:
        degrees = self._model.degrees[node.name]
        if generates == node.gpus - train_gpus and self._degree in degrees:
            return best_split(self._model, node, train_gpus, most_degree=self._degree)
        return Split(tuple(_replicas(degrees, generates, self._degree)), train_gpus)


def _replicas(degrees: Sequence[int], gpus: int, most_degree: int) -> Iterator[int]:
    """Replicas of each degree, ascending: as many of `most_degree` as fit, and no other."""
    for degree in degrees:
        yield gpus // degree if degree == most_degree else 0


def _smallest(most: int, holds: Callable[[int], bool]) -> int:
    """The smallest count up to `most` at which a predicate holds that is true at `most` and, once true, stays true."""
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
