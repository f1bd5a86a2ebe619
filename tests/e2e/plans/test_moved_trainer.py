"""Revisions move a run's trainer to other machines, another mesh and back, without a folder that machines share."""

import json
import re
import signal
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from console.deploy.deployment import write_deployment
from console.recording.reader import read_rows
from console.recording.row_codec import from_row
from penstock.model.model_shape import read_numbers
from services.scheduler.cost_model.reference import CostModel
from services.scheduler.problem.plan_document import PlanDocument
from services.scheduler.problem.problem import Problem
from tests.e2e.plans.machines import started
from tests.e2e.plans.moved_runs import on_policy, plans, storage_of, train
from tests.e2e.runs import RUN_ID, running
from tests.helpers.plans.free_ports import move_ports
from tests.helpers.ports import free_addresses

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.grid, pytest.mark.timeout(600)]

PACK_TOKENS = 128
OLD = {"old-0": 1, "old-1": 1}
STAGES = {"islands": [2], "pipeline": 2, "layers_per_stage": [2, 2]}
PLAN = {
    "gen": [{"node": "l4", "tp": 1, "count": 1}],
    "train": [{"node": name, "gpus": gpus, "share": 1.0} for name, gpus in OLD.items()],
    "mesh": STAGES,
}
PUBLISHED = re.compile(r"version published.*")
BEGUN = "run begins"
RESUMED = re.compile(r"resumed +policy_version=(\d+)")
ENDED = re.compile(r"run ends .*\bsteps=(\d+)")
TIME_CHARACTERS = len("2026-01-01 12:00:00")
SAMPLES = 8 * 4


def problem_of(model_dir):
    """Training limits the run: in two stages on two machines of one H800, until one joins whose GPU trains faster than
    both together, and holds the whole model. Memory is some of the tiny model's state."""
    model = read_numbers(model_dir)
    state_GB = 16 * model["params"] / 1e9
    return {
        "id": "moving",
        "gpu_types": {
            "H800": {"tflops_bf16": 990, "hbm_GB": 1.2 * state_GB, "hbm_GBps": 3350, "ar_bus_GBps": 150},
            "H20": {"tflops_bf16": 9900, "hbm_GB": 3 * state_GB, "hbm_GBps": 3350, "ar_bus_GBps": 150},
            "L4": {"tflops_bf16": 121, "hbm_GB": 1.5 * state_GB, "hbm_GBps": 300, "ar_bus_GBps": 12},
        },
        "nodes": [
            {"name": "old", "gpu": "H800", "gpus": 1, "count": 2, "machines": ["old-0", "old-1"], "nic_Gbps": 0.005},
            {"name": "l4", "gpu": "L4", "gpus": 1, "machines": ["l4"], "region": "far"},
        ],
        "links": [{"a": "default", "b": "far", "bw_Gbps": 10}],
        "model": model,
        "workload": {
            "prompts_per_step": 8, "group_size": 4, "prompt_len": 30, "staleness": 0,
            "output_len": {"type": "lognormal", "median": 40, "sigma": 0.5, "max": 64},
            "train_tasks": [{"name": "actor", "kind": "train"}],
        },
        "cost_model": {
            "train_pack_tokens": PACK_TOKENS, "mem_util": 1, "reserve_GB": 0, "mfu_train": 1e-6, "sync_pause_s": 0,
        },
    }  # fmt: skip


def deploy(task, folder):
    """The run and its machines as `penstock plan --deploy --moves-trainer --address 127.0.0.1` writes them."""
    run = on_policy(task, folder)
    run["run"] |= {"checkpoint_storage": storage_of(folder), "keep_checkpoints": 99}
    run["record"] = True
    run["trainer"] = {"device": "cpu"}
    run["scheduler"] = {"heartbeat_interval_s": 1}
    run["generator"] = {"engine": "emulated", "emulated": {"model": "qwen2.5-1.5b", "time_scale": 3}}
    problem = Problem.model_validate(problem_of(task.model_dir))
    plan = PlanDocument.model_validate(PLAN)
    out = folder / "out"
    write_deployment(out, CostModel(problem), plan, run=run, address="127.0.0.1", moves_trainer=True)
    move_ports(out)
    document = yaml.safe_load((out / "run.yaml").read_text())
    nodes = {Path(path).stem.removeprefix("node-"): Path(path) for path in document["scheduler"].pop("nodes")}
    return document, {name: yaml.safe_load(path.read_text()) for name, path in nodes.items()}


def joining(document, machines):
    """A machine like an old one but for its GPU, which the run knows as a place of its trainer."""
    new = json.loads(json.dumps(machines["old-0"]).replace("old-0", "new"))
    listen, weights = free_addresses(2)
    new["gpu"] = new["generator"]["emulated"]["gpu"] = "H20"
    new["generator"]["listen"] = "127.0.0.1:0"
    new["trainer"] |= {"listen": listen, "weights_listen": weights, "weights_url": weights}
    document["endpoints"]["trainer"] += f",{listen}"
    for each in (*machines.values(), new):
        each["generator"]["weights"] = document["endpoints"]["trainer"]
    return new


