"""Other generators around a training pool that stays where it is: what a run that goes on can change.

Every machine keeps the GPUs that train; what its others do is changed, for all machines alike and for one alone, as
long as that makes the plan better.
"""

from __future__ import annotations

from collections.abc import Iterator

from services.scheduler.cost_model.rm1 import Rm1
from services.scheduler.plan_document import PlanDocument
from services.scheduler.problem import NodeClass
from services.scheduler.solvers.divisions import Division, Split, best_split, machine_splits
from services.scheduler.solvers.interface import Solution, TimeLeft
from services.scheduler.solvers.scored import Parts, Scored, parts_of

NAME = "regeneration"
_BETTER = 1 + 1e-9


def regenerate(rm1: Rm1, running: PlanDocument, *, time_left: TimeLeft) -> Solution:
    """The best plan found that trains where `running` does; never worse than it, and of equal ones itself."""
    scored = Scored(rm1)
    kept = parts_of(rm1, running)
    climb = _Climb(rm1, scored, time_left)
    climb.up_from(kept)
    climb.up_from(tuple(_filled(rm1, part) for part in kept))
    return scored.solution(NAME)


def _filled(rm1: Rm1, part: Division) -> Division:
    """All GPUs that do not train generate, as each machine does best alone."""
    splits = (best_split(rm1, part.node, split.train_gpus) for split in part.splits)
    return Division(part.node, tuple(splits))


class _Climb:
    """To better neighbours until there is none, or no time."""

    def __init__(self, rm1: Rm1, scored: Scored, time_left: TimeLeft) -> None:
        self._rm1, self._scored, self._time_left = rm1, scored, time_left
        self._splits = {node.name: list(machine_splits(rm1, node)) for node in rm1.problem.nodes}

    def up_from(self, parts: Parts) -> None:
        rate = self._scored.rate(parts)
        is_better = True
        while is_better:
            is_better = False
            for neighbour in self._neighbours(parts):
                if self._time_left() <= 0:
                    return
                if (found := self._scored.rate(neighbour)) > rate * _BETTER:
                    parts, rate, is_better = neighbour, found, True
                    break

    def _neighbours(self, parts: Parts) -> Iterator[Parts]:
        for index, part in enumerate(parts):
            for old in dict.fromkeys(part.splits):
                position = part.splits.index(old)
                for new in self._alike(part.node, old):
                    everywhere = tuple(new if split == old else split for split in part.splits)
                    once = (*part.splits[:position], new, *part.splits[position + 1 :])
                    for splits in dict.fromkeys((everywhere, once)):
                        yield (*parts[:index], Division(part.node, splits), *parts[index + 1 :])

    def _alike(self, node: NodeClass, old: Split) -> Iterator[Split]:
        """Other divisions of a machine with as many GPUs that train; none of the others working is one."""
        idle = Split((0,) * len(self._rm1.degrees[node.name]), old.train_gpus)
        for split in dict.fromkeys((*self._splits[node.name], idle)):
            if split.train_gpus == old.train_gpus and split != old:
                yield split
