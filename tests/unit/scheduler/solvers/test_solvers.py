"""The papers' three solvers and the portfolio: what each finds, counts and keeps to."""

import itertools

import pytest

from services.scheduler.cost_model.reference import CostModel, Infeasible, Limit
from services.scheduler.planning.solve import _checked, solve
from services.scheduler.solvers.exhaustive import ExhaustiveSolver
from services.scheduler.solvers.multilevel import MultilevelSolver
from services.scheduler.solvers.partition import PartitionSolver
from services.scheduler.solvers.registry import SOLVERS
from services.scheduler.solvers.scored import ordered_nodes, parts_of
from services.scheduler.solvers.streamrl_allocation import StreamRlSolver
from tests.helpers.plans.drawn_problems import drawn
from tests.helpers.plans.problems import counted_scores, plan, problem

PAPERS = [PartitionSolver(), StreamRlSolver(), MultilevelSolver(max_candidates=600)]
OPTIMUM = {"tiny_02": 13.170059514017444, "tiny_04": 28.532045676101724, "str_01": 11.394779396221843}


def ample():
    return 1000.0


@pytest.mark.parametrize("solver", PAPERS, ids=lambda solver: solver.name)
@pytest.mark.parametrize("seed", range(3))
def test_a_solver_never_exceeds_the_optimum_and_counts_every_plan_it_scores(solver, seed):
    model = CostModel(drawn(seed))
    truth = ExhaustiveSolver().solve(model, time_left=ample, seed=0).score.samples_per_second
    scored = counted_scores(model)
    solution = solver.solve(model, time_left=ample, seed=seed)

    assert 0 < solution.score.samples_per_second <= truth * (1 + 1e-9)
    assert solution.num_evaluated == len(scored)
    assert model.score(solution.plan) == solution.score


@pytest.mark.parametrize("solver", PAPERS, ids=lambda solver: solver.name)
def test_the_same_seed_gives_the_same_plan_and_time_ends_a_search(solver):
    first, second = (solver.solve(CostModel(problem("tiny_02")), time_left=ample, seed=3) for _ in range(2))
    assert first == second

    answers = itertools.chain([1.0], itertools.repeat(0.0))
    hurried = solver.solve(CostModel(problem("tiny_04")), time_left=lambda: next(answers), seed=0)
    assert hurried.num_evaluated <= 6


@pytest.mark.parametrize("solver", SOLVERS)
def test_what_fits_nowhere_is_an_answer(solver):
    solution = solve(CostModel(problem("tiny_04", "model.params=60e9")), solver, time_left=ample)

    assert solution.plan is None
    assert isinstance(solution.score, Infeasible)
    assert (solution.solver, solution.num_evaluated, solution.upper_bound_samples_per_second) == (solver, 0, 0.0)


@pytest.mark.parametrize("solver", PAPERS, ids=lambda solver: solver.name)
def test_a_plan_to_start_from_is_never_made_worse(solver):
    model = CostModel(problem("tiny_04"))
    best = ExhaustiveSolver().solve(model, time_left=ample, seed=0)
    answers = itertools.chain([1.0, 1.0], itertools.repeat(0.0))
    solution = solver.solve(model, time_left=lambda: next(answers), seed=0, starts=[best.plan])

    assert solution.score.samples_per_second == pytest.approx(best.score.samples_per_second)


def test_the_alternation_puts_compute_into_training_and_bandwidth_into_generation():
    solution = PartitionSolver().solve(CostModel(problem("tiny_02")), time_left=ample, seed=0)

    trains = {share.node: share.gpus for share in solution.plan.train}
    assert trains["h800-0"] >= 6 * trains.get("h20-0", 1)
    assert solution.score.samples_per_second == pytest.approx(OPTIMUM["tiny_02"], rel=0.005)
    assert solution.num_evaluated < 30


