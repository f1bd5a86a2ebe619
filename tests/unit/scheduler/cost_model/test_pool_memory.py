"""Pools of Penstock's own trainer: even shards, passes and what they exchange; without it RM-1's rules."""

import itertools
import math

import pytest
from pydantic import ValidationError

from penstock.model.training_memory import TrainingMode, held_bytes, working_bytes
from services.scheduler.cost_model.pool_memory import PoolMemory, model_shape
from services.scheduler.cost_model.reference import CostModel, Infeasible, Score
from services.scheduler.cost_model.training_step import num_passes
from services.scheduler.planning.solve import solve
from services.scheduler.problem.plan_check import violations
from services.scheduler.problem.problem import Problem
from services.scheduler.solvers.columns import solve_columns
from services.scheduler.solvers.divisions import divisions, machine_splits, plan_of
from services.scheduler.solvers.interface import infeasibility
from services.scheduler.solvers.registry import SOLVERS
from tests.helpers.plans.drawn_problems import drawn
from tests.helpers.plans.problems import plan, problem

QWEN_7B = (
    "model.params=7.6e9",
    "model.layers=28",
    "model.hidden=3584",
    "model.q_heads=28",
    "model.kv_heads=4",
    "model.head_dim=128",
    "model.ffn=18944",
    "model.vocab=152064",
    "cost_model.train_pack_tokens=8192",
)


def forever() -> float:
    return 1.0


def even(stated: Problem, *, pack_tokens: int = 16_384) -> Problem:
    """The same problem under the trainer's own rules."""
    model = stated.model.model_copy(update={"ffn": stated.model.ffn or 4 * stated.model.hidden})
    constants = stated.cost_model.model_copy(update={"train_pack_tokens": pack_tokens})
    return stated.model_copy(update={"model": model, "cost_model": constants})


def small(seed: int) -> Problem:
    """Few plans, and GPUs of which some can train in large pools only, or not at all."""
    stated = even(drawn(seed), pack_tokens=(4_096, 32_768, 131_072)[seed % 3])
    return stated.model_copy(update={"nodes": tuple(node.model_copy(update={"gpus": 2}) for node in stated.nodes)})


def all_plans(model: CostModel) -> list:
    choices = [divisions(model, node, most=10_000, time_left=forever) for node in model.problem.nodes]
    return [plan_of(model, parts) for parts in itertools.product(*choices)]


@pytest.mark.parametrize("seed", range(6))
def test_the_cost_model_and_the_validator_agree_on_every_plan_of_a_small_cluster(seed: int) -> None:
    model = CostModel(small(seed))
    for each in all_plans(model):
        if not each.gen or not each.train:
            continue
        score = model.score(each)
        lacks = isinstance(score, Infeasible) and "training needs" in score.reason
        found = [line for line in violations(model.problem, each) if "needs" in line]
        assert lacks == bool(found), (each, score, found)


def test_some_of_those_plans_lack_memory() -> None:
    lacking = [
        each
        for seed in range(6)
        for each in all_plans(CostModel(small(seed)))
        if each.gen and each.train and any("needs" in line for line in violations(small(seed), each))
    ]
    assert lacking


@pytest.mark.parametrize("seed", range(6))
def test_no_solver_finds_more_than_the_best_of_all_plans_and_exhaustive_finds_it(seed: int) -> None:
    model = CostModel(small(seed))
    if infeasibility(model):
        pytest.skip("nothing can run there")
    best = max(model.score(each).samples_per_second for each in all_plans(model))
    for name in ("auto", *SOLVERS):
        solution = solve(CostModel(model.problem), name, time_left=lambda: 1000.0, seed=seed)
        assert solution.score.samples_per_second <= best * (1 + 1e-9), name
        if solution.plan is not None:
            assert violations(model.problem, solution.plan) == [], name
        if name in ("auto", "exhaustive", "milp"):
            assert solution.score.samples_per_second == pytest.approx(best, rel=5e-3), name
        bound = solution.upper_bound_samples_per_second
        assert bound is None or bound >= best * (1 - 1e-4), name


@pytest.mark.parametrize("seed", range(6))
def test_the_program_over_columns_bounds_every_plan(seed: int) -> None:
    model = CostModel(small(seed))
    columns = {node.name: list(machine_splits(model, node)) for node in model.problem.nodes}
    for home in {frozenset({node.region}) for node in model.problem.nodes}:
        solution = solve_columns(model, columns, home, limit_s=60, seed=0)
        for each in all_plans(model):
            if {model.nodes[share.node].region for share in each.train} <= home:
                assert model.score(each).samples_per_second <= solution.upper_bound * (1 + 1e-3)


