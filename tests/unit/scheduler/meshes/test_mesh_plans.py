"""Plans with a mesh: what is refused, by whom, and what a revision keeps."""

import pytest

from penstock.model.training_memory import TrainingMode, working_bytes
from services.scheduler.cost_model.pool_memory import model_shape
from services.scheduler.cost_model.reference import CostModel, Infeasible, Score
from services.scheduler.problem.mesh import Mesh
from services.scheduler.problem.plan_check import violations
from services.scheduler.problem.plan_document import PlanDocument, TrainShare
from services.scheduler.solvers.regeneration import regenerate
from tests.helpers.plans.problems import plan, problem

NODES = (
    "nodes=[{name: a100, gpu: A100-80, gpus: 8, region: r0}, {name: l40s, gpu: L40S, gpus: 8, region: r0}, "
    "{name: l4, gpu: L4, gpus: 8, count: 2, region: r0}]"
)
SETTINGS = (NODES, "links=[]", "model.ffn=12288", "cost_model.train_pack_tokens=8192")
GEN = [("l4-1", 2, 4)]


@pytest.fixture(scope="module")
def model() -> CostModel:
    return CostModel(problem("tiny_04", *SETTINGS))


def meshed(mesh: Mesh, *train: tuple[str, int, float | None]) -> PlanDocument:
    pool = tuple(TrainShare(node=node, gpus=gpus, share=share) for node, gpus, share in train)
    return plan(GEN, []).model_copy(update={"train": pool, "mesh": mesh})


STAGES = Mesh(pipeline=2, layers_per_stage=(20, 16))
BOTH = (("a100-0", 8, 1.0), ("l40s-0", 8, 1.0))


@pytest.mark.parametrize(
    "good",
    [
        meshed(STAGES, *BOTH),
        meshed(Mesh(islands=(8, 8)), ("a100-0", 8, 1.0), ("l40s-0", 8, 0.8)),
        meshed(Mesh(islands=(4, 4, 8)), *BOTH),
        meshed(Mesh(tensor=2), *BOTH),
        meshed(Mesh(islands=(8, 8), pipeline=4), *BOTH),
    ],
)
def test_what_the_trainer_can_do_is_rated(model, good):
    assert isinstance(model.score(good), Score), model.score(good)
    assert violations(model.problem, good) == []


@pytest.mark.parametrize(
    ("bad", "rated", "checked"),
    [
        (meshed(Mesh(islands=(8, 4)), *BOTH), "mesh.islands: [8, 4] are 12 processes", "mesh.islands: 12 processes"),
        (
            meshed(Mesh(pipeline=2, layers_per_stage=(20, 20)), *BOTH),
            "mesh.layers_per_stage: 40 layers, and the model has 36",
            "mesh: 2 stages of [20, 20] layers, and the model has 36",
        ),
        (
            meshed(STAGES, ("a100-0", 8, 1.0), ("l40s-0", 8, 0.5)),
            "mesh.pipeline: processes of one pipeline have unlike shares",
            "train: processes 0 to 15 have packs together, and unlike shares",
        ),
        (
            meshed(Mesh(islands=(16,)), ("a100-0", 8, 1.0), ("l40s-0", 8, None)),
            "train.1.share: unset, and others state theirs",
            "train: some machines state a share",
        ),
        (
            meshed(Mesh(tensor=16), *BOTH),
            "mesh.tensor: 16 does not divide the model's kv_heads, 8",
            "mesh.tensor: 16 does not divide",
        ),
        (
            meshed(Mesh(islands=(12, 4)), ("a100-0", 8, 1.0), ("l4-0", 8, 0.2)),
            "of each of the 12 GPUs of island 0, and a GPU of l4 offers 19.6 GB",
            "train.1.node: each of 16 GPUs needs up to",
        ),
        (
            meshed(Mesh(pipeline=2, layers_per_stage=(4, 32)), ("a100-0", 8, 1.0), ("l4-0", 8, 1.0)),
            "of the 8 GPUs of stage 1 of island 0, and a GPU of l4 offers 19.6 GB",
            "train.1.node: each of 16 GPUs needs up to",
        ),
    ],
)
def test_what_it_cannot_do_is_refused_by_the_cost_model_and_by_the_check(model, bad, rated, checked):
    score = model.score(bad)
    assert isinstance(score, Infeasible)
    assert rated in score.reason
    assert any(line.startswith(checked) for line in violations(model.problem, bad)), violations(model.problem, bad)


def test_a_mesh_needs_the_trainers_own_terms():
    by_sum = CostModel(problem("tiny_04", *SETTINGS, "cost_model.train_pack_tokens=0"))
    score = by_sum.score(meshed(STAGES, *BOTH))
    assert isinstance(score, Infeasible)
    assert "cost_model.train_pack_tokens; state that" in score.reason
    assert "cost_model.train_pack_tokens; state that" in violations(by_sum.problem, meshed(STAGES, *BOTH))[0]


def test_a_stage_needs_what_the_trainers_formula_says(model):
    shape = model_shape(model.problem).stage(30, is_first=False, is_last=True)
    mode = TrainingMode(num_shards=8, pack_tokens=8192, is_half=True, is_stage=True, checkpoints_layers=True)
    needed = 16 * shape.num_params / 8 + working_bytes(shape, mode)
    bad = meshed(Mesh(pipeline=2, layers_per_stage=(6, 30)), ("a100-0", 8, 1.0), ("l4-0", 8, 1.0))
    score = model.score(bad)
    assert isinstance(score, Infeasible)
    assert f"training needs {needed / 1e9:.1f} GB of each of the 8 GPUs of stage 1 of island 0" in score.reason
    (line,) = violations(model.problem, bad)
    assert f"needs up to {needed / 1e9:.2f} GB there" in line


def test_a_revision_of_generators_keeps_the_trainers_mesh(model):
    running = meshed(STAGES, *BOTH)
    found = regenerate(model, running, time_left=lambda: 1000.0).plan
    assert found is not None
    assert (found.train, found.mesh) == (running.train, running.mesh)
    assert sum(each.tp * each.count for each in found.gen) > 8


def test_the_head_stands_where_most_generate():
    apart = NODES.replace("name: l4, gpu: L4, gpus: 8, count: 2, region: r0", "name: l4, gpu: L4, gpus: 8, region: r1")
    apart = apart.replace("gpu: L40S, gpus: 8, region: r0", "gpu: L40S, gpus: 8, region: r1")
    links = "links=[{a: r0, b: r1, bw_Gbps: 10}]"
    model = CostModel(problem("tiny_04", apart, links, *SETTINGS[2:]))
    islands = Mesh(islands=(4, 4, 8))
    pool = meshed(islands, *BOTH).train
    assert model.pools.headed(pool, islands, model.nodes, region="r0") == (pool, islands)
    turned = (tuple(reversed(pool)), Mesh(islands=(8, 4, 4)))
    assert model.pools.headed(pool, islands, model.nodes, region="r1") == turned
    assert model.pools.headed(pool, STAGES, model.nodes, region="r1") == (pool, STAGES)
    assert model.homes(meshed(islands, *BOTH)) == {"r0"}
