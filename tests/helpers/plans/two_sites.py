"""A small plan over two sites, whose L4 is emulated: what engines of `penstock plan --deploy` start in tests."""

from __future__ import annotations

import os
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from console.certs.authority import make_authority
from console.certs.issuing import issue
from console.certs.request import checked_request
from console.deploy.deployment import write_deployment
from services.scheduler.cost_model.reference import CostModel
from services.scheduler.problem.plan_document import Broker
from services.scheduler.problem.problem import Problem
from tests.helpers.console import write_rows
from tests.helpers.models.tiny_model import make_tiny_model
from tests.helpers.plans.problems import plan

RUN_ID = "deployed"
MACHINES = ("head-0", "l4-0")
CENTER = "center-0"
PLAN = plan([("l4-0", 1, 1)], [("head-0", 2)])
# 7B on two GPUs that can hold its training, and one that cannot.
PROBLEM: dict[str, Any] = {
    "id": "two sites",
    "gpu_types": {
        "H800": {"tflops_bf16": 990, "hbm_GB": 80, "hbm_GBps": 3350, "ar_bus_GBps": 150},
        "L4": {"tflops_bf16": 121, "hbm_GB": 24, "hbm_GBps": 300, "ar_bus_GBps": 12},
    },
    "nodes": [
        {"name": "head", "gpu": "H800", "gpus": 2, "region": "home"},
        {"name": "l4", "gpu": "L4", "gpus": 1, "region": "far"},
    ],
    "links": [{"a": "home", "b": "far", "bw_Gbps": 1.0, "latency_ms": 40}],
    "model": {
        "params": 7.6e9, "layers": 28, "hidden": 3584, "q_heads": 28, "kv_heads": 4, "head_dim": 128, "vocab": 152064,
    },
    "workload": {
        "prompts_per_step": 8, "group_size": 4, "prompt_len": 30, "staleness": 1,
        "output_len": {"type": "fixed", "length": 16},
        "train_tasks": [{"name": "actor", "kind": "train"}],
    },
}  # fmt: skip


def make_data(folder: Path) -> Path:
    """A model of random weights and additions: what is learned does not matter here."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = ({"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(8) for b in range(8))
    write_rows(folder / "train.jsonl", *rows)
    make_tiny_model(folder / "model")
    return folder


def run_document(data: Path | str, *, num_steps: int, **sections: Any) -> dict[str, Any]:
    """A run on emulated GPUs whose trainer is a CPU's."""
    return {
        "run": {"id": RUN_ID, "num_steps": num_steps, "checkpoint_every_steps": 2, **sections.pop("run", {})},
        "model": {"path": f"{data}/model", "dtype": "float32"},
        "data": {"train": f"{data}/train.jsonl", "max_prompt_tokens": 32},
        "reward": {"model": "exact_match"},
        "generator": {"engine": "emulated", "emulated": {"model": "qwen2.5-1.5b", "time_scale": 20}},
        **sections,
    }


def deploy(folder: Path, engine: str, run: dict[str, Any], *, has_center: bool = False) -> Path:
    """Writes the plan for an engine; with a center broker, Redis and scheduler are on that machine, without GPUs."""
    problem, chosen = PROBLEM, PLAN
    if has_center:
        problem = {**PROBLEM, "hosts": [{"name": "center", "region": "home", "cores": 4}]}
        chosen = PLAN.model_copy(update={"broker": Broker(node=CENTER), "scheduler": CENTER})
    write_deployment(folder, CostModel(Problem.model_validate(problem)), chosen, engine=engine, run=run)
    return folder


def issue_certificates(folder: Path, *, run_id: str = RUN_ID, owner: int | None = None) -> Path:
    """A certificate for each machine, as the deployment's README says; `owner` reads them."""
    now = datetime.now(UTC)
    shutil.rmtree(folder / "authority", ignore_errors=True)
    authority = make_authority(folder / "authority", name="Penstock", days=10, now=now)
    holders = (("head-0", "operator", "*", "*"), (CENTER, "broker", run_id, "*"), ("l4-0", "generator", run_id, "far"))
    for name, role, run, site in holders:
        out = folder / "certificates" / name
        shutil.rmtree(out, ignore_errors=True)
        request = checked_request([role], run=run, site=site, name=name, hosts=[name])
        issue(authority, request, validity=timedelta(hours=4), now=now, out=out)
        for path in out.iterdir():
            os.chown(path, owner if owner is not None else os.getuid(), -1)
    return folder / "certificates"
