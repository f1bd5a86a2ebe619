"""Follows for how long a run's sessions wait for their environment, from generators' measurements. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from penstock.v1 import scheduler_pb2 as pb
from services.scheduler.problem.problem import Problem
from services.scheduler.problem.workload import EnvironmentWork

CHANGED_BY = 0.1
"""By how much a wait must change to be planned for again."""


def environment_wait_s(problem: Problem, views: Sequence[pb.NodeView], *, before: float | None) -> float | None:
    """Seconds for which a session waits, the median of the machines that generate; None as the problem states it.

    Args:
        problem: The problem as stated.
        views: The inventory.
        before: The previous result, which stays unless it changed by CHANGED_BY.
    """
    rates = (rate for view in views if view.is_alive for rate in view.rates if rate.role == pb.ROLE_GENERATOR)
    measured = [rate.environment_wait_s for rate in rates if rate.HasField("environment_wait_s")]
    if not measured:
        return before
    environment = problem.workload.environment
    stated = 0.0 if environment is None else environment.wait_s
    now, known = median(measured), stated if before is None else before
    return before if abs(now - known) <= CHANGED_BY * known else float(f"{now:.2g}")


def with_environment_wait(problem: Problem, wait_s: float | None) -> Problem:
    """The problem with this wait."""
    if wait_s is None:
        return problem
    stated = problem.workload.environment or EnvironmentWork(wait_s=wait_s)
    update = {"environment": stated.model_copy(update={"wait_s": wait_s})}
    return problem.model_copy(update={"workload": problem.workload.model_copy(update=update)})
