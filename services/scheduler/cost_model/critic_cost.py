"""Computes what a critic of its own needs and takes: a training pool on one machine, with tasks of its own.

The trainer has a pack's gradient computed while it computes the policy's, and both step side by side, so critic and
trainer are two stages of a pipeline unless they share GPUs: then their times add up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from penstock.model.training_memory import TrainingMode, working_bytes
from services.scheduler.cost_model.demand import demand_of
from services.scheduler.cost_model.network import Network
from services.scheduler.cost_model.pool_memory import PoolMemory, model_shape
from services.scheduler.cost_model.training_step import training_step
from services.scheduler.problem.plan_document import CriticPlace, PlanDocument
from services.scheduler.problem.problem import NodeClass, Problem

_BYTES_PER_TOKEN = 16
"""Of a pack, most of it from trainer to critic: docs/training.md, "A critic of its own"."""
_PACK_TOKENS = 4096
"""The trainer's, where the problem states none."""


class CriticModel:
    """The critic of one problem, by the rules for memory and steps of a pool without a mesh.

    Args:
        problem: The problem; without tasks of a critic no plan may have one.
        network: Its links.
        usable_bytes: Usable memory of a GPU, by node entry.
    """

    def __init__(self, problem: Problem, network: Network, usable_bytes: Mapping[str, float]) -> None:
        self.has_tasks = bool(problem.workload.critic_tasks)
        self._network, self._usable_bytes = network, usable_bytes
        tasks = tuple(task.model_copy(update={"is_service": False}) for task in problem.workload.critic_tasks)
        workload = problem.workload.model_copy(update={"train_tasks": tasks})
        # Rates of trainers were measured with the policy.
        own = (rate for rate in problem.measured_rates if rate.role == "critic")
        rates = tuple(rate.model_copy(update={"role": "trainer"}) for rate in own)
        self._problem = problem.model_copy(update={"workload": workload, "measured_rates": rates})
        self._demand = demand_of(self._problem)
        self._memory = PoolMemory(self._problem, self._demand, usable_bytes)

    @property
    def state_bytes(self) -> float:
        """Weights, gradients and optimiser, wherever they are."""
        return self._demand.training_state_bytes

    def gpu_bytes(self, gpus: int) -> float:
        """Memory of each of that many GPUs over which it is sharded."""
        return self._memory.needed_bytes(gpus)

    def fits(self, node: NodeClass, gpus: int) -> bool:
        """Whether GPUs of that entry have the memory."""
        return self.gpu_bytes(gpus) <= self._usable_bytes[node.name]

    def recomputes(self, place: CriticPlace, nodes: Mapping[str, NodeClass]) -> bool:
        """Whether it must compute activations again to have the memory there; beside the trainer it always does."""
        pack_tokens = self._problem.cost_model.train_pack_tokens
        if not pack_tokens:
            return False
        mode = TrainingMode(num_shards=place.gpus, pack_tokens=pack_tokens, is_half=True)
        kept = self._demand.training_state_bytes / place.gpus + working_bytes(model_shape(self._problem), mode)
        return place.is_beside_trainer or kept > self._usable_bytes[nodes[place.node].name]

    def step_s(self, node: NodeClass, gpus: int) -> float:
        """Values, gradients and optimiser steps for the samples of one step."""
        return training_step(self._problem, self._demand, self._network, [(node, gpus)]).step_s

    def compute_s(self, node: NodeClass, gpus: int) -> float:
        """The part of it that computes; the rest is exchange between the GPUs, and overhead."""
        return training_step(self._problem, self._demand, self._network, [(node, gpus)]).compute_s

    def error(self, plan: PlanDocument, nodes: Mapping[str, NodeClass]) -> str | None:
        """Why a plan's critic cannot be where it is; None if it can. Beside the trainer, memory is also the pool's."""
        place = plan.critic
        if place is None:
            names = ", ".join(task.name for task in self._problem.workload.train_tasks)
            return f"critic: unset, so nothing computes {names}" if self.has_tasks else None
        if not self.has_tasks:
            return "critic: no trained task of the workload is a service; leave it out"
        node = nodes[place.node]
        if math.isinf(self._exchange_s(plan, nodes)):
            home = nodes[plan.train[0].node].region
            return f"critic.node: no link joins {place.node} in region {node.region!r} and the head in {home!r}"
        if self.fits(node, place.gpus):
            return None
        return (
            f"critic.gpus: a critic needs {self.gpu_bytes(place.gpus) / 1e9:.1f} GB of each of {place.gpus} GPUs, and "
            f"one of {place.node} offers {self._usable_bytes[node.name] / 1e9:.1f} GB"
        )

    def samples_per_second(self, plan: PlanDocument, nodes: Mapping[str, NodeClass]) -> float:
        """The most that it keeps up with; infinite without one, and beside the trainer, whose step it lengthens."""
        if (place := plan.critic) is None or place.is_beside_trainer:
            return math.inf
        step_s = self.step_s(nodes[place.node], place.gpus) + self._exchange_s(plan, nodes)
        return self._demand.samples_per_step / step_s

    def _exchange_s(self, plan: PlanDocument, nodes: Mapping[str, NodeClass]) -> float:
        """What the trainer's calls take of a step between two regions; nothing within one.

        Samples travel once for their values, and once in packs for the gradient. The trainer waits for each pack.
        """
        assert plan.critic is not None
        home, region = nodes[plan.train[0].node].region, nodes[plan.critic.node].region
        if home == region:
            return 0.0
        tokens = self._demand.samples_per_step * self._demand.trained_tokens
        bytes_per_second = self._network.bytes_per_second(home, region)
        if bytes_per_second <= 0:
            return math.inf
        num_calls = 2 * max(1, math.ceil(tokens / (self._problem.cost_model.train_pack_tokens or _PACK_TOKENS)))
        latency_s = 2 * self._network.latency_s(home, region)
        return 2 * tokens * _BYTES_PER_TOKEN / bytes_per_second + num_calls * latency_s

    def added_s(self, place: CriticPlace | None, nodes: Mapping[str, NodeClass]) -> float:
        """By how much it lengthens each step of a trainer whose GPUs it shares."""
        if place is None or not place.is_beside_trainer:
            return 0.0
        return self.step_s(nodes[place.node], place.gpus)
