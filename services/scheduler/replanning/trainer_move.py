"""Computes what it costs to move a run's trainer to other machines, and which machines cannot take it. Pure.

A move is: the step under way is given up, a checkpoint is written, the processes end, others start elsewhere and read
it. Nothing is trained meanwhile, and generators soon wait for the next version.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from penstock.v1 import scheduler_pb2 as pb
from services.scheduler.cost_model.demand import demand_of
from services.scheduler.problem.plan_document import PlanDocument, TrainShare, node_classes
from services.scheduler.problem.problem import Problem

START_S = 60.0
"""Start of a trainer's processes where no machine has measured how long even a generator takes."""


def is_moved(before: PlanDocument, after: PlanDocument) -> bool:
    """Whether the training pool differs, in machines, their number of GPUs, or the mesh that they are."""
    pools = [[(share.node, share.gpus) for share in plan.train] for plan in (before, after)]
    if before.mesh is None and after.mesh is None:
        return {*pools[0]} != {*pools[1]}
    return (pools[0], before.mesh) != (pools[1], after.mesh)


def moving_s(problem: Problem, before: PlanDocument, after: PlanDocument, views: Sequence[pb.NodeView]) -> float:
    """How long nothing is trained while the pool of one plan takes over from that of another, seconds.

    As long as machines measured that a trainer took to move to them, the median. Before there is such a measurement the
    state is written and read at the pools' network speed, as to storage that machines share, where a pool that is gone
    writes nothing, and starting takes as long as a generator's start was measured to take.
    """
    if moves_s := [view.trainer_move_s for view in views if view.is_alive and view.HasField("trainer_move_s")]:
        return median(moves_s)
    starts_s = [view.generator_start_s for view in views if view.is_alive and view.HasField("generator_start_s")]
    start_s = median(starts_s) if starts_s else START_S
    state_bytes = demand_of(problem).training_state_bytes
    speeds = [_bytes_per_second(problem, pool) for pool in (before.train, after.train)]
    return start_s + sum(state_bytes / speed for speed in speeds if speed > 0)


def not_training(views: Sequence[pb.NodeView]) -> frozenset[str]:
    """Machines that have registered for other roles than a trainer's."""
    return frozenset(view.node.node_id for view in views if view.node.roles and pb.ROLE_TRAINER not in view.node.roles)


def _bytes_per_second(problem: Problem, pool: Sequence[TrainShare]) -> float:
    nodes = node_classes(problem)
    return sum(nodes[share.node].nic_Gbps for share in pool if share.node in nodes) * 1e9 / 8
