import itertools

import pytest

from services.scheduler.cost_model.reference import CostModel, Infeasible
from services.scheduler.planning.solve import solve
from services.scheduler.problem.plan_document import PlanDocument
from services.scheduler.solvers import exhaustive
from services.scheduler.solvers.divisions import Split, divisions, machine_splits, plan_of
from services.scheduler.solvers.exhaustive import ExhaustiveSolver
from services.scheduler.solvers.interface import ProblemTooLargeError
from tests.helpers.plans.problems import counted_scores, problem


def forever():
    return 1.0


@pytest.mark.parametrize(
    ("name", "optimum"),
    [("tiny_02", 13.170059514017444), ("tiny_04", 28.532045676101724), ("str_01", 11.394779396221843)],
)
def test_the_optimum_is_that_of_an_independent_enumeration(name, optimum):
    model = CostModel(problem(name))
    solution = ExhaustiveSolver().solve(model, time_left=forever, seed=0)

    assert solution.is_optimal
    assert solution.score.samples_per_second == pytest.approx(optimum, rel=1e-9)
    assert model.score(solution.plan) == solution.score


def test_bounds_leave_nothing_better_out():
    # Two small machines of two kinds, so that every plan can be scored here without bounds.
    model = CostModel(
        problem("tiny_02", "nodes=[{name: h800, gpu: H800, gpus: 4}, {name: h20, gpu: H20, gpus: 2, count: 2}]")
    )
    choices = [divisions(model, node, most=10_000, time_left=forever) for node in model.problem.nodes]
    best = max(model.score(plan_of(model, parts)).samples_per_second for parts in itertools.product(*choices))

    assert best > 0
    assert ExhaustiveSolver().solve(model, time_left=forever, seed=0).score.samples_per_second == best


def test_a_machine_is_idle_or_split_without_space_for_another_replica():
    model = CostModel(problem("tiny_04"))
    node = model.nodes["l4-0"]
    degrees = model.degrees["l4"]

    splits = list(machine_splits(model, node))
    assert degrees == (1, 2, 4, 8)
    assert len(set(splits)) == len(splits) == 37
    assert splits[0] == Split((0, 0, 0, 0), 0)
    for split in splits[1:]:
        assert sum(map(int.__mul__, split.replicas, degrees)) + split.train_gpus == 8


@pytest.mark.parametrize("prompts_per_step", [2, 4, 8])
def test_one_more_machine_never_makes_the_best_plan_slower(prompts_per_step):
    # So few samples are under way that a slow machine would take them from faster ones.
    fast = "{name: a, gpu: A100-80, gpus: 4, count: 2, region: r0}"
    slow = "{name: l, gpu: L4, gpus: 4, region: r0, nic_Gbps: 10}"
    without, with_it = (
        problem(
            "tiny_04",
            f"nodes=[{nodes}]",
            "links=[]",
            "workload.staleness=0",
            "model.params=4e9",
            "cost_model.sync_pause_s=0",
            f"workload.prompts_per_step={prompts_per_step}",
        )
        for nodes in (fast, f"{fast}, {slow}")
    )
    before, after = (
        ExhaustiveSolver().solve(CostModel(each), time_left=forever, seed=0).score.samples_per_second
        for each in (without, with_it)
    )

    assert after >= before > 0


def test_at_its_deadline_it_answers_with_the_best_so_far_and_a_bound_on_the_rest():
    model = CostModel(problem("tiny_04"))
    scored = counted_scores(model)
    solution = ExhaustiveSolver().solve(model, time_left=lambda: 1.0 if len(scored) < 3 else 0.0, seed=0)

    assert not solution.is_optimal
    assert solution.num_evaluated == 3
    assert isinstance(solution.plan, PlanDocument)
    assert solution.score.samples_per_second <= 28.532045676101724 <= solution.upper_bound_samples_per_second


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("model.params=60e9", "training needs 960 GB, and the largest group of GPUs (r0) offers 890 GB"),
        ("gpu_types.L4.hbm_GB=2", None),
        ("model.params=400e9", "no machine can generate: 800 GB of weights"),
    ],
)
def test_infeasible_is_an_answer_with_its_reason(override, told):
    stated = problem("tiny_04", override)
    solution = solve(CostModel(stated), "exhaustive", time_left=forever)

    assert (solution.plan is None) == (told is not None)
    if told is not None:
        assert isinstance(solution.score, Infeasible)
        assert told in solution.score.reason


def test_a_problem_with_too_many_plans_is_refused(monkeypatch):
    monkeypatch.setattr(exhaustive, "MAX_PLANS", 1000)

    with pytest.raises(ProblemTooLargeError, match="use --solver milp"):
        ExhaustiveSolver().solve(CostModel(problem("tiny_04")), time_left=forever, seed=0)
