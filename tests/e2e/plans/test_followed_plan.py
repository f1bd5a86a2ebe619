"""A run follows its plan: machines that join, die or are slow are planned for, and training goes on meanwhile."""

import json
import signal
from contextlib import ExitStack
from types import SimpleNamespace

import grpc
import pytest

from penstock.v1 import broker_pb2, broker_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from tests.e2e.plans.machines import machine
from tests.e2e.runs import RUN_ID, running, small_run
from tests.helpers.console import write_rows
from tests.helpers.models.tiny_model import make_tiny_model
from tests.helpers.ports import free_addresses

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

# 7B on two GPUs that can hold its training, and slow ones that cannot: who trains and who generates is certain.
PROBLEM = {
    "id": "followed",
    "gpu_types": {
        "H800": {"tflops_bf16": 990, "hbm_GB": 80, "hbm_GBps": 3350, "ar_bus_GBps": 150},
        "L4": {"tflops_bf16": 121, "hbm_GB": 24, "hbm_GBps": 300, "ar_bus_GBps": 12},
    },
    "nodes": [
        {"name": "head", "gpu": "H800", "gpus": 2},
        {"name": "l4", "gpu": "L4", "gpus": 1, "count": 2},
    ],
    "model": {
        "params": 7.6e9, "layers": 28, "hidden": 3584, "q_heads": 28, "kv_heads": 4, "head_dim": 128, "vocab": 152064,
    },
    "workload": {
        "prompts_per_step": 8, "group_size": 4, "prompt_len": 30, "staleness": 1,
        "output_len": {"type": "lognormal", "median": 40, "sigma": 0.5, "max": 64},
        "train_tasks": [{"name": "actor", "kind": "train"}],
    },
}  # fmt: skip


@pytest.fixture
def tiny_task(tmp_path):
    """A model of random weights and additions: what is learned does not matter here."""
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(8) for b in range(8)]
    train = write_rows(tmp_path / "train.jsonl", *rows)
    return SimpleNamespace(model_dir=make_tiny_model(tmp_path / "model"), train_path=train, eval_path=None)


def plans(run):
    path = run.folder.plans
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def generating(plan):
    return {each["node_id"] for each in plan["assignments"] if each["role"] == "ROLE_GENERATOR"}


def test_machines_that_join_die_or_are_slow_are_planned_for_while_training_goes_on(tiny_task, tmp_path):
    addresses = dict(zip(("broker", "scheduler", "trainer"), free_addresses(3), strict=True))
    problem = tmp_path / "problem.json"
    problem.write_text(json.dumps(PROBLEM))
    document = small_run(tiny_task, tmp_path, run__num_steps=10_000, data__eval=None)
    document["listen"] = addresses
    document["scheduler"] = {"problem": str(problem), "heartbeat_interval_s": 2}
    with ExitStack() as stack:
        run = stack.enter_context(running(document, tmp_path))
        stack.enter_context(machine("l4-0", addresses, tiny_task, tmp_path))
        dying = stack.enter_context(machine("l4-1", addresses, tiny_task, tmp_path))
        channel = stack.enter_context(grpc.insecure_channel(addresses["scheduler"]))
        scheduler = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        broker = broker_pb2_grpc.BrokerServiceStub(stack.enter_context(grpc.insecure_channel(addresses["broker"])))

        def works(name):
            view = broker.GetRun(broker_pb2.GetRunRequest(run_id=RUN_ID), timeout=30, wait_for_ready=True)
            here = [each for each in view.generators if each.hello.generator_id.startswith(f"{name}-gen-")]
            return any(each.measured_tokens_per_second > 0 for each in here)

        def is_known(name):
            nodes = scheduler.ListNodes(scheduler_pb2.ListNodesRequest(), timeout=30, wait_for_ready=True).nodes
            return any(each.node.node_id == name for each in nodes)

        run.wait_for_step(1)
        run.wait_for("work on both machines", lambda: works("l4-0") and works("l4-1"))
        assert generating(plans(run)[0]) == {"l4-0", "l4-1"}

        stack.enter_context(machine("l4-new", addresses, tiny_task, tmp_path, emulated={"slowdown": 5}))
        run.wait_for("a machine that joins", lambda: is_known("l4-new"))
        dying.die()
        run.wait_for("a plan with the new one", lambda: generating(plans(run)[-1]) == {"l4-0", "l4-new"})
        told = " ".join(plan["explanation"] for plan in plans(run))
        assert "l4-1 of the plan in force: not there any more" in told
        assert "l4-new now used" in told

        run.wait_for("work on the new machine", lambda: works("l4-new"))
        run.wait_for("a plan without the slow one", lambda: generating(plans(run)[-1]) == {"l4-0"})
        assert "slower than machines like it or than it should be: l4-new at" in plans(run)[-1]["explanation"]

        num_noted = len(plans(run))
        run.kill("scheduler")
        run.wait_for("a scheduler that is told what the run follows", lambda: len(plans(run)) > num_noted)
        assert "l4-0" in generating(plans(run)[-1])
        assert "l4-1" not in generating(plans(run)[-1]), "it is not counted on because the problem names it"
        run.wait_for_step(run.num_steps + 2)
        run.process.send_signal(signal.SIGINT)
        assert run.end(timeout_s=90) == 130, run.text
        summary = run.summary()

    assert summary["audit"]["balanced"] is True
    assert summary["audit"]["trained"] == summary["steps"] * 8 * 4
    assert {name for name, number in summary["restarts"].items() if number} == {"scheduler"}
    assert summary["max_staleness_seen"] <= 1