def test_a_small_gpu_joins_large_pools_only() -> None:
    entries = (
        "{name: a100, gpu: A100-80, gpus: 8, region: r0}",
        "{name: l4, gpu: L4, gpus: 8, count: 4, region: r0}",
    )
    cluster = (f"nodes=[{', '.join(entries)}]", "links=[]")
    model = CostModel(problem("tiny_04", *QWEN_7B, *cluster))
    memory = model.pool_memory
    state_GB = 16 * 7.6
    assert memory.least_gpus["a100"] < 4
    assert state_GB / 19.6 < memory.least_gpus["l4"] < 24
    gen = [("l4-3", 4, 1)]
    too_few = model.score(plan(gen, [("a100-0", 1), ("l4-0", 4)]))
    assert isinstance(too_few, Infeasible)
    assert "of each of 5 GPUs" in too_few.reason
    assert "a GPU of l4 offers 19.6 GB" in too_few.reason
    assert isinstance(model.score(plan(gen, [("a100-0", 8), ("l4-0", 8)])), Score)
    # Whatever the mesh, the state must be held once in all.
    assert memory.least_pool([model.nodes["l4-0"]]) == math.ceil(state_GB / 19.6)
    # RM-1 adds up what does not add up in even shards.
    by_sum = CostModel(problem("tiny_04", *QWEN_7B, *cluster, "cost_model.train_pack_tokens=0"))
    assert isinstance(by_sum.score(plan(gen, [("a100-0", 1), ("l4-0", 4)])), Score)


def test_a_cluster_that_cannot_train_says_what_a_gpu_would_need() -> None:
    cluster = ("nodes=[{name: l4, gpu: L4, gpus: 4, region: r0}]", "links=[]")
    model = CostModel(problem("tiny_04", *QWEN_7B, *cluster, "cost_model.train_bytes_per_param=9"))
    assert infeasibility(model) is None
    solution = solve(model, "auto", time_left=lambda: 1000.0)
    assert isinstance(solution.score, Infeasible)
    assert solution.score.reason.startswith("training needs")
    assert "of each of" in solution.score.reason


def test_memory_is_the_trainers_own_formula() -> None:
    stated = problem("tiny_04", *QWEN_7B)
    model = CostModel(stated)
    usable = {name: each for name, each in model.usable_bytes.items()}
    memory = PoolMemory(stated, model.demand, usable)
    shape = model_shape(stated)
    for node in stated.nodes:
        least = memory.least_gpus[node.name]
        needs = {
            num: min(
                held_bytes(shape, mode) + working_bytes(shape, mode)
                for mode in (
                    TrainingMode(num_shards=num, pack_tokens=8192, is_half=True, checkpoints_layers=recomputes)
                    for recomputes in (False, True)
                )
            )
            for num in (int(least), int(least) - 1)
            if num > 0
        }
        assert needs[int(least)] <= usable[node.name]
        assert all(need > usable[node.name] for num, need in needs.items() if num < least)


def test_traffic_is_charged_for_every_pass_of_the_gpu_with_the_most_tokens() -> None:
    model = CostModel(problem("tiny_04", *QWEN_7B))
    node = model.nodes["a100-0"]
    pool = [(node, 8)]
    demand = model.demand
    passes = num_passes(model.problem, demand, pool)
    tokens = demand.samples_per_step * demand.trained_tokens / 8
    assert (passes - 1) * 8192 < tokens <= passes * 8192
    score = model.score(plan([("l40s-0", 1, 8)], [("a100-0", 8)]))
    assert isinstance(score, Score)
    tasks = model.problem.workload.train_tasks
    # Weights of 2 bytes in every pass, and again in its backward pass; gradients of 4 bytes.
    traffic = sum(
        task.scale * task.epochs * passes * 7.6e9 * (2 * 2 + 4 if task.kind == "train" else 2) for task in tasks
    )
    bandwidth = model.problem.gpu_types["A100-80"].ar_bus_GBps * 1e9
    assert score.training.allreduce_s == pytest.approx(traffic * 7 / 8 / bandwidth)


def test_the_width_of_the_feed_forward_network_is_asked_for() -> None:
    with pytest.raises(ValidationError, match=r"model\.ffn: .*train_pack_tokens needs it"):
        problem("tiny_04", "cost_model.train_pack_tokens=8192", "model.ffn=null")
