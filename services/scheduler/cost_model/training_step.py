"""Computes a step of the training pool: everything but generation, divided in proportion to speed.

Source: RM-1, "Other tasks" and "Training step".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from penstock.model.training_memory import TrainingMode
from penstock.model.training_traffic import gathered_bytes, reduced_bytes
from services.scheduler.cost_model.demand import Demand
from services.scheduler.cost_model.network import Network
from services.scheduler.cost_model.pool_memory import model_shape
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
    critic_s: float = 0.0
    """Of a critic of its own on the trainer's GPUs."""

    @property
    def step_s(self) -> float:
        """Time of the whole step."""
        return self.compute_s + self.exposed_allreduce_s + self.overhead_s + self.critic_s


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
    is_sharded = constants.train_pack_tokens > 0
    exchange = _gathers_and_sums_s if is_sharded else _allreduce_s
    allreduce_s = exchange(problem, demand, network, pool)
    return TrainingStep(
        compute_s=compute_s,
        allreduce_s=allreduce_s,
        exposed_allreduce_s=max(0.0, allreduce_s - constants.dp_overlap * compute_s),
        overhead_s=constants.train_overhead_s,
    )


def _allreduce_s(problem: Problem, demand: Demand, network: Network, pool: Pool) -> float:
    """One sum of 16-bit gradients.

    A ring over the GPUs of one machine, over the NICs of several, or over the slowest link of several regions.
    """
    members = pool[0][1] if len(pool) == 1 else len(pool)
    return _ring_s(problem, network, pool, members=members, traffic_bytes=2 * demand.gradient_bytes)


def _gathers_and_sums_s(problem: Problem, demand: Demand, network: Network, pool: Pool) -> float:
    """What Penstock's trainer exchanges: weights for every pass, and gradients after every backward pass.

    All GPUs take part in every pass, so the one with the most tokens sets their number. Source:
    `penstock.model.training_traffic`, whose bytes are counted in the trainer's tests.
    """
    shape, num_gpus = model_shape(problem), sum(gpus for _, gpus in pool)
    mode = TrainingMode(num_shards=num_gpus, pack_tokens=problem.cost_model.train_pack_tokens, is_half=True)
    traffic_bytes = 0.0
    for task in problem.workload.pool_tasks:
        passes = num_passes(problem, demand, pool) * task.epochs
        is_trained = task.kind == "train"
        gathered = gathered_bytes(
            shape, mode, num_passes=passes if is_trained else 0, num_scoring_passes=0 if is_trained else passes
        )
        traffic_bytes += task.scale * (gathered + reduced_bytes(shape, mode, num_passes=passes if is_trained else 0))
    return _ring_s(problem, network, pool, members=num_gpus, traffic_bytes=traffic_bytes)


def num_passes(problem: Problem, demand: Demand, pool: Pool) -> int:
    """Packs of a step on the GPU that gets the most tokens; tokens are divided in proportion to speed."""
    rates = [gpu_samples_per_second(problem, demand, node) for node, _ in pool]
    total = sum(gpus * rate for (_, gpus), rate in zip(pool, rates, strict=True))
    tokens = demand.samples_per_step * demand.trained_tokens * max(rates) / total
    return max(1, math.ceil(tokens / problem.cost_model.train_pack_tokens))


def _ring_s(problem: Problem, network: Network, pool: Pool, *, members: int, traffic_bytes: float) -> float:
    """Each of a ring's members sends all of the traffic but its own part, over the slowest of its connections."""
    if members == 1:
        return 0.0
    if len(pool) == 1:
        bytes_per_second = problem.gpu_types[pool[0][0].gpu].ar_bus_GBps * 1e9
    else:
        regions = sorted({node.region for node, _ in pool})
        between = [network.bytes_per_second(one, other) for one, other in combinations(regions, 2)]
        bytes_per_second = min([node.nic_Gbps * 1e9 / 8 for node, _ in pool] + between)
    traffic = (members - 1) / members * traffic_bytes
    return traffic / bytes_per_second if bytes_per_second > 0 else math.inf
