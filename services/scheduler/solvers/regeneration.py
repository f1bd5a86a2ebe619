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
from services.scheduler.solvers.scored import Parts, Scored, climb, parts_of

NAME = "regeneration"


def regenerate(rm1: Rm1, running: PlanDocument, *, time_left: TimeLeft) -> Solution:
    """The best plan found that trains where `running` does; never worse than it, and of equal ones itself."""
    scored = Scored(rm1)
    kept = parts_of(rm1, running)
    around = _Neighbourhood(rm1)
    for start in (kept, tuple(_filled(rm1, part) for part in kept)):
        climb(scored, start, around.neighbours, time_left=time_left)
    return scored.solution(NAME)


def _filled(rm1: Rm1, part: Division) -> Division:
    """All GPUs that do not train generate, as each machine does best alone."""
    splits = (best_split(rm1, part.node, split.train_gpus) for split in part.splits)
    return Division(part.node, tuple(splits))


class _Neighbourhood:
    """Plans that differ in what one entry's machines do beside training."""

    def __init__(self, rm1: Rm1) -> None:
        self._rm1 = rm1
        self._splits = {node.name: list(machine_splits(rm1, node)) for node in rm1.problem.nodes}

    def neighbours(self, parts: Parts) -> Iterator[Parts]:
        """Of these."""
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
