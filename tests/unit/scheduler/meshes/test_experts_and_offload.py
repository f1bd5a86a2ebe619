"""Divided experts and offload in plans: what they exchange and rest, and what is refused, by whom."""

import pytest
from pydantic import ValidationError

from penstock.model.training_memory import TrainingMode, published_bytes, working_bytes
from penstock.model.training_traffic import exchanged_bytes
from services.scheduler.cost_model.pool_memory import model_shape
from services.scheduler.cost_model.reference import CostModel, Infeasible, Score
from services.scheduler.meshes.expert_exchange import exchange_s
from services.scheduler.meshes.islands import Part
from services.scheduler.planning.solve import make_plan
from services.scheduler.problem.mesh import Mesh
from services.scheduler.problem.plan_check import violations
from services.scheduler.problem.plan_document import PlanDocument, TrainShare
from tests.helpers.plans.problems import plan, problem

MIXTURE = (
    "model={params: 8e9, layers: 16, hidden: 2048, q_heads: 32, kv_heads: 4, head_dim: 128, vocab: 151936, "
    "experts: 64, experts_per_token: 8, expert_ffn: 1024}"
)
NODES = (
    "nodes=[{name: a100, gpu: A100-80, gpus: 4, count: 2, region: r0, nic_Gbps: 100, memory_GB: 500}, "
    "{name: l4, gpu: L4, gpus: 8, region: r0, memory_GB: 100}, {name: small, gpu: L4, gpus: 8, region: r0}]"
)
TASKS = "workload.train_tasks=[{name: actor, kind: train}]"
SETTINGS = (MIXTURE, NODES, TASKS, "links=[]", "cost_model.train_pack_tokens=4096")
BOTH = (("a100-0", 4), ("a100-1", 4))


@pytest.fixture(scope="module")
def model() -> CostModel:
    return CostModel(problem("tiny_04", *SETTINGS))


def meshed(mesh: Mesh, *train: tuple[str, int]) -> PlanDocument:
    pool = tuple(TrainShare(node=node, gpus=gpus) for node, gpus in train)
    return plan([("small-0", 4, 2)], []).model_copy(update={"train": pool, "mesh": mesh})


def test_tokens_travel_to_the_other_experts_of_a_group_over_the_slowest_of_their_ways(model):
    node = model.nodes["a100-0"]
    first, second = (Part(name, model.nodes[name], 4, 1.0) for name in ("a100-0", "a100-1"))
    types = model.problem.gpu_types
    bus, card = types[node.gpu].ar_bus_GBps * 1e9, 100e9 / 8

    def seconds(parts, size):
        return exchange_s(types, model.network, parts, num_expert_shards=size, sent=8e9)

    assert seconds([first], 4) == 3 * 2e9 / bus
    # Groups of four stay inside machines. Of eight, each of a card's four processes sends half of all through it.
    assert seconds([first, second], 4) == 3 * 2e9 / bus
    assert seconds([first, second], 8) == 4 * 4 * 1e9 / card
    apart = Part("x", node.model_copy(update={"region": "r9"}), 4, 1.0)
    assert seconds([first, apart], 8) == float("inf")


def test_a_step_with_divided_experts_gathers_less_and_waits_for_its_tokens(model):
    shared, divided = (model.score(meshed(Mesh(expert=size), *BOTH)) for size in (1, 4))
    assert isinstance(shared, Score)
    assert isinstance(divided, Score)
    tokens = model.demand.samples_per_step * model.demand.trained_tokens / 8
    mode = TrainingMode(num_shards=8, pack_tokens=4096, is_half=True, num_expert_shards=4)
    sent = exchanged_bytes(model_shape(model.problem), mode, num_tokens=tokens)
    bus = model.problem.gpu_types["A100-80"].ar_bus_GBps * 1e9
    waits_s = divided.training.compute_s - shared.training.compute_s
    assert waits_s == pytest.approx(3 / 4 * sent / bus)
    assert divided.training.allreduce_s < shared.training.allreduce_s


def test_what_is_offloaded_rests_in_the_machines_memory_and_goes_up_by_its_link(model):
    pool = (("a100-0", 2),)
    assert "training needs" in model.score(meshed(Mesh(), *pool)).reason
    score = model.score(meshed(Mesh(offload=True), *pool))
    assert isinstance(score, Score)
    assert violations(model.problem, meshed(Mesh(offload=True), *pool)) == []
    # 40 bytes of each parameter are read and written by one machine's processors.
    assert score.training.overhead_s == pytest.approx(8e9 * 40 / 100e9)
    slower = CostModel(problem("tiny_04", *SETTINGS, "cost_model.host_link_GBps=2"))
    moved = slower.score(meshed(Mesh(offload=True), *pool)).training.allreduce_s - score.training.allreduce_s
    packs = model.pools.steps.passes(model.demand.samples_per_step / 2)
    assert moved == pytest.approx(packs * 12 * 4e9 * (1 / 2e9 - 1 / 20e9))


