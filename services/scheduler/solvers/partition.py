"""Implements AReaL-Hex's alternation: cut the GPUs into training and generation, plan both sides, move the cut.

The cut keeps fast links inside the training side and memory bandwidth on the generating side, with a share `gamma` of
all arithmetic on the training side; `gamma` is bisected until both sides take the same time. The rollout side is the
integer knapsack that results from eliminating the makespan of the printed bilinear program. Source: AReaL-Hex,
Algorithm 1, equation 2 and the repartition phase of its section on scheduling. The paper names no solver for the cut:
here it is exact if there are few cuts; otherwise single GPUs or machines move from a greedy cut (Fiduccia and
Mattheyses).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import comb, prod
from operator import mul

from services.scheduler.cost_model.reference import CostModel, Limit
from services.scheduler.problem.problem import NodeClass
from services.scheduler.solvers.divisions import Division, best_split, packed
from services.scheduler.solvers.interface import Plans, Solution, TimeLeft
from services.scheduler.solvers.scored import Parts, Scored, homes_of, ordered_nodes

MAX_CUTS = 5_000
"""Most cuts to try one by one; beyond that, moves start from a greedy cut."""
_ROUNDS = 20
"""Bisections of gamma."""

_LINK_WEIGHTS = (1.0, 0.0)
"""Weights of the links in the cut's objective. As printed it is 1, which makes GPUs with fast links train even if their
memory is wanted for generation (48 H20 beside 8 H800, say); so the alternation runs again for memory bandwidth
alone."""

_Cut = tuple[int, ...]
"""GPUs that train, by entry."""


class PartitionSolver:
    """Alternates graph partition and rollout knapsack."""

    name = "partition"

    def solve(self, model: CostModel, *, time_left: TimeLeft, seed: int, starts: Plans = ()) -> Solution:
        """The best plan of the alternation, for each training site."""
        scored = Scored(model, starts)
        for home, weight in product(homes_of(model.problem), _LINK_WEIGHTS):
            _alternate(model, scored, _Graph(model, home, weight), time_left)
        return scored.solution(self.name)


def _alternate(model: CostModel, scored: Scored, graph: _Graph, time_left: TimeLeft) -> None:
    low, high = 0.0, 1.0
    seen: set[_Cut] = set()
    for _ in range(_ROUNDS):
        if time_left() <= 0 or high - low < graph.finest_share / 2:
            return
        gamma = (low + high) / 2
        cut = graph.best_cut(gamma, band=max(graph.finest_share, (high - low) / 2))
        if cut is None:
            return
        _, limit = scored.look_at(_planned(model, graph.nodes, cut))
        generates_too_fast = limit in (Limit.TRAINING, None) and sum(cut) < graph.num_gpus
        low, high = (gamma, high) if generates_too_fast else (low, gamma)
        if cut in seen and high - low < graph.finest_share:
            return
        seen.add(cut)


def _planned(model: CostModel, nodes: Sequence[NodeClass], cut: _Cut) -> Parts:
    return tuple(
        Division(node, tuple(best_split(model, node, gpus) for gpus in packed(node, train_gpus)))
        for node, train_gpus in zip(nodes, cut, strict=True)
    )


class _Graph:
    """The complete graph over GPUs, folded to entries: GPUs of an entry train on as few machines as possible."""

    def __init__(self, model: CostModel, home: frozenset[str], link_weight: float) -> None:
        problem = model.problem
        self._problem, self._model, self._link_weight = problem, model, link_weight
        self.nodes = ordered_nodes(problem)
        everything = tuple(node.gpus * node.count for node in self.nodes)
        self.num_gpus = sum(everything)
        self._most = [most if node.region in home else 0 for node, most in zip(self.nodes, everything, strict=True)]
        types = [problem.gpu_types[node.gpu] for node in self.nodes]
        self._compute = _shares([gpu.tflops_bf16 for gpu in types], everything)
        self._bandwidth = _shares([gpu.hbm_GBps for gpu in types], everything)
        self.finest_share = min(self._compute)
        self._between = [[self._edge(one, other) for other in self.nodes] for one in self.nodes]
        self._all_edges = self._edges(everything) or 1.0

    def best_cut(self, gamma: float, *, band: float) -> _Cut | None:
        """The cut of the highest objective whose share of the arithmetic is within `band` of gamma, or closest to it.

        None if no machine may train.
        """
        if not any(self._most):
            return None
        if prod(most + 1 for most in self._most) <= MAX_CUTS:
            cuts = product(*(range(most + 1) for most in self._most))
            return max((cut for cut in cuts if any(cut)), key=lambda cut: self._objective(cut, gamma, band))
        return self._moved(self._greedy(gamma), gamma, band)

    def _greedy(self, gamma: float) -> _Cut:
        """Greedy cut: entries with the most arithmetic per memory bandwidth train first."""
        order = sorted(range(len(self.nodes)), key=lambda index: -self._compute[index] / self._bandwidth[index])
        cut, left = [0] * len(self.nodes), gamma
        for index in order:
            cut[index] = min(self._most[index], max(0, round(left / self._compute[index])))
            left -= cut[index] * self._compute[index]
        return tuple(cut)

    def _moved(self, cut: _Cut, gamma: float, band: float) -> _Cut:
        value = self._objective(cut, gamma, band)
        while True:
            moves = [
                moved
                for index, node in enumerate(self.nodes)
                for step in (1, -1, node.gpus, -node.gpus)
                if 0 <= (count := cut[index] + step) <= self._most[index]
                and any(moved := (*cut[:index], count, *cut[index + 1 :]))
            ]
            best = max(moves, key=lambda moved: self._objective(moved, gamma, band))
            if (found := self._objective(best, gamma, band)) <= value * (1 + 1e-12):
                return cut
            cut, value = best, found

    def _objective(self, cut: _Cut, gamma: float, band: float) -> float:
        """Links on the training side and memory bandwidth on the other, minus the excess over the band around gamma."""
        compute: float = sum(map(mul, cut, self._compute))
        outside = max(0.0, abs(compute - gamma) - band / 2)
        generating: float = 1 - sum(map(mul, cut, self._bandwidth))
        # Both terms are at most 1, so that a cut in the band always beats one just outside it.
        links = self._link_weight * self._edges(cut) / self._all_edges if self._link_weight else 0.0
        return links + generating - 1e3 * outside

    def _edges(self, cut: _Cut) -> float:
        """Bandwidth over all pairs of GPUs on the training side, GB/s."""
        total = 0.0
        for index, (node, count) in enumerate(zip(self.nodes, cut, strict=True)):
            inside = sum(comb(here, 2) for here in packed(node, count))
            total += inside * self._problem.gpu_types[node.gpu].ar_bus_GBps
            total += (comb(count, 2) - inside) * self._between[index][index]
            total += sum(count * other * self._between[index][far] for far, other in enumerate(cut[:index]))
        return total

    def _edge(self, one: NodeClass, other: NodeClass) -> float:
        if one.region != other.region:
            return self._model.network.bytes_per_second(one.region, other.region) / 1e9
        return min(one.nic_Gbps, other.nic_Gbps) / 8


def _shares(values: Sequence[float], counts: _Cut) -> list[float]:
    """The value of one GPU of each entry as a share of the whole cluster's."""
    total = sum(map(mul, counts, values))
    return [value / total for value in values]
