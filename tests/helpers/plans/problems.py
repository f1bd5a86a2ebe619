"""Planning problems for tests: reference instances, changed where a test asks for it, and plans in short."""

import json
from pathlib import Path

from penstock.config import apply_overrides
from services.scheduler.cost_model.reference import CostModel
from services.scheduler.problem.plan_document import PlanDocument
from services.scheduler.problem.problem import Problem

INSTANCES = Path(__file__).parent / "planning_instances"


def document(name: str, *overrides: str) -> dict:
    return apply_overrides(json.loads((INSTANCES / f"{name}.json").read_text()), overrides)


def problem(name: str, *overrides: str) -> Problem:
    return Problem.model_validate(document(name, *overrides))


def plan(gen: list[tuple[str, int, int]], train: list[tuple[str, int]]) -> PlanDocument:
    """Of (machine, tensor-parallel degree, replicas) and (machine, GPUs)."""
    return PlanDocument.model_validate(
        {
            "gen": [{"node": node, "tp": tp, "count": count} for node, tp, count in gen],
            "train": [{"node": node, "gpus": gpus} for node, gpus in train],
        }
    )


def counted_scores(model: CostModel) -> list[PlanDocument]:
    """Grows by each plan that is scored from now on."""
    scored: list[PlanDocument] = []
    score = model.score

    def counting(plan: PlanDocument):
        scored.append(plan)
        return score(plan)

    model.score = counting
    return scored
