"""Generation replicas in pipeline stages: their memory and speed, and that plans with them are as good as any."""

import itertools

import pytest

from services.generator.emulation.hardware import GPUS, MODELS
from services.generator.emulation.roofline import Roofline
from services.scheduler.cost_model.demand import demand_of
from services.scheduler.cost_model.layouts import Layout, stages_of
from services.scheduler.cost_model.reference import CostModel, Infeasible
from services.scheduler.cost_model.replica import ReplicaModel
from services.scheduler.planning.solve import solve
from services.scheduler.problem.plan_check import violations
from services.scheduler.problem.plan_document import PlanDocument, Replicas, TrainShare
from tests.helpers.plans.problems import problem

SIX_L4 = "nodes=[{name: l4, gpu: L4, gpus: 6, count: 2, region: r0}]"
QWEN_32B = "model={params: 3.276e10, layers: 64, hidden: 5120, q_heads: 40, kv_heads: 8, head_dim: 128, vocab: 152064}"
TRAINS_LITTLE = "cost_model.train_bytes_per_param=1"
FREE = ("cost_model.step_overhead_s=0", "gpu_types.L4.ar_latency_us=0", "gpu_types.L4.ar_bus_GBps=1e6")


def test_a_model_that_fits_no_tensor_parallel_degree_of_a_machine_generates_in_stages():
    without = CostModel(problem("tiny_04", SIX_L4, "links=[]", QWEN_32B, TRAINS_LITTLE))
    allowed = CostModel(problem("tiny_04", SIX_L4, "links=[]", QWEN_32B, TRAINS_LITTLE, "constraints.gen_pp=8"))

    assert without.degrees["l4"] == ()
    assert allowed.layouts["l4"] == (Layout(2, 3), Layout(1, 6))
    assert allowed.degrees["l4"] == (6,)
    assert solve(without, "auto", time_left=lambda: 1.0).plan is None
    plan = solve(allowed, "auto", time_left=lambda: 1.0).plan
    assert violations(allowed.problem, plan) == []
    assert [each.layout.gpus for each in plan.gen] == [6]


def test_layers_are_divided_as_vllm_divides_them_and_the_ends_hold_the_embeddings():
    stated = problem("tiny_04", QWEN_32B)
    demand, embedding = demand_of(stated), 152064 * 5120
    stages = stages_of(stated.model, demand, 6)

    # get_pp_indices of vLLM: what is left over goes to the last stages but one.
    assert [stage.num_layers for stage in stages] == [10, 11, 11, 11, 11, 10]
    assert sum(stage.weight_bytes for stage in stages) == pytest.approx(demand.weight_bytes)
    assert stages[0].weight_bytes - stages[1].weight_bytes * 10 / 11 == pytest.approx(2 * embedding)
    assert sum(stage.flops_per_token for stage in stages) == pytest.approx(demand.flops_per_token)


def test_stages_read_their_weights_once_for_each_part_of_the_batch():
    tiny = "model={params: 8e9, layers: 36, hidden: 4096, q_heads: 32, kv_heads: 8, head_dim: 128, vocab: 1}"
    stated = problem("tiny_04", tiny, *FREE)
    demand, node = demand_of(stated), stated.nodes[-1]
    two, one = (ReplicaModel(stated, demand, node, 1, pp) for pp in (2, 1))
    bandwidth = 300e9 * stated.cost_model.eta_bw
    cache = demand.kv_read_bytes / demand.completion_tokens

    assert two.step_s(8) == pytest.approx((demand.weight_bytes + 8 * cache / 2) / bandwidth, rel=1e-4)
    assert two.step_s(1) == pytest.approx(one.step_s(1), rel=1e-4), "the other stage is idle meanwhile"
    # Each GPU has room for as much cache, of half the layers, and for what the other half of the weights left.
    assert two.max_batch > 2 * one.max_batch


