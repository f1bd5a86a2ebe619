"""Computes a step of the training pool: everything but generation, divided in proportion to speed.

Source: RM-1, "Other tasks" and "Training step".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from services.scheduler.cost_model.demand import Demand
from services.scheduler.cost_model.network import Network
from services.scheduler.problem.problem import NodeClass, Problem

Pool = Sequence[tuple[NodeClass, int]]
"""Machines of the pool, each with the number of its GPUs that are in it."""


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """Where a training step's time goes."""

    compute_s: float
    allreduce_s: float
    """Whole all-reduce, hidden or not; infinite if regions of the pool are not connected."""
    exposed_allreduce_s: float
    """The part that computation does not hide."""
    overhead_s: float

    @property
    def step_s(self) -> float:
        """Time of the whole step."""
        return self.compute_s + self.exposed_allreduce_s + self.overhead_s


def gpu_samples_per_second(problem: Problem, demand: Demand, node: NodeClass) -> float:
    """Rate of one GPU that does every task other than generation."""
    for rate in problem.measured_rates:
        if rate.role == "trainer" and rate.gpu == node.gpu:
            return rate.tokens_per_second / demand.trained_tokens
    peak = problem.gpu_types[node.gpu].tflops_bf16 * 1e12
    return 1 / sum(flops / (peak * problem.cost_model.mfu(node.gpu, kind)) for kind, flops in demand.task_flops)


def training_step(problem: Problem, demand: Demand, network: Network, pool: Pool) -> TrainingStep:
    """A step of this pool, which has at least one GPU."""
    constants = problem.cost_model
    samples_per_second = sum(gpus * gpu_samples_per_second(problem, demand, node) for node, gpus in pool)
    compute_s = demand.samples_per_step / samples_per_second
    allreduce_s = _allreduce_s(problem, demand, network, pool)
    return TrainingStep(
        compute_s=compute_s,
        allreduce_s=allreduce_s,
        exposed_allreduce_s=max(0.0, allreduce_s - constants.dp_overlap * compute_s),
        overhead_s=constants.train_overhead_s,
    )


def _allreduce_s(problem: Problem, demand: Demand, network: Network, pool: Pool) -> float:
    """A ring over the GPUs of one machine, over the NICs of several, or over the slowest link of several regions."""
    if len(pool) == 1:
        node, gpus = pool[0]
        members, bytes_per_second = gpus, problem.gpu_types[node.gpu].ar_bus_GBps * 1e9
    else:
        regions = sorted({node.region for node, _ in pool})
        between = [network.bytes_per_second(one, other) for one, other in combinations(regions, 2)]
        members = len(pool)
        bytes_per_second = min([node.nic_Gbps * 1e9 / 8 for node, _ in pool] + between)
    if members == 1:
        return 0.0
    traffic_bytes = 2 * (members - 1) / members * demand.gradient_bytes
    return traffic_bytes / bytes_per_second if bytes_per_second > 0 else math.inf
