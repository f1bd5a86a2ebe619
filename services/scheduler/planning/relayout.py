"""Changes how replicas use their GPUs, tensor parallel or in stages, after a search has chosen how many each has.

Searches take the layout that is fastest at its largest batch. Where staleness bounds the samples under way, or machines
are few, another one of as many GPUs may be faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from services.scheduler.cost_model.reference import CostModel
from services.scheduler.problem.plan_document import PlanDocument
from services.scheduler.solvers.interface import Solution
from services.scheduler.solvers.scored import BETTER


def relaid(model: CostModel, solution: Solution) -> Solution:
    """The solution with the first better layouts for all replicas of an entry, or of a machine, until none is better.

    A plan that another layout improves was not proved optimal, nor does its bound hold.
    """
    while solution.plan is not None:
        for plan in _neighbours(model, solution.plan):
            score = model.score(plan)
            if score.samples_per_second > solution.score.samples_per_second * BETTER:
                bound = solution.upper_bound_samples_per_second
                if bound is not None and score.samples_per_second > bound:
                    bound = None
                solution = replace(
                    solution, plan=plan, score=score, is_optimal=False, upper_bound_samples_per_second=bound
                )
                break
        else:
            return solution
    return solution


def _neighbours(model: CostModel, plan: PlanDocument) -> Iterator[PlanDocument]:
    """Plans in which replicas have another layout of as many GPUs: all of their kind, or those of one machine."""
    for index, each in enumerate(plan.gen):
        entry = model.nodes[each.node].name
        for layout in model.layouts[entry]:
            if layout.gpus != each.layout.gpus or layout == each.layout:
                continue
            other = {"tp": layout.tp, "pp": layout.pp}
            everywhere = tuple(
                one.model_copy(update=other)
                if (model.nodes[one.node].name, one.layout) == (entry, each.layout)
                else one
                for one in plan.gen
            )
            yield plan.model_copy(update={"gen": everywhere})
            one_machine = (*plan.gen[:index], each.model_copy(update=other), *plan.gen[index + 1 :])
            yield plan.model_copy(update={"gen": one_machine})
