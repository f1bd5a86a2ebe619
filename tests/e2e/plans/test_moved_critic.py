"""The machine of a run's critic is taken away on notice: a revision moves the critic, and the run goes on."""

import json
import re
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from console.deploy.deployment import write_deployment
from penstock.model.model_shape import read_numbers
from services.scheduler.cost_model.reference import CostModel
from services.scheduler.problem.plan_document import PlanDocument
from services.scheduler.problem.problem import Problem
from tests.e2e.plans.machines import started
from tests.e2e.plans.moved_runs import last_step, on_policy, plans, storage_of, train
from tests.e2e.runs import RUN_ID, running
from tests.helpers.plans.free_ports import move_ports

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.grid, pytest.mark.timeout(600)]

PLAN = {
    "gen": [{"node": "l4", "tp": 1, "count": 1}],
    "train": [{"node": "head", "gpus": 1}],
    "critic": {"node": "values", "gpus": 1},
}


def problem_of(model_dir):
    """A machine each for trainer and critic, and one with two GPUs, of which one generates. A GPU holds one of them."""
    model = read_numbers(model_dir)
    state_GB = 16 * model["params"] / 1e9
    node = {"gpu": "L4", "gpus": 1}
    return {
        "id": "moving",
        "gpu_types": {
            "L4": {"tflops_bf16": 121, "hbm_GB": 1.6 * state_GB, "hbm_GBps": 300, "ar_bus_GBps": 12},
        },
        "nodes": [
            {"name": "head", **node, "machines": ["head"]},
            {"name": "values", **node, "machines": ["values"]},
            {"name": "l4", "gpu": "L4", "gpus": 2, "machines": ["l4"]},
        ],
        "links": [],
        "model": model,
        "workload": {
            "prompts_per_step": 8, "group_size": 4, "prompt_len": 30, "staleness": 0,
            "output_len": {"type": "lognormal", "median": 40, "sigma": 0.5, "max": 64},
            "train_tasks": [
                {"name": "actor", "kind": "train"},
                {"name": "critic", "kind": "infer", "shares_weights": True, "is_service": True},
                {"name": "critic_train", "kind": "train", "is_service": True},
            ],
        },
        "cost_model": {
            "train_pack_tokens": 128, "mem_util": 1, "reserve_GB": 0, "mfu_train": 1e-6, "sync_pause_s": 0,
        },
    }  # fmt: skip


def deploy(task, folder):
    """The run and its machines as `penstock plan --deploy --moves-trainer --address 127.0.0.1` writes them."""
    run = on_policy(task, folder)
    run["run"] |= {"checkpoint_storage": storage_of(folder), "checkpoint_every_steps": 3}
    run["trainer"] = {"device": "cpu"}
    run["scheduler"] = {"heartbeat_interval_s": 1}
    run["generator"] = {"engine": "emulated", "emulated": {"model": "qwen2.5-1.5b", "time_scale": 3}}
    problem = Problem.model_validate(problem_of(task.model_dir))
    out = folder / "out"
    write_deployment(
        out, CostModel(problem), PlanDocument.model_validate(PLAN), run=run, address="127.0.0.1", moves_trainer=True
    )
    move_ports(out)
    document = yaml.safe_load((out / "run.yaml").read_text())
    nodes = {Path(path).stem.removeprefix("node-"): Path(path) for path in document["scheduler"].pop("nodes")}
    return document, {name: yaml.safe_load(path.read_text()) for name, path in nodes.items()}


def critics(plan):
    return {each["node_id"] for each in plan["assignments"] if each["role"] == "ROLE_CRITIC"}


def test_a_critic_goes_on_at_another_machine_when_its_own_is_taken_away(tiny_task, tmp_path):
    document, machines = deploy(tiny_task, tmp_path)
    notice = tmp_path / "notice"

    with ExitStack() as stack:
        run = stack.enter_context(running(document, tmp_path))
        for name in ("l4", "head"):
            stack.enter_context(started(name, machines[name], tmp_path))
        values = stack.enter_context(started("values", machines["values"], tmp_path, "--notice-file", str(notice)))
        train(run, 4)
        assert critics(plans(run)[0]) == {"values"}

        notice.touch()
        assert values.process.wait(timeout=30) == 0
        run.wait_for("a plan with the critic elsewhere", lambda: critics(plans(run)[-1]) not in ({"values"}, set()))
        (place,) = critics(plans(run)[-1])
        assert "the change moves the critic" in plans(run)[-1]["explanation"]
        train(run, 4)
        steps = last_step(run)
        run.process.terminate()
        assert run.end(timeout_s=90) == 130, run.text
        summary, moved = run.summary(), run.metrics()

    assert summary["audit"]["balanced"] is True
    assert summary["audit"]["trained"] == summary["steps"] * 8 * 4
    # No step of the trainer was taken twice.
    assert [step["policy_version"] for step in moved] == list(range(1, len(moved) + 1))
    assert len(moved) >= steps
    log = (tmp_path / "out" / "machines" / place / "logs" / "critic.log").read_text()
    (again,) = re.findall(r"steps taken again .*num_steps=(\d+)", log) or ["0"]
    assert int(again) <= 3, "it went on from a checkpoint, by the steps since"
    assert json.loads((tmp_path / "storage" / RUN_ID / "critic" / "run.json").read_text())["run_id"] == RUN_ID
