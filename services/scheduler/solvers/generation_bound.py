"""Bounds what generators make where staleness bounds the samples under way, by sums over replicas.

With a price for each sample under way, a replica is worth the most that its rate exceeds what its batch costs. All
replicas of a plan make at most what they are worth together, and the price of all samples that may be under way
(Lagrange). At no price that is the rate of largest batches; which price bounds a plan best depends on the plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from services.scheduler.cost_model.reference import CostModel
from services.scheduler.problem.problem import NodeClass

_NUM_PRICES = 8
_EXACT_BATCHES = 32
"""Batches up to this one are tried one by one, larger ones in steps."""
_STEP = 1.05

_Array = npt.NDArray[np.float64]


class GenerationBound:
    """The bound of one problem, at some prices."""

    def __init__(self, model: CostModel) -> None:
        self._model = model
        problem, demand = model.problem, model.demand
        self.most_under_way = (problem.workload.staleness + 1.0) * demand.samples_per_step
        """Samples that may be under way."""
        singles = [
            state.samples_per_second
            for node in problem.nodes
            for gpus in model.degrees[node.name]
            if (state := model.state(node, model.layout(node, gpus), 1)) is not None
        ]
        is_bound = self._largest_under_way() > self.most_under_way
        steps = range(_NUM_PRICES if singles and is_bound else 0)
        self.prices = (0.0, *(max(singles) / 2**step for step in steps))
        """Samples per second that each sample under way costs; the first is none."""
        self.worth = {node.name: self._worth(node) for node in problem.nodes}
        """Samples per second of one replica of each degree beyond its price: a row for each price, by node entry."""

    def best_worth(self, node: NodeClass) -> _Array:
        """The most that replicas on one machine are worth: a row for each price, a column for each number of GPUs."""
        best = np.zeros((len(self.prices), node.gpus + 1))
        for gpus in range(1, node.gpus + 1):
            best[:, gpus] = best[:, gpus - 1]
            for index, degree in enumerate(self._model.degrees[node.name]):
                if degree <= gpus:
                    more = best[:, gpus - degree] + self.worth[node.name][:, index]
                    best[:, gpus] = np.maximum(best[:, gpus], more)
        return best

    def _largest_under_way(self) -> float:
        """More than any plan's replicas could decode at once."""
        model = self._model
        return sum(
            node.count
            * max(
                (
                    node.gpus // gpus * model.largest_batch(node, model.layout(node, gpus))
                    for gpus in model.degrees[node.name]
                ),
                default=0.0,
            )
            for node in model.problem.nodes
        )

    def _worth(self, node: NodeClass) -> _Array:
        degrees = self._model.degrees[node.name]
        prices = np.array(self.prices)
        found = np.zeros((len(prices), len(degrees)))
        for index, gpus in enumerate(degrees):
            layout = self._model.layout(node, gpus)
            before = 0
            # A batch between two makes no more than the larger, and costs more than the smaller.
            for batch in _batches(math.floor(self._model.largest_batch(node, layout))):
                if (state := self._model.state(node, layout, batch)) is not None:
                    found[:, index] = np.maximum(found[:, index], state.samples_per_second - prices * (before + 1))
                before = batch
        return found


def _batches(largest: int) -> Iterator[int]:
    batch = 1
    while batch < largest:
        yield batch
        batch = max(batch + 1, math.floor(batch * _STEP)) if batch >= _EXACT_BATCHES else batch + 1
    yield largest
