"""RM-1: values of an independent implementation, and laws that any cost of a plan must obey."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.cost_model.reference import CostModel, Infeasible, Limit, Score
from services.scheduler.problem.problem import Problem
from tests.helpers.plans.problems import document, plan, problem

SPLIT = plan([("h20-0", 1, 8)], [("h800-0", 8)])
MIXED = plan([("h20-0", 2, 3), ("h800-0", 4, 1)], [("h800-0", 4), ("h20-0", 2)])
TWO_REGIONS = plan([("l40s-0", 1, 8), ("l4-0", 2, 4), ("l4-1", 8, 1)], [("a100-0", 8)])
TWO_MACHINES_TRAIN = plan([("a100-0", 1, 4), ("l4-1", 4, 2)], [("a100-0", 4), ("l40s-0", 8)])
FAR = plan([("l40s-0", 1, 4), ("l4-1", 4, 2)], [("a100-0", 8)])
TRAINING_SPANS_REGIONS = plan([("l40s-0", 1, 8)], [("a100-0", 8), ("l4-0", 4)])
HOMOGENEOUS = plan([("h800-0", 2, 4), ("h800-1", 4, 2)], [("h800-2", 8), ("h800-3", 8)])
LONG_TAIL = plan([("h800-0", 1, 8), ("h800-1", 4, 2)], [("h800-2", 8), ("h800-3", 8)])


@pytest.mark.parametrize(
    ("name", "overrides", "candidate", "samples_per_second", "limit"),
    [
        ("tiny_02", [], SPLIT, 12.84698046259328, Limit.GENERATION),
        ("tiny_02", [], MIXED, 7.83947838628673, Limit.TRAINING),
        (
            "tiny_02",
            ["workload.output_len={type: fixed, length: 2000}", "cost_model.train_overhead_s=5"],
            SPLIT,
            21.897209520583946,
            Limit.TRAINING,
        ),
        ("tiny_04", [], TWO_REGIONS, 20.202297862410813, Limit.TRAINING),
        ("tiny_04", [], TWO_MACHINES_TRAIN, 26.006758443300374, Limit.TRAINING),
        (
            "tiny_04",
            ["links=[{a: r0, b: r1, bw_Gbps: 0.2, latency_ms: 40}]"],
            FAR,
            15.550977460710275,
            Limit.GENERATION,
        ),
        (
            "tiny_04",
            ["constraints.train_single_region=false", "cost_model.kv_recompute_on_update=true"],
            TRAINING_SPANS_REGIONS,
            7.315540968861303,
            Limit.TRAINING,
        ),
        ("str_01", [], HOMOGENEOUS, 10.128692796641637, Limit.TRAINING),
        ("str_01", ["workload.staleness=0"], LONG_TAIL, 7.460776337141899, Limit.TAIL),
    ],
)
def test_a_plan_costs_what_an_independent_implementation_says(name, overrides, candidate, samples_per_second, limit):
    score = CostModel(problem(name, *overrides)).score(candidate)

    assert isinstance(score, Score)
    assert score.samples_per_second == pytest.approx(samples_per_second, rel=1e-9)
    assert score.limit is limit


@pytest.mark.parametrize(
    ("name", "overrides", "candidate", "told"),
    [
        (
            "tiny_04",
            [],
            plan([("l4-0", 1, 1)], [("a100-0", 1)]),
            "training needs 131 GB, and the training pool's 1 GPUs",
        ),
        ("tiny_04", [], plan([], [("a100-0", 8)]), "gen: empty, so nothing generates"),
        ("tiny_04", [], plan([("l4-0", 1, 1)], []), "train: empty, so nothing trains"),
        ("tiny_04", [], plan([("l4-0", 1, 8)], [("l4-0", 8)]), "machine l4-0 has 8 GPUs, and the plan uses 16"),
        ("tiny_04", [], plan([("l4-2", 1, 8)], [("l4-0", 8)]), "gen.0.node: there is no machine 'l4-2'"),
        ("tiny_04", [], plan([("l4-0", 3, 1)], [("a100-0", 8)]), "tp 3 on l4-0: degrees"),
        (
            "tiny_04",
            [],
            plan([("l40s-0", 1, 1)], [("a100-0", 8), ("a100-0", 1)]),
            "train.1.node: 'a100-0' is listed twice",
        ),
        ("tiny_04", [], TRAINING_SPANS_REGIONS, "training spans the regions r0, r1"),
        (
            "tiny_04",
            ["links=[]", "constraints.train_single_region=false"],
            TRAINING_SPANS_REGIONS,
            "are not linked: r0, r1",
        ),
        ("tiny_04", ["links=[]"], plan([("l4-0", 2, 4)], [("a100-0", 8)]), "links are missing or slow"),
    ],
)
def test_a_plan_that_cannot_run_is_answered_with_the_reason(name, overrides, candidate, told):
    answer = CostModel(problem(name, *overrides)).score(candidate)

    assert isinstance(answer, Infeasible)
    assert told in answer.reason
    assert answer.samples_per_second == 0


RATES = {
    "gpu_types": ("tflops_bf16", "hbm_GBps", "ar_bus_GBps"),
    "nodes": ("nic_Gbps",),
    "links": ("bw_Gbps",),
}
plans = st.builds(
    lambda tps, trained: plan(
        [(node, tp, 8 // tp) for node, tp in zip(("l40s-0", "l4-0", "l4-1"), tps, strict=True)],
        [("a100-0", trained)],
    ),
    st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([2, 4, 8]), st.sampled_from([2, 4, 8])),
    st.integers(2, 8),
)
staleness = st.integers(0, 4).map(lambda bound: f"workload.staleness={bound}")


def scaled(stated, section, key, factor):
    entries = stated[section].values() if isinstance(stated[section], dict) else stated[section]
    for entry in entries:
        entry[key] *= factor


@settings(max_examples=40, deadline=None, derandomize=True)
@given(plans, staleness, st.sampled_from([(section, key) for section, keys in RATES.items() for key in keys]))
def test_a_faster_machine_or_link_never_makes_a_plan_slower(candidate, bound, faster):
    before = CostModel(problem("tiny_04", bound)).score(candidate).samples_per_second
    stated = document("tiny_04", bound)
    scaled(stated, *faster, 2)

    assert CostModel(Problem.model_validate(stated)).score(candidate).samples_per_second >= before * (1 - 1e-9)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(plans, staleness)
def test_twice_every_rate_and_half_every_delay_is_twice_the_throughput(candidate, bound):
    before = CostModel(problem("tiny_04", bound)).score(candidate).samples_per_second
    stated = document("tiny_04", bound, "cost_model.sync_pause_s=0.5", "cost_model.step_overhead_s=0.001")
    for section, keys in RATES.items():
        for key in keys:
            scaled(stated, section, key, 2)
    scaled(stated, "gpu_types", "ar_latency_us", 0.5)
    scaled(stated, "links", "latency_ms", 0.5)

    assert CostModel(Problem.model_validate(stated)).score(candidate).samples_per_second == pytest.approx(2 * before)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(plans, st.integers(0, 4))
def test_a_larger_staleness_bound_never_makes_a_plan_slower(candidate, bound):
    tight, loose = (
        CostModel(problem("tiny_04", f"workload.staleness={each}")).score(candidate).samples_per_second
        for each in (bound, bound + 1)
    )

    assert loose >= tight * (1 - 1e-9)


def test_names_and_order_of_machines_change_nothing():
    stated = document("tiny_04")
    stated["nodes"] = stated["nodes"][::-1]
    stated["nodes"][0]["name"] = "small"

    renamed = plan([("small-1", 8, 1), ("small-0", 2, 4), ("l40s-0", 1, 8)], [("a100-0", 8)])
    score = CostModel(Problem.model_validate(stated)).score(renamed)
    assert score.samples_per_second == pytest.approx(
        CostModel(problem("tiny_04")).score(TWO_REGIONS).samples_per_second
    )


def test_the_parts_of_a_step_add_up_and_explain_the_score():
    score = CostModel(problem("tiny_04")).score(TWO_MACHINES_TRAIN)

    step = score.training
    assert step.step_s == step.compute_s + step.exposed_allreduce_s + step.overhead_s
    assert score.samples_per_second == pytest.approx(128 * 8 / step.step_s)
    assert [each.replicas for each in score.generation] == list(TWO_MACHINES_TRAIN.gen)
    # Weights take 131 s to the other region, and three steps pass meanwhile: nothing made there is fresh enough.
    assert [each.duty for each in score.generation] == [1.0, 0.0]


def test_no_more_samples_are_under_way_than_staleness_allows():
    score = CostModel(problem("tiny_04", "workload.staleness=0")).score(TWO_REGIONS)

    under_way = sum(each.state.batch * each.replicas.count for each in score.generation)
    assert 0.9 * 1024 < under_way <= 1024


def test_measured_rates_replace_computed_ones():
    measured = (
        "measured_rates=[{gpu: H20, role: generator, tp: 1, tokens_per_second: 1000},"
        " {gpu: H800, role: trainer, tokens_per_second: 100}]"
    )
    model = CostModel(problem("tiny_02", measured))

    mean_tokens = model.demand.completion_tokens
    assert model.replica(model.nodes["h20-0"], 1).samples_per_second == pytest.approx(1000 / mean_tokens)
    trained = model.score(SPLIT)
    assert trained.samples_per_second == pytest.approx(8 * 100 / model.demand.trained_tokens)
    assert not math.isclose(trained.samples_per_second, CostModel(problem("tiny_02")).score(SPLIT).samples_per_second)