def test_a_stated_batch_is_what_counts_and_must_fit():
    model = CostModel(problem("tiny_04"))
    plan = PlanDocument(
        gen=(Replicas(node="l40s-0", tp=1, count=8, batch=4),), train=(TrainShare(node="a100-0", gpus=8),)
    )
    too_many = plan.model_copy(update={"gen": (plan.gen[0].model_copy(update={"batch": 5000}),)})

    assert [each.state.batch for each in model.score(plan).generation] == [4]
    assert violations(model.problem, plan) == []
    assert "gen.0: 1 GPUs of l40s-0 offer 41.2 GB to stage 1" in violations(model.problem, too_many)[0]
    stages = plan.model_copy(update={"gen": (Replicas(node="l40s-0", tp=4, pp=2),)})
    assert "layouts that fit, of at most constraints.gen_pp 1 stages" in model.score(stages).reason
    assert "gen.0.pp: 2 stages; constraints.gen_pp and 36 layers allow 1" in violations(model.problem, stages)[0]


def fillings(layouts, gpus):
    """All multisets of layouts on at most that many GPUs."""
    if not layouts:
        return [()]
    first, rest = layouts[0], layouts[1:]
    return [
        ((first, count), *others) if count else others
        for count in range(gpus // first.gpus + 1)
        for others in fillings(rest, gpus - count * first.gpus)
    ]


def every_plan(model):
    choices = []
    for machine, node in model.nodes.items():
        choices.append(
            [
                ([Replicas(node=machine, tp=one.tp, pp=one.pp, count=count) for one, count in filling], machine, trains)
                for trains in range(node.gpus + 1)
                for filling in fillings(model.layouts[node.name], node.gpus - trains)
            ]
        )
    for chosen in itertools.product(*choices):
        gen = tuple(each for replicas, _, _ in chosen for each in replicas)
        train = tuple(TrainShare(node=machine, gpus=gpus) for _, machine, gpus in chosen if gpus)
        if gen and train:
            yield PlanDocument(gen=gen, train=train)


@pytest.mark.parametrize(
    ("bus", "latency_us", "staleness", "prompts"), [(10, 50, 1, 8), (1, 500, 3, 64), (150, 10, 0, 2)]
)
def test_auto_is_within_half_a_percent_of_the_best_of_all_layouts(bus, latency_us, staleness, prompts):
    nodes = "nodes=[{name: a100, gpu: A100-80, gpus: 4, region: r0}, {name: l4, gpu: L4, gpus: 4, region: r0}]"
    links = [
        f"gpu_types.{gpu}.{key}"
        for gpu in ("A100-80", "L4")
        for key in (f"ar_bus_GBps={bus}", f"ar_latency_us={latency_us}")
    ]
    model = CostModel(
        problem(
            "tiny_04", nodes, "links=[]", "constraints.gen_pp=4", f"workload.staleness={staleness}", TRAINS_LITTLE,
            f"workload.prompts_per_step={prompts}", *links,
        )
    )  # fmt: skip
    best = max(model.score(plan).samples_per_second for plan in every_plan(model))
    solution = solve(model, "auto", time_left=lambda: 2.0, seed=0)

    assert best > 0
    assert not isinstance(solution.score, Infeasible)
    assert solution.score.samples_per_second >= 0.995 * best


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (4, 1), (1, 4), (2, 2)])
def test_an_emulated_gpu_takes_as_long_as_the_cost_model_expects(tp, pp):
    stated = problem("tiny_02", "nodes=[{name: h20, gpu: H20, gpus: 8, region: r0}]", "cost_model.prefix_sharing=false")
    demand = demand_of(stated)
    replica = ReplicaModel(stated, demand, stated.nodes[0], tp, pp)
    emulated = Roofline(gpu=GPUS["H20"], model=MODELS["qwen2.5-7b"], num_gpus=tp * pp, num_stages=pp)
    context = demand.kv_read_bytes / demand.completion_tokens / demand.kv_bytes_per_token

    # Emulated stages are equal; the cost model waits for the one with the output layer.
    for batch in (8, 64):
        assert emulated.step_s(batch, batch * context) == pytest.approx(replica.step_s(batch), rel=0.1)
