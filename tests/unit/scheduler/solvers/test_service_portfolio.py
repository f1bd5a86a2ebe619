"""The portfolio with places of services: never worse than a member, nor than the best of all plans."""

import itertools
from collections.abc import Iterator
from time import process_time

import pytest

from services.scheduler.cost_model.reference import CostModel
from services.scheduler.planning.solve import solve
from services.scheduler.problem.plan_check import violations
from services.scheduler.problem.plan_document import CriticPlace, GpuWorkers, PlanDocument, Replicas, TrainShare
from services.scheduler.problem.problem import NodeClass, Problem
from services.scheduler.service_placement import placement_space
from services.scheduler.service_placement.every_placement import best_of_all_placements
from services.scheduler.solvers import exhaustive
from services.scheduler.solvers.interface import ProblemTooLargeError
from services.scheduler.solvers.registry import AUTO, SOLVERS, members
from tests.helpers.plans.drawn_services import CountedTime, drawn_with_services, grown_to_16_gpus

BUDGET = 512
"""Plans that each search may score."""


def rate_of(problem: Problem, solver: str, time: CountedTime, num_plans: float, *, seed: int) -> float:
    try:
        solution = solve(CostModel(problem), solver, time_left=time.budget(int(num_plans)), seed=seed)
    except ProblemTooLargeError:
        return 0.0
    assert not solution.plan or violations(problem, solution.plan) == []
    return solution.score.samples_per_second


@pytest.mark.parametrize("seed", [1, pytest.param(19, marks=pytest.mark.grid)])
def test_auto_is_never_worse_than_a_member_with_the_same_budget(seed):
    problem = drawn_with_services(seed)
    with CountedTime() as time:
        rates = {name: rate_of(problem, name, time, BUDGET, seed=seed) for name in SOLVERS}
    assert rates[AUTO] >= max(rates.values()) > 0, rates


@pytest.mark.parametrize("seed", [3])
def test_auto_is_never_worse_than_a_member_with_its_share_where_nothing_is_proved(seed, monkeypatch):
    monkeypatch.setattr(placement_space, "MAX_PLACEMENTS", 1)
    monkeypatch.setattr(exhaustive, "MAX_PLANS", 1)
    problem = drawn_with_services(seed)
    with CountedTime() as time:
        found = rate_of(problem, AUTO, time, BUDGET, seed=seed)
        alone = {name: rate_of(problem, name, time, BUDGET * share, seed=seed) for name, share in members().items()}
    assert found >= max(alone.values()) > 0, alone
    assert alone["exhaustive"] == 0


@pytest.mark.parametrize("seed", [2, 15])
def test_no_plan_with_services_is_better_than_the_proved_one(seed):
    model = CostModel(drawn_with_services(seed))
    model = model.over(model.problem.model_copy(update={"nodes": model.problem.nodes[:2]}))
    best = max(model.score(plan).samples_per_second for plan in every_plan(model))
    found = best_of_all_placements(model, time_left=lambda: 1000.0)

    assert found.is_optimal
    assert found.upper_bound_samples_per_second == found.score.samples_per_second == pytest.approx(best, rel=1e-12)
    assert best > 0


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "seed", [seed if seed in (4, 6) else pytest.param(seed, marks=pytest.mark.grid) for seed in range(16)]
)
def test_auto_is_within_half_a_percent_of_all_plans_for_13_to_16_gpus(seed):
    problem = grown_to_16_gpus(drawn_with_services(seed))
    begun_s = process_time()
    solution = solve(CostModel(problem), AUTO, time_left=lambda: 60.0 - (process_time() - begun_s))
    assert violations(problem, solution.plan) == []
    most = solution.upper_bound_samples_per_second
    if not solution.is_optimal:
        # On a machine that other work shares a proof may take longer than the plan.
        begun_s = process_time()
        most = solve(
            CostModel(problem), "exhaustive", time_left=lambda: 240.0 - (process_time() - begun_s)
        ).upper_bound_samples_per_second
    assert solution.score.samples_per_second >= 0.995 * most > 0


def test_at_its_deadline_it_has_a_plan_and_a_bound():
    model = CostModel(drawn_with_services(20))
    best = best_of_all_placements(model, time_left=lambda: 1000.0).score.samples_per_second
    with CountedTime() as time:
        hurried = best_of_all_placements(model, time_left=time.budget(3))

    assert not hurried.is_optimal
    assert 0 < hurried.score.samples_per_second <= best <= hurried.upper_bound_samples_per_second


def every_plan(model: CostModel) -> Iterator[PlanDocument]:
    """All divisions of all machines between all roles, whether they can run or not."""
    workload = model.problem.workload
    takes_gpus = workload.reward is not None and workload.reward.gpu_memory_GB > 0
    uses = [
        list(every_use(model, node, [workload.scored_task, takes_gpus, workload.critic_tasks]))
        for node in model.problem.nodes
    ]
    for chosen in itertools.product(*uses):
        critics = [each["critic"] for each in chosen if each["critic"]]
        gen = tuple(replicas for each in chosen for replicas in each["gen"])
        parts = {key: tuple(each[key] for each in chosen if each[key]) for key in ("train", "score", "reward_gpus")}
        plan = PlanDocument(gen=gen, **parts)
        if len(critics) > 1:
            continue
        yield plan.model_copy(update={"critic": critics[0] if critics else None})
        for share in plan.train if workload.critic_tasks and not critics else ():
            beside = CriticPlace(node=share.node, gpus=share.gpus, is_beside_trainer=True)
            yield plan.model_copy(update={"critic": beside})


def every_use(model: CostModel, node: NodeClass, services: list[object]) -> Iterator[dict]:
    """All uses of one machine that leave as many GPUs idle as they want."""
    name, degrees = node.machine(0), model.degrees[node.name]
    most = [node.gpus if is_needed else 0 for is_needed in services]
    sizes = [*most, node.gpus, *(node.gpus // degree for degree in degrees)]
    for counts in itertools.product(*(range(size + 1) for size in sizes)):
        score, reward, critic, train, *replicas = counts
        used = score + reward + critic + train + sum(map(int.__mul__, replicas, degrees))
        if used > node.gpus:
            continue
        pairs = zip(degrees, replicas, strict=True)
        yield {
            "gen": [Replicas(node=name, tp=degree, count=count) for degree, count in pairs if count],
            "train": TrainShare(node=name, gpus=train) if train else None,
            "score": GpuWorkers(node=name, gpus=score) if score else None,
            "reward_gpus": GpuWorkers(node=name, gpus=reward) if reward else None,
            "critic": CriticPlace(node=name, gpus=critic) if critic else None,
        }