def test_one_site_is_split_so_that_no_other_count_is_better():
    # 32 equal GPUs, each count of training GPUs with the best degree: what the allocation enumerates.
    model = CostModel(problem("str_01", "constraints.tail_blocking=false"))
    solution = StreamRlSolver().solve(model, time_left=ample, seed=0)
    by_hand = max(
        model.score(plan([(f"h800-{i}", 1, 8) for i in range(count, 4)], [(f"h800-{i}", 8) for i in range(count)]))
        .samples_per_second
        for count in (1, 2, 3)
    )  # fmt: skip

    assert solution.score.samples_per_second >= by_hand > 0


def test_across_sites_the_slower_stage_has_its_whole_site():
    model = CostModel(problem("tiny_02"))
    scored = counted_scores(model)
    solution = StreamRlSolver().solve(model, time_left=ample, seed=0)

    assert {share.node for share in solution.plan.train} == {"h800-0"}
    assert {each.node for each in solution.plan.gen} == {"h20-0"}
    assert solution.score.limit is Limit.GENERATION
    assert sum(each.count * each.tp for each in solution.plan.gen) == 8
    # Training is the faster stage of this pair of groups: it alone was made smaller.
    sizes = [
        (sum(each.count * each.tp for each in tried.gen), tried.train[0].gpus)
        for tried in scored
        if {each.node for each in tried.gen} == {"h20-0"} and {each.node for each in tried.train} == {"h800-0"}
    ]
    assert {generating for generating, _ in sizes} == {8}
    assert min(training for _, training in sizes) < 8


@pytest.mark.slow
def test_the_five_levels_find_the_optimum_of_small_problems():
    for name in ("tiny_02", "tiny_04"):
        solution = MultilevelSolver(max_candidates=6000).solve(CostModel(problem(name)), time_left=ample, seed=1)
        assert solution.score.samples_per_second == pytest.approx(OPTIMUM[name], rel=0.005)


def test_candidates_are_counted_to_the_last():
    class Counting(CostModel):
        pass

    for most in (1, 37, 300):
        model = Counting(problem("tiny_04"))
        scored = counted_scores(model)
        MultilevelSolver(max_candidates=most).solve(model, time_left=ample, seed=0)
        assert 0 < len(scored) <= most


def test_what_is_left_out_of_a_plan_makes_it_no_slower():
    for seed in range(3):
        model = CostModel(drawn(seed))
        found = MultilevelSolver(max_candidates=400).solve(model, time_left=ample, seed=seed)
        assert _checked(model, found).score.samples_per_second >= found.score.samples_per_second * (1 - 1e-9) > 0


def test_auto_is_never_worse_than_a_member_and_says_who_won(monkeypatch):
    from services.scheduler.solvers import exhaustive

    monkeypatch.setattr(exhaustive, "MAX_PLANS", 10)
    model = CostModel(drawn(1))
    members = {
        name: solve(model, name, time_left=ample).score.samples_per_second for name in SOLVERS if name != "exhaustive"
    }

    assert members["auto"] >= max(members.values()) * (1 - 1e-9)
    assert solve(model, "auto", time_left=ample).solver in SOLVERS


def test_order_and_names_of_machines_do_not_change_the_walk():
    stated = problem("tiny_04")
    renamed = [
        node.model_copy(update={"name": f"x{9 - index}"}) for index, node in reversed(list(enumerate(stated.nodes)))
    ]
    other = stated.model_copy(update={"nodes": tuple(renamed)})

    assert [node.gpu for node in ordered_nodes(stated)] == [node.gpu for node in ordered_nodes(other)]
    for solver in PAPERS:
        one, same = (solver.solve(CostModel(each), time_left=ample, seed=5) for each in (stated, other))
        assert one.score.samples_per_second == pytest.approx(same.score.samples_per_second)


def test_a_running_plan_is_carried_to_the_machines_that_are_left():
    model = CostModel(problem("tiny_04", "nodes=[{name: a100, gpu: A100-80, gpus: 8, region: r0}]", "links=[]"))
    running = plan([("l40s-0", 1, 8), ("a100-0", 2, 3)], [("a100-0", 4)])

    (part,) = parts_of(model, running)
    assert part.splits[0].train_gpus == 4
    # Only four GPUs are left beside training, so two of the three replicas of two.
    assert dict(zip(model.degrees["a100"], part.splits[0].replicas, strict=True))[2] == 2