def test_machine_memory_holds_what_the_trainer_counts(model):
    shape, mode = model_shape(model.problem), TrainingMode(num_shards=2, pack_tokens=4096, is_half=True)
    rests_GB = (16 * 8e9 / 2 + published_bytes(shape, mode)) * 2 / 1e9
    for spare, is_feasible in ((1.001, True), (0.999, False)):
        stated = problem("tiny_04", *SETTINGS[:1], NODES.replace("500", f"{rests_GB / 0.9 * spare}"), *SETTINGS[2:])
        pooled = meshed(Mesh(offload=True), ("a100-0", 2))
        assert isinstance(CostModel(stated).score(pooled), Score) is is_feasible
        assert (violations(stated, pooled) == []) is is_feasible


@pytest.mark.parametrize(
    ("mesh", "pool", "rated", "checked"),
    [
        (Mesh(expert=128), (("a100-0", 4),), "mesh.expert: 128 does not divide the 4", "mesh.expert: 128 does not"),
        (
            Mesh(expert=3),
            (("l4-0", 6),),
            "does not divide the model's experts, 64",
            "mesh.expert: 3 does not divide 64",
        ),
        (Mesh(offload=True), (("small-0", 8),), "memory_GB of small-0 is unset", "train.0.node: small-0 rests"),
        (Mesh(offload=True), (("l4-0", 8),), "they may take 90.0", "train.0.node: l4-0 rests 144.0 GB"),
        (Mesh(offload=True), (("a100-0", 1),), "FSDP offloads only what it shards", "mesh.offload: a copy in one"),
    ],
)
def test_what_cannot_be_is_refused_by_the_cost_model_and_by_the_check(model, mesh, pool, rated, checked):
    bad = meshed(mesh, *pool).model_copy(update={"gen": plan([("a100-1", 1, 4)], []).gen})
    score = model.score(bad)
    assert isinstance(score, Infeasible)
    assert rated in score.reason
    assert any(line.startswith(checked) for line in violations(model.problem, bad)), violations(model.problem, bad)


def test_a_trainer_with_a_critic_offloads_nothing():
    tasks = "workload.train_tasks=[{name: actor, kind: train}, {name: critic, kind: train}]"
    stated = problem("tiny_04", *SETTINGS[:2], tasks, *SETTINGS[3:])
    pooled = meshed(Mesh(offload=True), *BOTH)
    assert CostModel(stated).score(pooled).reason.startswith("mesh.offload: the trainer has critic as well")
    assert violations(stated, pooled)[0].startswith("mesh.offload: the trainer has a critic")


@pytest.mark.parametrize("beside", [{"tensor": 2}, {"pipeline": 2}, {"islands": (4, 8)}])
@pytest.mark.parametrize("direction", [{"expert": 2}, {"offload": True}])
def test_directions_that_the_trainer_cannot_join_are_refused(direction, beside):
    with pytest.raises(ValidationError, match=f"{next(iter(direction))}|unlike"):
        Mesh(**direction, **beside)


def test_a_cluster_that_is_too_small_is_planned_with_offload_and_no_other_plan_is():
    nodes = "nodes=[{name: l40s, gpu: L40S, gpus: 4, count: 2, region: r0, nic_Gbps: 100MEMORY}]"
    found = {}
    for memory in ("", ", memory_GB: 500"):
        stated = problem("tiny_04", MIXTURE, nodes.replace("MEMORY", memory), *SETTINGS[2:], "model.params=24e9")
        found[memory] = make_plan(CostModel(stated), "auto", time_left=lambda: 4.0)
    assert "training needs 384 GB" in found[""].reason
    best = found[", memory_GB: 500"]
    assert best.solution.plan.mesh.offload
    assert best.solution.is_optimal
    assert violations(best.model.problem, best.solution.plan) == []


def test_a_process_with_divided_experts_needs_what_the_trainers_formula_says(model):
    mode = TrainingMode(num_shards=8, pack_tokens=4096, is_half=True, num_expert_shards=8, checkpoints_layers=True)
    needed = 16 * 8e9 / 8 + working_bytes(model_shape(model.problem), mode)
    bad = meshed(Mesh(expert=8), ("l4-0", 8))
    stated = problem("tiny_04", *SETTINGS, "cost_model.mem_util=0.5")
    assert f"training needs {needed / 1e9:.1f} GB of each of the 8 GPUs" in CostModel(stated).score(bad).reason
    assert f"needs up to {needed / 1e9:.2f} GB there" in violations(stated, bad)[0]
