"""What every solver takes and gives.

A solver is deterministic in its seed where its time does not run out. It owns no clock: it asks how much time is left,
and when none is, it answers with the best it has. Infeasible is an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.scheduler.cost_model.reference import CostModel, Infeasible, Score
from services.scheduler.problem.plan_document import PlanDocument

Plans = Sequence[PlanDocument]
TimeLeft = Callable[[], float]
"""Seconds left; not above 0 when the time is over."""


@dataclass(frozen=True, slots=True)
class Solution:
    """The best plan that was found; `plan` is None when there is none, and `score` then says why."""

    plan: PlanDocument | None
    score: Score | Infeasible
    upper_bound_samples_per_second: float | None
    """No plan of the solver's space achieves more; None when it has no such bound."""
    is_optimal: bool
    """Nothing in the solver's space is better."""
    num_evaluated: int
    """Plans that were scored."""
    solver: str


class Solver(Protocol):
    """A way to find a good plan."""

    @property
    def name(self) -> str:
        """Its name in the registry."""

    def solve(self, model: CostModel, *, time_left: TimeLeft, seed: int, starts: Plans = ()) -> Solution:
        """The best plan it finds until its time is over, never worse than one it starts from.

        Called only where memory allows a plan. `starts` are plans to begin with: of a run that is under way, or of
        other solvers. Raises ProblemTooLargeError.
        """


class ProblemTooLargeError(Exception):
    """The solver cannot treat a problem of this size; the message says which can."""


def infeasibility(model: CostModel) -> str | None:
    """Why no plan at all can run on this cluster; None when memory alone does not forbid one."""
    problem, demand = model.problem, model.demand
    if not any(model.degrees.values()):
        widest = max(problem.nodes, key=lambda node: node.gpus * model.usable_bytes[node.name])
        return (
            f"no machine can generate: {demand.weight_bytes / 1e9:.0f} GB of weights and a cache need tensor-parallel "
            f"GPUs of one machine, at most max_tp {problem.constraints.max_tp} of them and a divisor of "
            f"{problem.model.q_heads} heads; the largest machine ({widest.name}) has {widest.gpus} of "
            f"{model.usable_bytes[widest.name] / 1e9:.0f} GB"
        )
    offered: dict[str, float] = {}
    for node in problem.nodes:
        group = node.region if problem.constraints.train_single_region else "the whole cluster"
        offered[group] = offered.get(group, 0.0) + node.count * node.gpus * model.usable_bytes[node.name]
    largest = max(offered, key=lambda group: offered[group])
    if offered[largest] < demand.training_state_bytes:
        return (
            f"training needs {demand.training_state_bytes / 1e9:.0f} GB, and the largest group of GPUs ({largest}) "
            f"offers {offered[largest] / 1e9:.0f} GB"
        )
    return None
