"""What scorers and a critic say of their speed, as rates of the GPU types that they are on."""

import pytest

from penstock.v1 import scheduler_pb2 as pb
from services.scheduler.cost_model.reference import CostModel
from services.scheduler.problem.plan_document import CriticPlace, GpuWorkers
from services.scheduler.replanning.service_speed import in_words, service_rates, with_service_rates
from tests.helpers.plans.problems import plan, problem

TASKS = (
    "workload.train_tasks=[{name: actor, kind: train}, {name: reference, kind: infer, is_service: true}, {name: critic,"
    " kind: infer, shares_weights: true, is_service: true}, {name: critic_train, kind: train, is_service: true}]"
)
STATED = problem("tiny_02", TASKS)
MODEL = CostModel(STATED)
PLAN = plan([("h20-0", 1, 4)], [("h800-0", 8)]).model_copy(
    update={"score": (GpuWorkers(node="h20-0", gpus=2),), "critic": CriticPlace(node="h20-0", gpus=2)}
)


def view(role, tokens_per_second, *, name="h20-0", run_id="r"):
    rate = pb.MeasuredRate(role=role, tokens_per_second=tokens_per_second, run_id=run_id)
    node = pb.Node(node_id=name, accelerators=[pb.Accelerator(kind="H20", count=8)])
    return pb.NodeView(node=node, is_alive=True, rates=[rate])


def rates(*views, in_force=PLAN, before=(), slow=()):
    return service_rates(STATED, in_force, views, run_id="r", before=dict(before), slow=dict(slow))


SCORED = MODEL.gpu_scoring_rate["h20"] * MODEL.demand.trained_tokens
VALUED = MODEL.critic.samples_per_second(PLAN, MODEL.nodes) * MODEL.demand.trained_tokens


def test_a_slower_scorer_slows_its_type_and_a_slow_machine_only_itself():
    assert rates(view(pb.ROLE_SCORER, SCORED)) == rates(view(pb.ROLE_SCORER, 1.0, run_id="other")) == {}
    found = rates(view(pb.ROLE_SCORER, SCORED / 10))
    assert found == {("scorer", "H20"): pytest.approx(SCORED / 10, rel=0.05)}
    assert rates(view(pb.ROLE_SCORER, SCORED / 9.8), before=found) == found
    assert rates(view(pb.ROLE_SCORER, SCORED / 10), slow={"h20-0": 0.1}) == {}
    assert rates(*(view(pb.ROLE_SCORER, SCORED / part, name=f"new-{part}") for part in (1, 10, 1))) == {}

    slower = CostModel(with_service_rates(STATED, found))
    assert slower.scored(PLAN) == pytest.approx(MODEL.scored(PLAN) / 10, rel=0.05)
    assert slower.critic.samples_per_second(PLAN, slower.nodes) == MODEL.critic.samples_per_second(PLAN, MODEL.nodes)


def test_a_slower_critic_slows_its_type_as_a_critic_alone():
    assert rates(view(pb.ROLE_CRITIC, VALUED)) == rates(view(pb.ROLE_CRITIC, 1.0, name="elsewhere")) == {}
    found = rates(view(pb.ROLE_CRITIC, VALUED / 10))
    slower = CostModel(with_service_rates(STATED, found))
    valued = slower.critic.samples_per_second(PLAN, slower.nodes)
    assert valued == pytest.approx(VALUED / 10 / MODEL.demand.trained_tokens, rel=0.05)
    assert slower.gpu_training_rate == MODEL.gpu_training_rate
    assert in_words(found).startswith("A GPU of the critic computes")
    beside = PLAN.model_copy(update={"critic": CriticPlace(node="h800-0", gpus=8, is_beside_trainer=True)})
    assert rates(view(pb.ROLE_CRITIC, 1.0, name="h800-0"), in_force=beside) == {}
