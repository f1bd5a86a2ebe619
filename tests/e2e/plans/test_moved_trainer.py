"""Revisions move a run's trainer to other machines and another number of processes; nothing is trained twice."""

import json
import signal
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from console.launch.ports import free_addresses
from tests.e2e.plans.machines import machine
from tests.e2e.runs import RUN_ID, running, small_run
from tests.helpers.console import write_rows
from tests.helpers.models.tiny_model import make_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

# Training limits the run: on two machines of one H800, until one joins whose GPU trains faster than both together.
PROBLEM = {
    "id": "moving",
    "gpu_types": {
        "H800": {"tflops_bf16": 990, "hbm_GB": 80, "hbm_GBps": 3350, "ar_bus_GBps": 150},
        "H20": {"tflops_bf16": 9900, "hbm_GB": 200, "hbm_GBps": 3350, "ar_bus_GBps": 150},
        "L4": {"tflops_bf16": 121, "hbm_GB": 24, "hbm_GBps": 300, "ar_bus_GBps": 12},
    },
    "nodes": [
        {"name": "old", "gpu": "H800", "gpus": 1, "count": 2, "machines": ["old-0", "old-1"]},
        {"name": "l4", "gpu": "L4", "gpus": 1, "machines": ["l4"], "region": "far"},
    ],
    "links": [{"a": "default", "b": "far", "bw_Gbps": 10}],
    "model": {
        "params": 7.6e9, "layers": 28, "hidden": 3584, "q_heads": 28, "kv_heads": 4, "head_dim": 128, "vocab": 152064,
    },
    "workload": {
        "prompts_per_step": 8, "group_size": 4, "prompt_len": 30, "staleness": 1,
        "output_len": {"type": "lognormal", "median": 40, "sigma": 0.5, "max": 64},
        "train_tasks": [{"name": "actor", "kind": "train"}],
    },
}  # fmt: skip
OLD = {"old-0": 1, "old-1": 1}
PLAN = {
    "gen": [{"node": "l4", "tp": 1, "count": 1}],
    "train": [{"node": name, "gpus": gpus} for name, gpus in OLD.items()],
}
COMPARED = ("reward/mean", "length/mean", "loss/loss", "loss/entropy", "optimizer/grad_norm")


@pytest.fixture
def tiny_task(tmp_path):
    """A model of random weights and additions: what is learned does not matter here."""
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(8) for b in range(8)]
    train = write_rows(tmp_path / "train.jsonl", *rows)
    (tmp_path / "brevity.py").write_text("def brevity(completion: str) -> float:\n    return -float(len(completion))\n")
    return SimpleNamespace(model_dir=make_tiny_model(tmp_path / "model"), train_path=train, eval_path=None)


def on_policy(task, folder):
    """What is trained on depends on the seed alone."""
    settings = {"run__num_steps": 10_000, "run__num_eval_prompts": 0, "data__eval": None, "algorithm__max_staleness": 0}
    return small_run(task, folder, reward__model="brevity:brevity", **settings)


def trains(address, weights, meeting, folder):
    """A machine that can train."""
    trainer = {"listen": address, "weights_listen": weights, "allowed_roots": [str(folder)]}
    trainer |= {"run_dir": str(folder / "runs" / RUN_ID), "rendezvous_port": int(meeting.rpartition(":")[2])}
    return {"trainer": trainer}


def plans(run):
    path = run.folder.plans
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def training(plan):
    pool = (each for each in plan["assignments"] if each["role"] == "ROLE_TRAINER")
    return {each["node_id"]: len(each["accelerator_indices"]) for each in pool}


def test_a_trainer_moves_from_two_machines_to_a_faster_one_and_back_when_that_is_taken_away(tiny_task, tmp_path):
    broker, scheduler, meeting, *free = free_addresses(9)
    listens = dict(zip((*OLD, "new"), free[:3], strict=True))
    weights = dict(zip((*OLD, "new"), free[3:], strict=True))
    addresses = {"broker": broker, "scheduler": scheduler, "trainer": ",".join(listens.values())}
    (tmp_path / "problem.json").write_text(json.dumps(PROBLEM))
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    document = on_policy(tiny_task, tmp_path)
    document["listen"] = {"broker": broker, "scheduler": scheduler}
    document["endpoints"] = {"trainer": addresses["trainer"]}
    document["scheduler"] = {
        "problem": str(tmp_path / "problem.json"),
        "plan": str(tmp_path / "plan.json"),
        "heartbeat_interval_s": 1,
    }
    del document["generator"]
    with ExitStack() as stack:
        run = stack.enter_context(running(document, tmp_path))
        stack.enter_context(machine("l4", addresses, tiny_task, tmp_path))
        for name in OLD:
            place = trains(listens[name], weights[name], meeting, tmp_path)
            stack.enter_context(machine(name, addresses, tiny_task, tmp_path, gpu="H800", **place))
        run.wait_for_step(2)
        assert training(plans(run)[0]) == OLD

        place = trains(listens["new"], weights["new"], meeting, tmp_path)
        new = stack.enter_context(machine("new", addresses, tiny_task, tmp_path, gpu="H20", **place))
        run.wait_for("a plan that trains on the new machine", lambda: training(plans(run)[-1]) == {"new": 1})
        assert "the change moves the trainer, which stops everything for" in plans(run)[-1]["explanation"]
        run.wait_for_step(run.num_steps + 3)

        new.process.send_signal(signal.SIGTERM)
        run.wait_for("a plan that trains where it did", lambda: training(plans(run)[-1]) == OLD)
        run.wait_for_step(run.num_steps + 3)
        run.process.send_signal(signal.SIGINT)
        assert run.end(timeout_s=90) == 130, run.text
        summary, moved = run.summary(), run.metrics()

    assert summary["audit"]["balanced"] is True
    assert summary["audit"]["trained"] == summary["steps"] * 8 * 4
    assert [step["policy_version"] for step in moved] == list(range(1, len(moved) + 1))

    (tmp_path / "unmoved").mkdir()
    document = on_policy(tiny_task, tmp_path / "unmoved")
    document["run"]["num_steps"] = len(moved)
    document["generator"] = {"engine": "emulated", "max_context_tokens": 192}
    (tmp_path / "unmoved" / "brevity.py").write_text((tmp_path / "brevity.py").read_text())
    with running(document, tmp_path / "unmoved") as run:
        assert run.end() == 0, run.text
        unmoved = run.metrics()
    for one, other in zip(moved, unmoved, strict=True):
        assert {key: one[key] for key in COMPARED} == pytest.approx({key: other[key] for key in COMPARED}, rel=1e-5)
