"""Follows how fast a run's trainers are, from their measurements. Pure.

A run reports at how many samples per second all its training processes together train while they compute. Compared with
the step that the cost model expects of the plan's training pool this gives the pool's speed, which replaces the
computed rates of its GPU types. Types that train nothing keep theirs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.v1 import scheduler_pb2 as pb
from services.scheduler.cost_model.demand import demand_of
from services.scheduler.cost_model.reference import CostModel
from services.scheduler.cost_model.training_step import gpu_samples_per_second
from services.scheduler.problem.plan_document import PlanDocument, node_classes
from services.scheduler.problem.problem import MeasuredRate, Problem

CHANGED_BY = 0.1
"""By how much the speed must change to be planned for again."""
_BOUNDS = (0.01, 100.0)
"""A speed beyond them is no measurement of this pool."""
_LEAST_COMPUTE_SHARE = 0.1
"""Of a measured step: the rest may be the exchange that the cost model expects, which then is too slow itself."""


def trainer_speed(
    problem: Problem, plan: PlanDocument, views: Sequence[pb.NodeView], *, run_id: str, before: float
) -> float:
    """Measured over computed rate of the GPUs of the plan's training pool; 1 is as fast as computed.

    Args:
        problem: The problem as stated, with current lengths.
        plan: The plan in force.
        views: The inventory.
        run_id: The run.
        before: The previous result, which stays unless it changed by CHANGED_BY, or while nothing is measured.
    """
    measured = _measured(views, run_id)
    nodes = node_classes(problem)
    if measured is None or not plan.train or any(share.node not in nodes for share in plan.train):
        return before
    demand = demand_of(problem)
    expected = CostModel(problem).pools.step(plan, nodes)
    step_s = demand.samples_per_step / measured
    compute_s = max(_LEAST_COMPUTE_SHARE * step_s, step_s - (expected.step_s - expected.compute_s))
    if not math.isfinite(compute_s):
        return before
    speed = expected.compute_s / compute_s
    if not _BOUNDS[0] <= speed <= _BOUNDS[1] or abs(speed / before - 1) <= CHANGED_BY:
        return before
    return float(f"{speed:.2g}")


def with_trainer_speed(problem: Problem, plan: PlanDocument, speed: float) -> Problem:
    """The problem with this speed of the GPU types that train by the plan, as measured rates."""
    nodes, demand = node_classes(problem), demand_of(problem)
    pool = {nodes[share.node].gpu: nodes[share.node] for share in plan.train if share.node in nodes}
    if speed == 1.0 or not pool:
        return problem
    kept = [rate for rate in problem.measured_rates if not (rate.role == "trainer" and rate.gpu in pool)]
    found = [
        MeasuredRate(
            gpu=gpu,
            role="trainer",
            tokens_per_second=speed * gpu_samples_per_second(problem, demand, node) * demand.trained_tokens,
        )
        for gpu, node in pool.items()
    ]
    return problem.model_copy(update={"measured_rates": (*kept, *found)})


def _measured(views: Sequence[pb.NodeView], run_id: str) -> float | None:
    """Samples per second of the run's trainers, by the newest report; None if there is none."""
    found = [
        (view.report_time.ToMilliseconds(), rate.samples_per_second)
        for view in views
        if view.is_alive
        for rate in view.rates
        if rate.role == pb.ROLE_TRAINER and rate.run_id == run_id and rate.samples_per_second > 0
    ]
    return max(found)[1] if found else None
