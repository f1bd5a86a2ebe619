"""Defines the interface of every solver.

A solver is deterministic in its seed unless its time runs out. It has no clock: it asks how much time is left, and
returns its best plan once none is. Infeasible is an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.scheduler.cost_model.reference import CostModel, Infeasible, Score
from services.scheduler.problem.plan_document import PlanDocument
from services.scheduler.problem.problem import NodeClass

Plans = Sequence[PlanDocument]
TimeLeft = Callable[[], float]
"""Seconds left; 0 or less once the time is over."""

_LATE_S = 0.5
"""For how long a search without any plan goes on once its time is over."""


def part_of(time_left: TimeLeft, share: float) -> TimeLeft:
    """The first part of the time left now, as this share of it."""
    kept_s = time_left() * (1 - share)
    return lambda: time_left() - kept_s


def at_most(time_left: TimeLeft, seconds: float) -> TimeLeft:
    """That many seconds from now on, whether they are left or not."""
    kept_s = time_left() - seconds
    return lambda: time_left() - kept_s


def is_over(time_left: TimeLeft, found: Iterable[Solution]) -> bool:
    """Whether nothing more may be tried: time is over, and there is a plan, or there was a little more for the first.

    Nested searches have small shares of the time; each goes on until it has a plan, within bounds.
    """
    left_s = time_left()
    return left_s <= 0 and (left_s <= -_LATE_S or any(solution.plan is not None for solution in found))


@dataclass(frozen=True, slots=True)
class Solution:
    """The best plan found; if `plan` is None, `score` says why there is none."""

    plan: PlanDocument | None
    score: Score | Infeasible
    upper_bound_samples_per_second: float | None
    """No plan of the solver's space achieves more; None if it has no such bound."""
    is_optimal: bool
    """Whether the plan is proved to be the best in the solver's space."""
    num_evaluated: int
    """Number of scored plans."""
    solver: str


class Solver(Protocol):
    """A search for a good plan."""

    @property
    def name(self) -> str:
        """Its name in the registry."""

    def solve(self, model: CostModel, *, time_left: TimeLeft, seed: int, starts: Plans = ()) -> Solution:
        """The best plan found within the time, never worse than a starting one.

        Called only if memory allows a plan. `starts` are initial plans, from a run in progress or other solvers. Raises
        ProblemTooLargeError.
        """


class ProblemTooLargeError(Exception):
    """The solver cannot treat a problem of this size; the message names one that can."""


def infeasibility(model: CostModel) -> str | None:
    """Why no plan at all can run on this cluster; None if memory alone does not rule out all plans."""
    problem, demand = model.problem, model.demand
    if not any(model.degrees.values()):
        widest = max(problem.nodes, key=lambda node: node.gpus * model.usable_bytes[node.name])
        return (
            f"no machine can generate: {demand.weight_bytes / 1e9:.0f} GB of weights and a cache need tensor-parallel "
            f"GPUs of one machine, at most max_tp {problem.constraints.max_tp} of them and a divisor of "
            f"{problem.model.q_heads} heads; the largest machine ({widest.name}) has {widest.gpus} of "
            f"{model.usable_bytes[widest.name] / 1e9:.0f} GB"
        )
    groups: dict[str, list[NodeClass]] = {}
    for node in problem.nodes:
        group = node.region if problem.constraints.train_single_region else "the whole cluster"
        groups.setdefault(group, []).append(node)
    if any(model.pool_memory.least_pool(nodes) is not None for nodes in groups.values()):
        return None
    offered = {
        group: sum(node.count * node.gpus * model.usable_bytes[node.name] for node in nodes)
        for group, nodes in groups.items()
    }
    largest = max(offered, key=lambda group: offered[group])
    return (
        f"training needs {demand.training_state_bytes / 1e9:.0f} GB, and the largest group of GPUs ({largest}) "
        f"offers {offered[largest] / 1e9:.0f} GB"
    )
