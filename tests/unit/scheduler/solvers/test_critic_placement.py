"""A critic of its own in a plan: memory, its time in a step, and the GPUs that a search gives it."""

import itertools

import pytest

from penstock.v1 import scheduler_pb2 as pb
from services.scheduler.cost_model.reference import CostModel, Infeasible, Limit
from services.scheduler.planning.plan_message import document_of
from services.scheduler.planning.plan_wire import PlanTask, plan_task
from services.scheduler.planning.solve import make_plan, solve
from services.scheduler.problem.plan_check import violations
from services.scheduler.problem.plan_document import CriticPlace, PlanDocument
from services.scheduler.problem.problem import Problem
from services.scheduler.replanning.live_problem import live_problem
from services.scheduler.solvers.registry import SOLVERS
from simulator.virtual_run.build_run import Mode, from_plan
from tests.helpers.plans.problems import document, plan, problem

POOLED = (
    "workload.train_tasks=[{name: actor, kind: train}, {name: critic, kind: infer, shares_weights: true}, "
    "{name: critic_train, kind: train}]"
)
TASKS = POOLED.replace("true}", "true, is_service: true}").replace("critic_train,", "critic_train, is_service: true,")
REFERENCE = TASKS.replace("[", "[{name: reference, kind: infer, is_service: true}, ")
NODES = "nodes=[{name: a100, gpu: A100-80, gpus: 8, region: r0}, {name: l4, gpu: L4, gpus: 4, count: 2, region: r0}]"
SHARDED = ("model.ffn=12288", "cost_model.train_pack_tokens=8192")


def stated(tasks=TASKS, *more: str) -> Problem:
    return problem("tiny_04", tasks, "links=[]", NODES, *more)


def forever():
    return 1000.0


def with_critic(of: PlanDocument, node: str, gpus: int, *, is_beside_trainer: bool = False) -> PlanDocument:
    place = CriticPlace(node=node, gpus=gpus, is_beside_trainer=is_beside_trainer)
    return of.model_copy(update={"critic": place})


def test_a_critic_takes_its_state_and_work_from_the_pool_and_limits_as_a_stage_of_its_own():
    model, pooled = CostModel(stated()), CostModel(stated(POOLED))
    alone = CostModel(stated("workload.train_tasks=[{name: actor, kind: train}]"))
    split = plan([("a100-0", 1, 2), ("l4-0", 1, 4)], [("a100-0", 4)])
    apart = model.score(with_critic(split, "a100-0", 2))

    assert model.demand == alone.demand
    assert pooled.demand.training_state_bytes == 2 * alone.demand.training_state_bytes
    assert model.critic.gpu_bytes(2) == alone.demand.training_state_bytes / 2
    assert apart.training == alone.score(split).training
    # Values take a third of what training takes, as in the pool: four GPUs for both would need 7/3 of the time.
    node = model.nodes["a100-0"]
    trained_s = apart.training.compute_s * 4
    assert model.critic.step_s(node, 2) == pytest.approx((pooled.score(split).training.compute_s * 4 - trained_s) / 2)
    fast = model.score(with_critic(plan([("a100-0", 1, 3)], [("a100-0", 3)]), "a100-0", 2))
    assert fast.limit is Limit.CRITIC
    assert fast.samples_per_second == model.demand.samples_per_step / model.critic.step_s(node, 2)


def test_a_critic_beside_the_trainer_lengthens_its_step_in_plan_and_simulation():
    model = CostModel(stated())
    split = plan([("a100-0", 1, 2)], [("a100-0", 6)])
    beside = with_critic(split, "a100-0", 6, is_beside_trainer=True)
    step = model.score(beside).training
    alone = CostModel(stated("workload.train_tasks=[{name: actor, kind: train}]"))

    assert step.critic_s == model.critic.step_s(model.nodes["a100-0"], 6)
    assert step.step_s == alone.score(split).training.step_s + step.critic_s
    simulated, without = from_plan(model, beside, Mode.ASYNC), from_plan(alone, split, Mode.ASYNC)
    longer = simulated.trainer.sample_s - without.trainer.sample_s
    assert longer * model.demand.samples_per_step == pytest.approx(step.critic_s)
    slow = with_critic(plan([("l4-0", 1, 4)], [("a100-0", 6)]), "a100-0", 2)
    assert from_plan(model, slow, Mode.ASYNC).trainer.sample_s == pytest.approx(
        model.critic.step_s(model.nodes["a100-0"], 2) / model.demand.samples_per_step
    )


@pytest.mark.parametrize("more", [(), SHARDED])
def test_cost_model_and_validator_agree_on_every_place_of_a_critic(more):
    model = CostModel(stated(TASKS, *more))
    verdicts = set()
    for node, gpus, trained, beside in itertools.product(
        ("a100-0", "l4-1"), (1, 2, 4, 6, 7), (3, 4, 6, 7), (False, True)
    ):
        pool = [("a100-0", trained)] if node == "a100-0" else [("a100-0", trained), ("l4-1", 4)]
        placed = with_critic(plan([("l4-0", 2, 2)], pool), node, gpus, is_beside_trainer=beside)
        score, found = model.score(placed), violations(model.problem, placed)
        assert isinstance(score, Infeasible) == bool(found), (placed, score, found)
        verdicts.add((beside, bool(found)))
    assert len(verdicts) == 4


