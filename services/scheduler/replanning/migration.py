"""Computes the cost of putting a revised plan in force: how many generators are idle, and for how long. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median

from penstock.v1 import scheduler_pb2 as pb
from services.scheduler.cost_model.demand import demand_of
from services.scheduler.problem.problem import Problem

LIKE_WITHIN = 0.25
"""A generator restarts when its number of concurrent samples changes by more than this share."""

_Part = tuple[str, int, int, int]
"""Machine, role, tensor-parallel degree, pipeline stages."""


def stopped_share(before: pb.Plan, after: pb.Plan) -> float:
    """Share of a plan's generating GPUs that are idle while it replaces another plan, 0 to 1.

    These had another role, or the same in a process that must restart. If trainers change, or a critic of its own, all
    wait.
    """
    if any(_gpus(before, role) != _gpus(after, role) for role in (pb.ROLE_TRAINER, pb.ROLE_CRITIC)):
        return 1.0
    old, new = (_gpus(plan, pb.ROLE_GENERATOR) for plan in (before, after))
    held, wanted = ({_part(each): each.num_concurrent_samples for each in plan.assignments} for plan in (before, after))
    kept = (min(num, old[part]) for part, num in new.items() if part in old and is_like(held[part], wanted[part]))
    return 1 - sum(kept) / max(1, sum(new.values()))


def is_like(num_held: int, num_wanted: int) -> bool:
    """Whether a generator with one number of concurrent samples can keep running with another."""
    return abs(num_held - num_wanted) <= LIKE_WITHIN * num_wanted


def stands_still_s(problem: Problem, views: Sequence[pb.NodeView]) -> float:
    """How long a generator that changes is idle: it starts, taking the measured time, and loads weights."""
    starts_s = [view.generator_start_s for view in views if view.is_alive and view.HasField("generator_start_s")]
    start_s = median(starts_s) if starts_s else 0.0
    slowest_nic = min(node.nic_Gbps for node in problem.nodes) * 1e9 / 8
    return start_s + demand_of(problem).weight_bytes / slowest_nic + problem.cost_model.sync_pause_s


def _part(each: pb.Assignment) -> _Part:
    return each.node_id, each.role, each.tensor_parallel, each.pipeline_parallel


def _gpus(plan: pb.Plan, role: pb.Role.ValueType) -> Counter[_Part]:
    gpus: Counter[_Part] = Counter()
    for each in plan.assignments:
        if each.role == role:
            stated = max(1, each.tensor_parallel) * max(1, each.pipeline_parallel) * max(1, each.num_replicas)
            gpus[_part(each)] += len(each.accelerator_indices) or stated
    return gpus
