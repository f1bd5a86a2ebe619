"""Draws random plans and random changes of plans for an evolutionary search."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from itertools import islice
from random import Random

from services.scheduler.cost_model.reference import CostModel
from services.scheduler.problem.problem import NodeClass
from services.scheduler.solvers.divisions import Division, Split, best_split, machine_splits, made_by, packed
from services.scheduler.solvers.scored import Parts, ordered_nodes, with_part

_MAX_SPLITS = 2_000
"""Splits of a machine that changes draw from; of more, only the first ones."""


class Placement:
    """Draws plans and changes for one problem."""

    def __init__(self, model: CostModel, random: Random) -> None:
        self.random = random
        self.problem = model.problem
        self._model = model
        self._nodes = ordered_nodes(model.problem)
        self._splits = {node.name: self._listed(node) for node in self._nodes}
        self._best_split = cache(partial(best_split, model))

    def training_range(self, home: frozenset[str]) -> tuple[int, int]:
        """Least and most GPUs of a training site that can train; least exceeds most if memory is too small."""
        here = [node for node in self._nodes if node.region in home]
        most = sum(node.gpus * node.count for node in here)
        least = self._model.pool_memory.least_pool(here)
        return (most + 1 if least is None else least, most)

    def first_plans(self, home: frozenset[str], num_training: int) -> Iterator[Parts]:
        """First plans: they train on the GPUs best at training, worst at generation, or random ones."""
        rates = {node.name: self._generation_rate(node) for node in self._nodes}
        training = self._model.gpu_training_rate
        orders = [
            lambda node: -training[node.name] / (rates[node.name] or 1e-9),
            lambda node: rates[node.name],
            lambda node: -training[node.name],
            lambda node: self.random.random(),
            lambda node: self.random.random(),
        ]
        here = [node for node in self._nodes if node.region in home]
        for order in orders:
            left, trains = num_training, {}
            for node in sorted(here, key=order):
                trains[node.name] = min(left, node.gpus * node.count)
                left -= trains[node.name]
            yield tuple(self._division(node, trains.get(node.name, 0)) for node in self._nodes)

    def crossed(self, one: Parts, other: Parts, home: frozenset[str], num_training: int) -> Parts:
        """Take each entry from either parent, then move GPUs of random machines to get the number that train."""
        parts = tuple(self.random.choice(pair) for pair in zip(one, other, strict=True))
        surplus = sum(part.train_gpus for part in parts) - num_training
        while surplus:
            machine = self._machine(parts, home, trains=surplus > 0)
            assert machine is not None, "a place has as many GPUs as an arm trains on"
            index, position = machine
            split = parts[index].splits[position]
            free = parts[index].node.gpus - split.train_gpus
            moved = min(surplus, split.train_gpus) if surplus > 0 else -min(-surplus, free)
            parts = self._with_training(parts, index, position, split.train_gpus - moved)
            surplus -= moved
        return parts

    def changed(self, parts: Parts, home: frozenset[str]) -> Parts:
        """One of the moves that keep the number of training GPUs."""
        moves = [self._resplit, self._uniform, self._idled]
        moves += [lambda parts: self._swapped(parts, home)] * 2
        return self.random.choice(moves)(parts)

    def _swapped(self, parts: Parts, home: frozenset[str]) -> Parts:
        """Move GPUs of one machine out of the pool, and as many of another into it. Level 3."""
        giver = self._machine(parts, home, trains=True)
        taker = self._machine(parts, home, trains=False)
        if giver is None or taker is None or giver == taker:
            return self._resplit(parts)
        gives = parts[giver[0]].splits[giver[1]].train_gpus
        takes = parts[taker[0]].splits[taker[1]].train_gpus
        most = min(gives, parts[taker[0]].node.gpus - takes)
        moved = self.random.choice((most, self.random.randint(1, most)))
        return self._with_training(self._with_training(parts, *giver, gives - moved), *taker, takes + moved)

    def _resplit(self, parts: Parts) -> Parts:
        """Change the replicas on one machine. Level 5."""
        index = self.random.randrange(len(parts))
        position = self.random.randrange(parts[index].node.count)
        old = parts[index].splits[position]
        return _replaced(parts, index, position, self.random.choice(self._alike(parts[index].node, old.train_gpus)))

    def _uniform(self, parts: Parts) -> Parts:
        """Set all machines of an entry to one degree. Level 4."""
        index = self.random.randrange(len(parts))
        part = parts[index]
        degrees = self._model.degrees[part.node.name]
        if not degrees:
            return parts
        most = self.random.choice(degrees)
        splits = (self._best_split(part.node, split.train_gpus, most_degree=most) for split in part.splits)
        return with_part(parts, index, Division(part.node, tuple(splits)))

    def _idled(self, parts: Parts) -> Parts:
        """Let all machines of an entry stop generating, or start."""
        index = self.random.randrange(len(parts))
        part = parts[index]
        is_idle = all(split == split.idle for split in part.splits)
        splits = (self._best_split(part.node, split.train_gpus) if is_idle else split.idle for split in part.splits)
        return with_part(parts, index, Division(part.node, tuple(splits)))

    def _machine(self, parts: Parts, home: frozenset[str], *, trains: bool) -> tuple[int, int] | None:
        """A machine of the site with a GPU that trains, or with one that does not; entry and position."""
        found = [
            (index, position)
            for index, part in enumerate(parts)
            if part.node.region in home
            for position, split in enumerate(part.splits)
            if (split.train_gpus > 0 if trains else split.train_gpus < part.node.gpus)
        ]
        return self.random.choice(found) if found else None

    def _with_training(self, parts: Parts, index: int, position: int, train_gpus: int) -> Parts:
        node = parts[index].node
        choices = [self._best_split(node, train_gpus), self.random.choice(self._alike(node, train_gpus))]
        return _replaced(parts, index, position, self.random.choice(choices))

    def _alike(self, node: NodeClass, train_gpus: int) -> list[Split]:
        return self._splits[node.name].get(train_gpus) or [self._best_split(node, train_gpus)]

    def _listed(self, node: NodeClass) -> dict[int, list[Split]]:
        found: dict[int, list[Split]] = {}
        for split in islice(machine_splits(self._model, node), _MAX_SPLITS):
            found.setdefault(split.train_gpus, []).append(split)
        return found

    def _division(self, node: NodeClass, train_gpus: int) -> Division:
        return Division(node, tuple(self._best_split(node, gpus) for gpus in packed(node, train_gpus)))

    def _generation_rate(self, node: NodeClass) -> float:
        """Samples per second of one of its GPUs at the best degree."""
        return made_by(self._model, node, (self._best_split(node, 0),)) / node.gpus


def _replaced(parts: Parts, index: int, position: int, split: Split) -> Parts:
    return with_part(parts, index, parts[index].with_split(position, split))
