"""The problem of the machines that are there, where the stated one gives them names."""

from penstock.v1 import scheduler_pb2 as pb
from services.scheduler.problem.plan_document import PlanDocument, node_classes
from services.scheduler.problem.problem import Problem
from services.scheduler.replanning.live_problem import live_problem
from tests.helpers.plans.problems import document


def test_named_machines_stay_what_they_are_and_others_join_them():
    entry = {"name": "a", "gpu": "A100-80", "gpus": 8, "count": 3, "machines": ["gpu-1", "gpu-2", "gpu-3"]}
    stated = Problem.model_validate({**document("tiny_04"), "links": [], "nodes": [entry]})
    here = live_problem(stated, [], left=frozenset(), missing=frozenset())
    assert here.problem == stated

    joined = pb.Node(node_id="gpu-9", accelerators=[pb.Accelerator(kind="A100-80", count=8)])
    views = [pb.NodeView(node=pb.Node(node_id="gpu-2"), is_alive=False), pb.NodeView(node=joined, is_alive=True)]
    now = live_problem(stated, views, left=frozenset({"gpu-1"}), missing=frozenset())
    names = {now.node_ids.get(name, name) for name in node_classes(now.problem)}
    assert names == {"gpu-3", "gpu-9"}
    plan = PlanDocument.model_validate({"gen": [{"node": "gpu-9"}, {"node": "gpu-1"}], "train": []})
    (kept,) = now.from_real(plan).gen
    assert now.node_ids[kept.node] == "gpu-9"
