"""Replans the generators around a training pool that stays: what a run in progress can change.

Every machine keeps its training GPUs; the use of the others is changed, for all machines of an entry or for one, as
long as the plan improves. Machines that generation does not need to keep up with training are then given up, the
dearest first: StreamRL (Zhong et al. 2025, section 4.3) adds units only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from services.scheduler.cost_model.reference import CostModel, Score
from services.scheduler.problem.plan_document import PlanDocument, TrainShare
from services.scheduler.solvers.divisions import Division, Split, best_split, machine_splits, plan_of
from services.scheduler.solvers.interface import Solution, TimeLeft
from services.scheduler.solvers.scored import BETTER, Parts, Scored, climb, parts_of, with_part

NAME = "regeneration"
MIN_SPARE = 0.1
"""Excess of generation over training, as a share of the latter, at which a machine is unneeded."""


def regenerate(model: CostModel, running: PlanDocument, *, time_left: TimeLeft) -> Solution:
    """The best plan found that trains where `running` does, without unneeded machines; never slower than it."""
    # Trainers keep their mesh as well.
    trains = running if model.pool_memory.is_even else None
    scored = Scored(model, kept=trains)
    kept = parts_of(model, running)
    around = partial(_neighbours, {node.name: list(machine_splits(model, node)) for node in model.problem.nodes})
    for start in (kept, tuple(_filled(model, part) for part in kept)):
        climb(scored, start, around, time_left=time_left)
    while scored.best is not None and time_left() > 0:
        if (leaner := _leaner(model, trains, scored, scored.best)) is None:
            break
        scored.settle_for(leaner)
    return _with_head_of(model, scored.solution(NAME), running)


def _with_head_of(model: CostModel, found: Solution, running: PlanDocument) -> Solution:
    """The solution with the shares of the pool in their order: the first one's machine is the head, which stays."""
    if found.plan is None or found.plan.train == running.train:
        return found
    if sorted(found.plan.train, key=_name) != sorted(running.train, key=_name):
        return found
    plan = found.plan.model_copy(update={"train": running.train})
    return replace(found, plan=plan, score=model.score(plan))


def _name(share: TrainShare) -> str:
    return share.node


def _leaner(model: CostModel, trains: PlanDocument | None, scored: Scored, parts: Parts) -> Parts | None:
    """The plan without the dearest unneeded machine; None if all are needed."""
    offers: list[tuple[float, Parts]] = []
    for index, part in enumerate(parts):
        for split in dict.fromkeys(part.splits):
            if split == split.idle:
                continue
            without = with_part(parts, index, part.with_split(part.splits.index(split), split.idle))
            if scored.rate(without) >= scored.best_rate / BETTER and _spare(model, trains, without) >= MIN_SPARE:
                offers.append((part.node.price_per_gpu_hour * (part.node.gpus - split.train_gpus), without))
    return max(offers, key=lambda offer: offer[0])[1] if offers else None


def _spare(model: CostModel, trains: PlanDocument | None, parts: Parts) -> float:
    """Excess of possible generation over training, as a share of the latter."""
    score = model.score(plan_of(model, parts, trains))
    assert isinstance(score, Score)
    return score.generated_samples_per_second / score.samples_per_second - 1


def _filled(model: CostModel, part: Division) -> Division:
    """Let all GPUs that do not train generate, in the best way for each machine alone."""
    splits = (best_split(model, part.node, split.train_gpus) for split in part.splits)
    return Division(part.node, tuple(splits))


def _neighbours(all_splits: Mapping[str, Sequence[Split]], parts: Parts) -> Iterator[Parts]:
    """Plans that differ in the use of one entry's machines beside training."""
    for index, part in enumerate(parts):
        for old in dict.fromkeys(part.splits):
            position = part.splits.index(old)
            for new in dict.fromkeys((*all_splits[part.node.name], old.idle)):
                if new == old or new.train_gpus != old.train_gpus:
                    continue
                everywhere = tuple(new if split == old else split for split in part.splits)
                for splits in dict.fromkeys((everywhere, part.with_split(position, new).splits)):
                    yield with_part(parts, index, Division(part.node, splits))
