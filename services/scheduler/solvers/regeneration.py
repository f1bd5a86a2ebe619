"""Other generators around a training pool that stays where it is: what a run in progress can change.

Every machine keeps the GPUs that train; what its others do is changed, for all machines alike and for one alone, as
long as that makes the plan better. Machines without which generation keeps up with training are then given up, the
dearest first: StreamRL (Zhong et al. 2025, section 4.3) adds units only.
"""

from __future__ import annotations

from collections.abc import Iterator

from services.scheduler.cost_model.reference import CostModel, Score
from services.scheduler.problem.plan_document import PlanDocument
from services.scheduler.problem.problem import NodeClass
from services.scheduler.solvers.divisions import Division, Split, best_split, machine_splits, plan_of
from services.scheduler.solvers.interface import Solution, TimeLeft
from services.scheduler.solvers.scored import BETTER, Parts, Scored, climb, parts_of

NAME = "regeneration"
MIN_SPARE = 0.1
"""Of what trainers take, that generators could make beyond it, for a machine to be needless."""


def regenerate(model: CostModel, running: PlanDocument, *, time_left: TimeLeft) -> Solution:
    """The best plan found that trains where `running` does, without what is needless; never slower than it."""
    scored = Scored(model)
    kept = parts_of(model, running)
    around = _Neighbourhood(model)
    for start in (kept, tuple(_filled(model, part) for part in kept)):
        climb(scored, start, around.neighbours, time_left=time_left)
    while scored.best is not None and time_left() > 0:
        if (leaner := _leaner(model, scored, scored.best)) is None:
            break
        scored.settle_for(leaner)
    return scored.solution(NAME)


def _leaner(model: CostModel, scored: Scored, parts: Parts) -> Parts | None:
    """The plan without the dearest machine that is needless; None where each is needed."""
    offers: list[tuple[float, Parts]] = []
    for index, part in enumerate(parts):
        for split in dict.fromkeys(part.splits):
            idle = Split((0,) * len(split.replicas), split.train_gpus)
            position = part.splits.index(split)
            splits = (*part.splits[:position], idle, *part.splits[position + 1 :])
            without = (*parts[:index], Division(part.node, splits), *parts[index + 1 :])
            if split == idle or scored.rate(without) < scored.best_rate / BETTER or _spare(model, without) < MIN_SPARE:
                continue
            offers.append((part.node.price_per_gpu_hour * (part.node.gpus - split.train_gpus), without))
    return max(offers, key=lambda offer: offer[0])[1] if offers else None


def _spare(model: CostModel, parts: Parts) -> float:
    """What generators could make beyond what is trained, as a share of that."""
    score = model.score(plan_of(model, parts))
    assert isinstance(score, Score)
    return score.generated_samples_per_second / score.samples_per_second - 1


def _filled(model: CostModel, part: Division) -> Division:
    """All GPUs that do not train generate, as each machine does best alone."""
    splits = (best_split(model, part.node, split.train_gpus) for split in part.splits)
    return Division(part.node, tuple(splits))


class _Neighbourhood:
    """Plans that differ in what one entry's machines do beside training."""

    def __init__(self, model: CostModel) -> None:
        self._model = model
        self._splits = {node.name: list(machine_splits(model, node)) for node in model.problem.nodes}

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
        idle = Split((0,) * len(self._model.degrees[node.name]), old.train_gpus)
        for split in dict.fromkeys((*self._splits[node.name], idle)):
            if split.train_gpus == old.train_gpus and split != old:
                yield split
