"""Enumerates the ways to divide equal machines between replicas and the training pool.

Machines of one entry are alike and in one region, so a plan's score depends only on the sums over them: replicas of
each degree, GPUs that train, and how many machines they are spread over. Divisions with equal sums count as one. Where
the problem has meshes, it depends on how many GPUs train on which number of machines as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from services.scheduler.cost_model.reference import CostModel
from services.scheduler.problem.plan_document import PlanDocument, Replicas, TrainShare
from services.scheduler.problem.problem import NodeClass
from services.scheduler.solvers.interface import TimeLeft


@dataclass(frozen=True, slots=True)
class Split:
    """The use of one machine."""

    replicas: tuple[int, ...]
    """Number of replicas of each of the entry's tensor-parallel degrees."""
    train_gpus: int

    @property
    def idle(self) -> Split:
        """The same without its replicas."""
        return Split((0,) * len(self.replicas), self.train_gpus)


@dataclass(frozen=True, slots=True)
class Division:
    """The use of an entry's machines, machine by machine."""

    node: NodeClass
    splits: tuple[Split, ...]

    @property
    def sums(self) -> tuple[int, ...]:
        """The sums that the score depends on: replicas of each degree, GPUs that train, machines with one of those."""
        replicas = (sum(counts) for counts in zip(*(split.replicas for split in self.splits), strict=True))
        return (*replicas, self.train_gpus, self.train_nodes)

    @property
    def trained(self) -> tuple[int, ...]:
        """GPUs in the training pool of each machine that has some, in ascending order."""
        return tuple(sorted(split.train_gpus for split in self.splits if split.train_gpus))

    @property
    def train_gpus(self) -> int:
        """GPUs in the training pool."""
        return sum(split.train_gpus for split in self.splits)

    @property
    def train_nodes(self) -> int:
        """Machines with a GPU in the training pool."""
        return sum(split.train_gpus > 0 for split in self.splits)

    def with_split(self, position: int, split: Split) -> Division:
        """The same with another split of one machine."""
        return Division(self.node, (*self.splits[:position], split, *self.splits[position + 1 :]))


def machine_splits(model: CostModel, node: NodeClass, free: int | None = None) -> Iterator[Split]:
    """Every division of one machine without space for another replica, and the idle machine.

    Idle may be better: if staleness bounds the samples under way, a slow machine takes some from faster ones. Of a
    machine that services are on, its `free` GPUs are divided.
    """
    free = node.gpus if free is None else free
    if model.degrees[node.name]:
        yield Split((0,) * len(model.degrees[node.name]), 0)
    for train_gpus in range(free + 1):
        for replicas in _filled(model.degrees[node.name], free - train_gpus):
            yield Split(replicas, train_gpus)


def _filled(degrees: tuple[int, ...], gpus: int) -> Iterator[tuple[int, ...]]:
    """Replicas of each degree, ascending, that leave fewer GPUs idle than the smallest replica needs."""
    if not degrees:
        yield ()
    elif len(degrees) == 1:
        yield (gpus // degrees[0],)
    else:
        for count in range(gpus // degrees[-1] + 1):
            for smaller in _filled(degrees[:-1], gpus - count * degrees[-1]):
                yield (*smaller, count)


def best_split(model: CostModel, node: NodeClass, train_gpus: int, *, most_degree: int | None = None) -> Split:
    """The split with this many GPUs in the pool whose replicas make most at their largest batch.

    A knapsack over replicas of one machine, small enough to try each filling; `most_degree` bounds their degrees.
    """
    degrees = model.degrees[node.name]
    allowed = degrees if most_degree is None else tuple(degree for degree in degrees if degree <= most_degree)
    rates = _rates(model, node)
    fillings = ((*filled, *(0 for _ in degrees[len(allowed) :])) for filled in _filled(allowed, node.gpus - train_gpus))
    return Split(max(fillings, key=lambda counts: sum(map(float.__mul__, map(float, counts), rates))), train_gpus)


def made_by(model: CostModel, node: NodeClass, splits: Sequence[Split]) -> float:
    """Samples per second of machines' replicas at their largest batch, all fresh."""
    rates = _rates(model, node)
    return sum(count * rate for split in splits for count, rate in zip(split.replicas, rates, strict=True))


def _rates(model: CostModel, node: NodeClass) -> list[float]:
    """Of one replica of each degree at its largest batch."""
    states = (model.replica(node, degree) for degree in model.degrees[node.name])
    return [state.samples_per_second if state is not None else 0.0 for state in states]


def packed(node: NodeClass, train_gpus: int) -> Iterator[int]:
    """How many GPUs of each machine train when this many of the entry do, on as few machines as possible."""
    for _ in range(node.count):
        here = min(train_gpus, node.gpus)
        train_gpus -= here
        yield here


_Key = tuple[tuple[int, ...], tuple[int, ...]]
"""Sums, and GPUs that train on each machine where that matters."""


def divisions(
    model: CostModel, node: NodeClass, *, most: int, time_left: TimeLeft, free: Sequence[int] | None = None
) -> list[Division] | None:
    """Every division of an entry's machines, one per sum; None if there are more than `most`, or time is over.

    `free` has the GPUs of each machine that are divided; None for all.
    """
    found: dict[_Key, tuple[Split, ...]] = {((), ()): ()}
    for gpus in (node.gpus,) * node.count if free is None else free:
        splits = list(islice(machine_splits(model, node, gpus), most + 1))
        longer: dict[_Key, tuple[Split, ...]] = {}
        for (sums, trained), chosen in found.items():
            for split in splits:
                added = (*split.replicas, split.train_gpus, int(split.train_gpus > 0))
                total = tuple(map(sum, zip(sums, added, strict=True))) if sums else added
                apart = tuple(sorted((*trained, split.train_gpus))) if model.pool_memory.is_even else ()
                longer.setdefault((total, apart), (*chosen, split))
            if len(longer) > most or time_left() <= 0:
                return None
        found = longer
    return [Division(node, chosen) for chosen in found.values()]


def plan_of(model: CostModel, parts: Sequence[Division], kept: PlanDocument | None = None) -> PlanDocument:
    """The plan with each entry's machines divided like this, and its pool in the best mesh, or as in `kept`."""
    gen: list[Replicas] = []
    train: list[TrainShare] = []
    for part in parts:
        for index, split in enumerate(part.splits):
            machine = part.node.machine(index)
            counts = zip(model.degrees[part.node.name], split.replicas, strict=True)
            for degree, count in counts:
                if count:
                    tp, pp = model.layout(part.node, degree)
                    gen.append(Replicas(node=machine, tp=tp, pp=pp, count=count))
            if split.train_gpus:
                train.append(TrainShare(node=machine, gpus=split.train_gpus))
    if kept is not None:
        return PlanDocument(gen=tuple(gen), train=kept.train, mesh=kept.mesh)
    pool, mesh = model.pools.arranged(train, model.nodes)
    if model.pool_memory.is_even and gen and len({model.nodes[share.node].region for share in pool}) > 1:
        # New weights come from the head's region: best from where most generate.
        generating = Counter[str]()
        for each in gen:
            generating[model.nodes[each.node].region] += each.gpus
        pool, mesh = model.pools.headed(pool, mesh, model.nodes, region=max(generating, key=lambda at: generating[at]))
    return PlanDocument(gen=tuple(gen), train=pool, mesh=mesh)
