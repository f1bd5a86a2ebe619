"""The portfolio with places of services: never worse than a member, nor than the best of all places."""

import itertools
from collections.abc import Iterator

import pytest

from services.scheduler.cost_model.reference import CostModel
from services.scheduler.planning.solve import solve
from services.scheduler.planning.worker_placement import with_workload, without_gpus
from services.scheduler.problem.plan_document import CriticPlace, GpuWorkers, PlanDocument
from services.scheduler.problem.problem import Problem
from services.scheduler.solvers.divisions import divisions, plan_of
from services.scheduler.solvers.exhaustive import ExhaustiveSolver
from services.scheduler.solvers.interface import ProblemTooLargeError, infeasibility
from services.scheduler.solvers.registry import AUTO, SOLVERS
from tests.helpers.plans.drawn_services import CRITIC, SCORED, CountedTime, drawn_with_services

BUDGET = 1000
"""Plans that each search may score: as many as members that end by themselves need together here."""
MOST_WORKERS = 3


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.grid) for seed in (4, 7))])
def test_auto_is_never_worse_than_a_member_with_the_same_budget(seed):
    problem = drawn_with_services(seed)
    rates = {}
    with CountedTime() as time:
        for name in SOLVERS:
            try:
                solution = solve(CostModel(problem), name, time_left=time.budget(BUDGET), seed=seed)
            except ProblemTooLargeError:
                continue
            rates[name] = solution.score.samples_per_second
            assert solution.solver == name
    assert rates[AUTO] >= max(rates.values()) * (1 - 1e-9) > 0, rates


@pytest.mark.parametrize(("seed", "services"), [(1, [SCORED]), (3, CRITIC)])
def test_auto_is_as_good_as_the_best_of_all_places(seed, services):
    problem = drawn_with_services(seed)
    tasks = [task for task in problem.model_dump(mode="json")["workload"]["train_tasks"] if not task["is_service"]]
    stated = problem.model_dump(by_alias=True, mode="json")
    stated["workload"] |= {"train_tasks": [*tasks, *services], "reward": None}
    problem = Problem.model_validate(stated)
    model = CostModel(problem)
    best = max(model.score(plan).samples_per_second for plan in every_plan(model))
    with CountedTime() as time:
        found = solve(model, AUTO, time_left=time.budget(BUDGET)).score.samples_per_second
    assert found >= 0.995 * best > 0


def every_plan(model: CostModel) -> Iterator[PlanDocument]:
    """For each place of critic and scorers the best plan of the rest; beside a trainer all plans of the rest."""
    workload, nodes = model.problem.workload, model.nodes
    own = [CriticPlace(node=name, gpus=gpus) for name in nodes for gpus in range(1, nodes[name].gpus + 1)]
    for critic in [*own, None] if workload.critic_tasks else [None]:
        taken = {critic.node: critic.gpus} if critic is not None else {}
        for counts in itertools.product(range(MOST_WORKERS + 1), repeat=len(nodes)):
            if (sum(counts) > 0) != (workload.scored_task is not None) or sum(counts) > MOST_WORKERS:
                continue
            workers = {name: count for name, count in zip(nodes, counts, strict=True) if count}
            used = {name: taken.get(name, 0) + workers.get(name, 0) for name in nodes}
            if any(count > nodes[name].gpus for name, count in used.items()):
                continue
            score = tuple(GpuWorkers(node=name, gpus=count) for name, count in workers.items())
            rest = without_gpus(with_workload(model.problem, train_tasks=workload.pool_tasks), used)
            if not rest.nodes or infeasibility(alone := model.over(rest)) is not None:
                continue
            if critic is not None or not workload.critic_tasks:
                plan = ExhaustiveSolver().solve(alone, time_left=lambda: 1000.0, seed=0).plan
                if plan is not None:
                    yield plan.model_copy(update={"critic": critic, "score": score})
                continue
            options = [divisions(alone, node, most=10_000, time_left=lambda: 1000.0) for node in rest.nodes]
            for parts in itertools.product(*options):
                plan = plan_of(alone, parts)
                for share in plan.train:
                    beside = CriticPlace(node=share.node, gpus=share.gpus, is_beside_trainer=True)
                    yield plan.model_copy(update={"critic": beside, "score": score})
