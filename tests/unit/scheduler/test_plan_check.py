"""The validator: plans of solvers pass, plans that were tampered with do not, and it agrees with the cost model."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.cost_model.reference import CostModel, Infeasible
from services.scheduler.planning.solve import solve
from services.scheduler.problem.plan_check import InvalidPlanError, check_plan, violations
from services.scheduler.problem.plan_document import PlanDocument
from services.scheduler.solvers.interface import Solution
from services.scheduler.solvers.registry import SOLVERS, Entry
from tests.helpers.plans.drawn_problems import drawn
from tests.helpers.plans.problems import plan, problem

GOOD = plan([("l40s-0", 1, 8), ("l4-0", 2, 4)], [("a100-0", 8)])


def ample():
    return 1000.0


def tampered(document: PlanDocument, **changed: object) -> PlanDocument:
    """The first replicas or the first share of the pool, changed."""
    stated = document.model_dump()
    for key, value in changed.items():
        part, field = key.split("_", 1)
        stated[part][0][field] = value
    return PlanDocument.model_validate(stated)


@pytest.mark.parametrize("solver", ["auto", *SOLVERS])
@pytest.mark.parametrize("seed", range(4))
def test_every_solvers_plan_passes(solver, seed):
    stated = drawn(seed)
    solution = solve(CostModel(stated), solver, time_left=ample, seed=seed)

    assert solution.plan is not None
    assert violations(stated, solution.plan) == []


def test_a_good_plan_has_no_violations():
    check_plan(problem("tiny_04"), GOOD, solver="hand")
    assert violations(problem("tiny_04"), GOOD) == []


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (tampered(GOOD, gen_count=9), "gen and train: 9 GPUs of machine l40s-0 are used, and it has 8"),
        (tampered(GOOD, train_gpus=9), "gen and train: 9 GPUs of machine a100-0 are used, and it has 8"),
        (tampered(GOOD, gen_node="a100-0", gen_count=1), "gen and train: 9 GPUs of machine a100-0"),
        (tampered(GOOD, gen_node="l40s-9"), "gen.0.node: there is no machine 'l40s-9'"),
        (tampered(GOOD, train_node="b200-0"), "train.0.node: there is no machine 'b200-0'"),
        (tampered(GOOD, gen_tp=3, gen_count=1), "gen.0.tp: 3 is not a power of two up to 8"),
        (tampered(GOOD, gen_tp=16, gen_count=1), "gen.0.tp: 16 is not a power of two up to 8"),
        (tampered(GOOD, gen_tp=16, gen_count=1), "gen.0.tp: 16 divides not both 8 GPUs and 32 query heads"),
        (tampered(GOOD, train_gpus=1), "train: the tasks need 131.0 GB, and the pool's 1 GPUs offer 70.0 GB"),
        (PlanDocument(gen=GOOD.gen), "train: empty"),
        (PlanDocument(train=GOOD.train), "gen: empty"),
        (PlanDocument(gen=GOOD.gen, train=GOOD.train * 2), "train: machine a100-0 is listed 2 times"),
        (
            plan([("l4-1", 2, 4)], [("a100-0", 4), ("l4-0", 4)]),
            "train: the pool spans the regions r0, r1, and constraints.train_single_region is set",
        ),
    ],
)
def test_a_plan_that_was_tampered_with_is_refused_with_the_field(bad, told):
    assert any(each.startswith(told) for each in violations(problem("tiny_04"), bad)), violations(
        problem("tiny_04"), bad
    )


def test_weights_that_do_not_fit_and_regions_without_a_link_are_refused():
    large = problem("tiny_04", "model.params=11e9", "links=[]")

    told = "; ".join(violations(large, GOOD))
    assert "gen.1.node: no link brings weights to l4-0 in region 'r1'" in told
    assert "train: the tasks need 176.0 GB" not in told
    narrow = tampered(plan([("l4-0", 1, 8)], [("a100-0", 8)]))
    assert violations(large, narrow)[0].startswith("gen.0.tp: 1 GPUs of l4-0 offer 19.6 GB")
    spread = problem("tiny_04", "constraints.train_single_region=false", "links=[]")
    assert violations(spread, plan([("l40s-0", 1, 8)], [("a100-0", 8), ("l4-0", 8)])) == [
        "train: the pool spans 'r0' and 'r1', which no link joins"
    ]


_GEN = st.tuples(
    st.sampled_from(["a100-0", "l40s-0", "l4-0", "l4-1"]), st.sampled_from([1, 2, 3, 4, 8]), st.integers(1, 4)
)
_TRAIN = st.tuples(st.sampled_from(["a100-0", "l40s-0", "l4-0", "l4-1"]), st.integers(1, 8))


@settings(max_examples=150, deadline=None)
@given(
    gen=st.lists(_GEN, max_size=3),
    train=st.lists(_TRAIN, max_size=3),
    params=st.sampled_from([4e9, 8e9, 20e9]),
    is_single=st.booleans(),
    has_link=st.booleans(),
)
def test_it_agrees_with_the_cost_model_on_any_plan(gen, train, params, is_single, has_link):
    overrides = [f"model.params={params}", f"constraints.train_single_region={str(is_single).lower()}"]
    stated = problem("tiny_04", *overrides, *([] if has_link else ["links=[]"]))
    candidate = plan(gen, train)

    score, found = CostModel(stated).score(candidate), violations(stated, candidate)
    if isinstance(score, Infeasible):
        assert found or "fresh enough" in score.reason
    else:
        # The cost model lets a replica that no weights reach make nothing; a plan that deploys it is refused.
        assert all("no link brings weights" in each for each in found)


class Wrong:
    name = "wrong"

    def solve(self, model, *, time_left, seed, starts):
        bad = plan([("l40s-0", 1, 8), ("l4-0", 16, 1)], [("a100-0", 8)])
        return Solution(bad, model.score(GOOD), None, False, 1, self.name)


class Wasteful:
    name = "wasteful"

    def solve(self, model, *, time_left, seed, starts):
        return Solution(GOOD, model.score(GOOD), None, False, 1, self.name)


def test_a_solvers_invalid_plan_is_never_handed_out(monkeypatch):
    monkeypatch.setitem(SOLVERS, "wrong", Entry(f"{__name__}:Wrong"))
    with pytest.raises(InvalidPlanError, match=r"solver wrong made a plan that cannot run: gen and train: 16 GPUs"):
        solve(CostModel(problem("tiny_04")), "wrong", time_left=ample)


def test_replicas_that_add_nothing_are_left_out(monkeypatch):
    model = CostModel(problem("tiny_04", "links=[]"))
    monkeypatch.setitem(SOLVERS, "wasteful", Entry(f"{__name__}:Wasteful"))
    solution = solve(model, "wasteful", time_left=ample)

    # No link brings weights to l4-0.
    assert [each.node for each in solution.plan.gen] == ["l40s-0"]
    assert solution.score == model.score(solution.plan)