def training(plan):
    pool = (each for each in plan["assignments"] if each["role"] == "ROLE_TRAINER")
    return {each["node_id"]: len(each["accelerator_indices"]) for each in pool}


def published(folder, *names):
    """Digests of each version, by all trainers that published it."""
    found = {}
    for name in names:
        for log in sorted((folder / "out" / "machines" / name / "logs").glob("trainer*.log")):
            for line in PUBLISHED.findall(log.read_text()):
                said = dict(re.findall(r"(\w+)=(\S+)", line))
                found.setdefault(int(said["policy_version"]), []).append(said["digest"])
    return found


def stretches(folder, *names):
    """From which step to which each trainer went, by its own log, in the order of time."""
    found = []
    for name in names:
        for log in sorted((folder / "out" / "machines" / name / "logs").glob("trainer*.log")):
            first, begun = 0, ""
            for line in log.read_text().splitlines():
                if BEGUN in line:
                    first, begun = 0, line[:TIME_CHARACTERS]
                elif match := RESUMED.search(line):
                    first = int(match[1])
                elif match := ENDED.search(line):
                    found.append((begun, name, first, int(match[1])))
    return [(name, first, last) for _, name, first, last in sorted(found)]


def assert_each_step_once(run, folder, spans, num_steps):
    """Logs, checkpoints, recording and metrics tell of the same steps, none of which was taken twice."""
    bounds = [0, *(last for _, _, last in spans)]
    # A trainer that goes on from an earlier checkpoint than the last one takes steps again.
    assert [first for _, first, _ in spans] == bounds[:-1], spans
    assert bounds[-1] == num_steps
    storage = Path(storage_of(folder).removeprefix("file://")) / RUN_ID
    stored = {int(path.parent.name.removeprefix("step_")) for path in storage.glob("step_*/MANIFEST.json")}
    assert set(bounds) - {0} <= stored, (bounds, stored)

    rows = all_samples(run.folder.path / "trajectories.jsonl")
    steps = {sample.step for sample in rows}
    assert sorted(version for _, version, _ in steps) == list(range(1, num_steps + 1)), "a step was trained again"
    assert Counter(sample.policy_version for sample in rows) == dict.fromkeys(range(1, num_steps + 1), SAMPLES)
    assert len({sample.position for sample in rows}) == num_steps * SAMPLES, "a sample was trained twice"


def all_samples(path):
    """Of all histories, also of those that were abandoned."""
    return [from_row(row, where=where) for where, row in read_rows(path)]


def test_a_trainer_moves_from_two_stages_to_a_faster_machine_and_back_when_that_is_taken_away(tiny_task, tmp_path):
    document, machines = deploy(tiny_task, tmp_path)
    machines["new"] = joining(document, machines)

    with ExitStack() as stack:
        run = stack.enter_context(running(document, tmp_path))
        for name in ("l4", *OLD):
            stack.enter_context(started(name, machines[name], tmp_path))
        train(run, 2)
        assert training(plans(run)[0]) == OLD

        new = stack.enter_context(started("new", machines["new"], tmp_path))
        run.wait_for("a plan that trains on the new machine", lambda: training(plans(run)[-1]) == {"new": 1})
        assert "the change moves the trainer, which stops everything for" in plans(run)[-1]["explanation"]
        train(run, 2)

        new.process.send_signal(signal.SIGTERM)
        run.wait_for("a plan that trains where it did", lambda: training(plans(run)[-1]) == OLD)
        train(run, 2)
        run.process.send_signal(signal.SIGINT)
        assert run.end(timeout_s=90) == 130, run.text
        summary, moved = run.summary(), run.metrics()

    assert summary["audit"]["balanced"] is True
    assert summary["audit"]["trained"] == summary["steps"] * 8 * 4
    assert [step["policy_version"] for step in moved] == list(range(1, len(moved) + 1))
    spans = stretches(tmp_path, *OLD, "new")
    assert [name for name, _, _ in spans] == ["old-0", "new", "old-0"], spans
    assert_each_step_once(run, tmp_path, spans, summary["steps"])
    # A trainer that is stopped within a step leaves its version to the next one; of a version that both published, in
    # stages and whole, every bit is the same.
    digests = published(tmp_path, *OLD, "new")
    assert set(range(summary["steps"])) <= set(digests)
    assert all(len(set(each)) == 1 for each in digests.values()), digests
    assert not (tmp_path / "runs" / RUN_ID / "checkpoints").exists(), "no trainer sees the folder of the run"
