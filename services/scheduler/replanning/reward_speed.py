"""Follows how fast a run's reward workers are, from their measurements. Pure.

A worker that was as busy as it may be reports what it scored. The median of the workers on machines with the same GPUs
replaces the time that the problem states for those.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

from penstock.v1 import scheduler_pb2 as pb
from services.scheduler.problem.plan_document import PlanDocument, node_classes
from services.scheduler.problem.problem import Problem

CHANGED_BY = 0.1
"""By how much a rate must change to be planned for again."""


def reward_rates(
    problem: Problem, plan: PlanDocument, views: Sequence[pb.NodeView], *, run_id: str, before: Mapping[str, float]
) -> dict[str, float]:
    """Samples per second of one reward worker by GPU type, where it was measured and is not what the problem states.

    Args:
        problem: The problem as stated.
        plan: The plan in force.
        views: The inventory. What the run's console reports is of the worker on the head.
        run_id: The run.
        before: The previous result, whose rates stay unless they changed by CHANGED_BY.
    """
    work, nodes = problem.workload.reward, node_classes(problem)
    if work is None:
        return {}
    head = nodes.get(plan.train[0].node) if plan.train else None
    measured: dict[str, list[float]] = defaultdict(list)
    for view in views:
        node = nodes.get(view.node.node_id, head)
        if not view.is_alive or node is None:
            continue
        for rate in view.rates:
            if rate.role == pb.ROLE_REWARD and rate.run_id == run_id and rate.samples_per_second > 0:
                measured[node.gpu].append(rate.samples_per_second)
    found = dict(before)
    for gpu, rates in measured.items():
        now = median(rates)
        if abs(now / found.get(gpu, work.samples_per_second(gpu)) - 1) > CHANGED_BY:
            found[gpu] = float(f"{now:.2g}")
    return found


def with_reward_rates(problem: Problem, rates: Mapping[str, float]) -> Problem:
    """The problem with these rates of reward workers."""
    work = problem.workload.reward
    if work is None or not rates:
        return problem
    stated = work.seconds_per_sample
    seconds = {**(stated if isinstance(stated, dict) else {"default": stated})}
    seconds |= {gpu: work.at_once / rate for gpu, rate in rates.items()}
    measured = work.model_copy(update={"seconds_per_sample": seconds})
    return problem.model_copy(update={"workload": problem.workload.model_copy(update={"reward": measured})})