def test_a_plan_names_what_is_wrong_with_its_critic():
    model, pooled = CostModel(stated()), CostModel(stated(POOLED))
    split = plan([("l4-0", 2, 2)], [("a100-0", 4)])

    def reason(of: PlanDocument, by: CostModel = model) -> str:
        assert violations(by.problem, of)
        return by.score(of).reason

    assert reason(split) == "critic: unset, so nothing computes critic, critic_train"
    assert "leave it out" in reason(with_critic(split, "a100-0", 2), pooled)
    assert reason(with_critic(split, "b200-0", 2)) == "critic.node: there is no machine 'b200-0'"
    assert reason(with_critic(split, "a100-0", 5)) == "machine a100-0 has 8 GPUs, and the plan uses 9"
    assert reason(with_critic(split, "a100-0", 2, is_beside_trainer=True)).startswith("critic.gpus: 2, and 4 of a100-0")
    assert "a critic needs 131.0 GB of each of 1 GPUs" in reason(with_critic(split, "a100-0", 1))
    with pytest.raises(ValueError, match=r"critic\n.*names 2 machines; the processes of a critic are on one"):
        PlanDocument.model_validate({"critic": [{"node": "a100-0", "gpus": 4}, {"node": "a100-1", "gpus": 4}]})
    one = document("tiny_04", TASKS)
    actor, trained = {"name": "a", "kind": "train"}, {"name": "c", "kind": "train", "is_service": True}
    values = {"name": "v", "kind": "infer", "shares_weights": True, "is_service": True}
    for services, told in (
        ([trained, trained], "one critic at most"),
        ([values], "v shares the weights of a critic, and no service is trained"),
    ):
        one["workload"]["train_tasks"] = [actor, *services]
        with pytest.raises(ValueError, match=told):
            Problem.model_validate(one)


def test_a_critic_at_another_site_takes_a_link_and_its_time():
    here = "{name: a100, gpu: A100-80, gpus: 8, region: r0}"
    near, far = (f"nodes=[{here}, {{name: l40s, gpu: L40S, gpus: 8, region: {at}}}]" for at in ("r0", "r1"))
    placed = with_critic(plan([("a100-0", 1, 4)], [("a100-0", 4)]), "l40s-0", 8)
    rates = []
    for nodes, links in ((near, "[]"), (far, "[{a: r0, b: r1, bw_Gbps: 0.01, latency_ms: 200}]"), (far, "[]")):
        of = problem("tiny_04", TASKS, nodes, f"links={links}")
        score = CostModel(of).score(placed)
        rates.append(score.samples_per_second)
        assert bool(violations(of, placed)) is isinstance(score, Infeasible) is (rates[-1] == 0)
    assert rates[0] > rates[1] > rates[2] == 0
    assert score.reason == "critic.node: no link joins l40s-0 in region 'r1' and the head in 'r0'"


@pytest.mark.parametrize("more", [(), SHARDED])
def test_the_search_gives_the_critic_what_is_best_and_auto_is_no_worse_than_any_member(more):
    model = CostModel(stated(TASKS, *more))
    rates = {}
    for solver in SOLVERS:
        solution = solve(model, solver, time_left=forever)
        assert violations(model.problem, solution.plan) == []
        rates[solver] = solution.score.samples_per_second
    best = 0.0
    # Of all: one machine of L4 generates, and the A100s are divided between all three.
    for trained, gpus, made in itertools.product(range(1, 9), (0, 1, 2, 4, 8), range(9)):
        gen = [("l4-0", 2, 2), *([("a100-0", 1, made)] if made else [])]
        split = plan(gen, [("a100-0", trained)])
        placed = with_critic(split, "a100-0", gpus or trained, is_beside_trainer=not gpus)
        best = max(best, model.score(placed).samples_per_second)

    assert rates["auto"] >= max(*rates.values(), best) * (1 - 1e-9) > 0


def test_a_critic_stays_in_revisions_and_the_wire_carries_it():
    model = CostModel(stated(REFERENCE, *SHARDED))
    start = solve(model, "partition", time_left=forever).plan
    own = with_critic(plan([("l4-0", 2, 2)], [("a100-0", 3)]), "a100-0", 4).model_copy(update={"score": start.score})
    assert start.score
    assert start.critic is not None
    for running, keeps_pool in ((start, True), (own, False), (own, True)):
        task = PlanTask(run_id="r", problem=model.problem, cost_model="rm1", solver="partition", keeps_trainers=True)
        message = plan_task(task, time_left=forever, start=running, keeps_pool=keeps_pool)
        revised = document_of(message)
        assert revised.critic == running.critic
        assert violations(model.problem, revised) == []
        used = [(each.node_id, index) for each in message.assignments for index in each.accelerator_indices]
        shared = running.critic.gpus if running.critic.is_beside_trainer else 0
        assert len(used) - len(set(used)) == shared, "no GPU has two parts but the critic's beside the trainer"
    gone = live_problem(model.problem, [], left=frozenset({"a100-0"}), missing=frozenset()).from_real(own)
    assert gone.critic.node == "a100-0 (gone)"
    report = make_plan(model, "partition", time_left=forever, running=gone)
    assert "which has the critic's steps; bring it back" in report.reason
    assert pb.ROLE_CRITIC in {each.role for each in message.assignments}
