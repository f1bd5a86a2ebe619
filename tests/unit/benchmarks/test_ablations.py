import pytest

from benchmarks.scheduler.ablations import reached, table
from services.scheduler.cost_model.reference import CostModel
from tests.helpers.plans.problems import counted_scores, problem

OPTIMUM = 13.170059514017444


def test_every_variant_has_the_same_budget_and_none_beats_the_optimum():
    model = CostModel(problem("tiny_02"))
    scored = counted_scores(model)
    found = reached(model, candidates=50, seed=0)

    assert all(0 < rate <= OPTIMUM * (1 + 1e-9) for rate in found.values())
    # Five searches of 50 candidates, the plan that some begin with, and the partition's own few.
    assert len(scored) <= 5 * 51 + 40
    assert found["full"] >= found["partition alone"]


def test_a_cell_is_the_mean_and_the_worst():
    assert table({"tiny": {"full": (0.99, 0.97)}}).splitlines()[-1] == "| tiny | 0.990 (0.970) |"
    with pytest.raises(StopIteration):
        table({})
