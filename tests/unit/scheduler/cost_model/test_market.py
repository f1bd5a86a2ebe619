import itertools
import json

import pytest

from services.scheduler.cost_model.reference import CostModel
from services.scheduler.planning.market import alternatives, purchases, usd_per_hour
from services.scheduler.planning.plan_report import bottleneck, report_json
from services.scheduler.planning.solve import make_advised_plan, solve
from services.scheduler.problem.problem import Problem
from tests.helpers.plans.problems import document, plan, problem


def ample():
    return 1000.0


def planned(stated: Problem):
    model = CostModel(stated)
    return model, solve(model, "auto", time_left=ample)


def test_a_purchase_states_what_the_larger_cluster_reaches():
    model, solution = planned(problem("tiny_02"))
    offers = purchases(model, solution, time_left=ample, seed=0)

    assert {(each.gpu, each.num_gpus) for each in offers} == {("H800", 2), ("H800", 8), ("H20", 2), ("H20", 8)}
    for each in offers:
        stated = document("tiny_02")
        (entry,) = [node for node in stated["nodes"] if node["gpu"] == each.gpu]
        stated["nodes"].append({**entry, "name": "more", "gpus": each.num_gpus, "count": 1})
        truth = solve(CostModel(Problem.model_validate(stated)), "auto", time_left=ample).score.samples_per_second
        assert solution.score.samples_per_second < each.samples_per_second <= truth * (1 + 1e-9)
        assert each.samples_per_second == pytest.approx(truth, rel=0.03)
        assert each.usd_per_hour == pytest.approx(entry["price_per_gpu_hour"] * each.num_gpus)
    per_dollar = [each.gain / each.usd_per_hour for each in offers]
    assert per_dollar == sorted(per_dollar, reverse=True)


@pytest.mark.slow
def test_no_cheaper_cluster_of_the_front_is_beaten_by_another():
    model, solution = planned(problem("tiny_04"))
    front = alternatives(model, solution, time_left=ample, seed=0)

    # 16 L4 behind a slow link add nothing to this cluster: without them it is as fast, and cheaper.
    assert front[0].usd_per_hour < usd_per_hour(model.problem)
    assert front[0].samples_per_second == pytest.approx(solution.score.samples_per_second)
    assert len(front) >= 2
    for dearer, cheaper in itertools.pairwise(front):
        assert cheaper.usd_per_hour < dearer.usd_per_hour
        assert cheaper.samples_per_second < dearer.samples_per_second
    for each in front:
        assert model.score(each.plan).samples_per_second == pytest.approx(each.samples_per_second)


def test_without_prices_and_without_time_there_is_nothing_to_report():
    model, solution = planned(problem("tiny_02", "nodes=[{name: a, gpu: H800, gpus: 8}, {name: b, gpu: H20, gpus: 8}]"))

    assert [each.machines for each in alternatives(model, solution, time_left=ample, seed=0)] == [{"a": 1, "b": 1}]
    assert purchases(model, solution, time_left=lambda: 0.0, seed=0) == []
    infeasible = CostModel(problem("tiny_04", "model.params=60e9"))
    answer = json.loads(report_json(make_advised_plan(infeasible, "auto", time_left=ample, simulate=pytest.fail)))
    assert (answer["next_purchases"], answer["alternatives"]) == ([], [])
    assert "simulated_samples_per_second" not in answer


@pytest.mark.parametrize(
    ("overrides", "candidate", "told"),
    [
        ([], plan([("l40s-0", 1, 1)], [("a100-0", 8)]), "generation: decoding"),
        ([], plan([("l40s-0", 1, 8), ("l4-0", 1, 8), ("l4-1", 1, 8)], [("a100-0", 4)]), "training: computation"),
        (["cost_model.train_overhead_s=500"], plan([("l40s-0", 1, 8)], [("a100-0", 8)]), "training: the fixed time"),
        (
            ["links=[{a: r0, b: r1, bw_Gbps: 0.2, latency_ms: 40}]"],
            plan([("l4-0", 2, 4)], [("a100-0", 8)]),
            "generation, and links: weights reach l4-0 late",
        ),
    ],
)
def test_the_bottleneck_is_named(overrides, candidate, told):
    score = CostModel(problem("tiny_04", *overrides)).score(candidate)

    assert bottleneck(score).startswith(told), bottleneck(score)
