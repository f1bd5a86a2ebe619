"""Decides which GPUs have the memory to train together.

Two rules. RM-1 adds up unlike memories: the pool's must hold weights, gradients and moments. Where the problem states
`train_pack_tokens`, shards are even, as those of Penstock's trainer are: every GPU needs its share, and besides it what
a forward and backward pass takes (`penstock.model.training_memory`), so that a small GPU can only join a large pool.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from penstock.model.decoder_shape import ModelShape
from penstock.model.training_memory import TrainingMode, frozen_bytes, working_bytes
from services.scheduler.cost_model.demand import Demand
from services.scheduler.problem.plan_mesh_check import problem_shape
from services.scheduler.problem.problem import NodeClass, Problem


class PoolMemory:
    """The memory rule of one problem.

    Args:
        problem: The problem.
        demand: Its demand.
        usable_bytes: Usable memory of a GPU, by node entry.
    """

    def __init__(self, problem: Problem, demand: Demand, usable_bytes: Mapping[str, float]) -> None:
        self._usable_bytes = usable_bytes
        self._state_bytes = demand.training_state_bytes
        self.is_even = problem.cost_model.train_pack_tokens > 0
        """Whether shards are even; RM-1's rule otherwise."""
        can_offload = problem.offload_obstacle is None
        self._offloading = frozenset(node.name for node in problem.nodes if can_offload and node.memory_GB is not None)
        """Entries that may hold the state in the machine's memory."""
        self._alone_bytes, self._working_bytes = _working_bytes(problem) if self.is_even else (0.0, 0.0)
        self.least_gpus = {node.name: self._least_gpus(node) for node in problem.nodes}
        """GPUs of the smallest pool that a GPU of each entry can be part of; infinite if it can be in none."""

    def needed_bytes(self, num_gpus: int) -> float:
        """Of each of that many GPUs that hold equal parts."""
        working = self._alone_bytes if num_gpus == 1 else self._working_bytes
        return self._state_bytes / num_gpus + working

    def fits(self, pool: Sequence[tuple[NodeClass, int]]) -> bool:
        """Whether these GPUs can train together: entries, each with its number of GPUs."""
        if not self.is_even:
            return sum(gpus * self._usable_bytes[node.name] for node, gpus in pool) >= self._state_bytes
        return sum(gpus for _, gpus in pool) >= max(self.least_gpus[node.name] for node, _ in pool)

    def error(self, pool: Sequence[tuple[NodeClass, int]]) -> str | None:
        """Why they cannot; None if they can."""
        if self.fits(pool):
            return None
        num_gpus = sum(gpus for _, gpus in pool)
        if not self.is_even:
            offered = sum(gpus * self._usable_bytes[node.name] for node, gpus in pool)
            return (
                f"training needs {self._state_bytes / 1e9:.0f} GB, and the training pool's {num_gpus} GPUs offer "
                f"{offered / 1e9:.0f} GB"
            )
        smallest = min((node for node, _ in pool), key=lambda node: self._usable_bytes[node.name])
        working = self._alone_bytes if num_gpus == 1 else self._working_bytes
        return (
            f"training needs {self.needed_bytes(num_gpus) / 1e9:.1f} GB of each of {num_gpus} GPUs, "
            f"{working / 1e9:.1f} GB of them for passes of train_pack_tokens, and a GPU of {smallest.name} offers "
            f"{self._usable_bytes[smallest.name] / 1e9:.1f} GB"
        )

    @property
    def bounding_bytes(self) -> float:
        """The least that the GPUs of any pool must offer together: the state, unless machines may hold it."""
        return 0.0 if self._offloading else self._state_bytes

    def least_pool(self, nodes: Collection[NodeClass]) -> int | None:
        """Fewest GPUs of these entries whose memory holds the state; None if all of them together do not.

        Which of them a mesh needs besides is not counted. With machines that may hold the state it is one.
        """
        if any(node.name in self._offloading for node in nodes):
            return 1
        needed, least = self._state_bytes, 0
        for node in sorted(nodes, key=lambda node: -self._usable_bytes[node.name]):
            room = self._usable_bytes[node.name]
            taken = min(node.gpus * node.count, max(0, -int(-needed // room))) if room > 0 else 0
            needed -= taken * room
            least += taken
        return max(1, least) if needed <= 0 else None

    def _least_gpus(self, node: NodeClass) -> float:
        if not self.is_even:
            return 1
        usable = self._usable_bytes[node.name]
        if self._state_bytes + self._alone_bytes <= usable:
            return 1
        room = usable - self._working_bytes
        return max(2, math.ceil(self._state_bytes / room)) if room > 0 else math.inf


def model_shape(problem: Problem) -> ModelShape:
    """The numbers of the problem's model that memory and traffic depend on; it states `ffn` or experts."""
    assert problem.model.token_ffn is not None
    return problem_shape(problem)


def scorer_bytes(problem: Problem) -> float:
    """What one scorer needs of its GPU for the task of scorers, which the problem has.

    Without `train_pack_tokens` its weights alone, as RM-1 counts frozen models. A model of another size is taken to
    need in proportion.
    """
    task = problem.workload.scored_task
    assert task is not None
    pack_tokens = problem.cost_model.train_pack_tokens
    if not pack_tokens:
        return 2.0 * problem.model.params * task.scale
    return frozen_bytes(model_shape(problem), pack_tokens) * task.scale


def _working_bytes(problem: Problem) -> tuple[float, float]:
    """Of one GPU alone, and of each of several; layers are recomputed where that takes less."""
    shape = model_shape(problem)

    def least(num_shards: int) -> float:
        modes = (
            TrainingMode(
                num_shards=num_shards,
                pack_tokens=problem.cost_model.train_pack_tokens,
                is_half=True,
                checkpoints_layers=checkpoints_layers,
            )
            for checkpoints_layers in (False, True)
        )
        return min(working_bytes(shape, mode) for mode in modes)

    return least(1), least(2)
