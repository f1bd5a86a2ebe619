"""Does a deployed plan reach what was predicted? `penstock plan --deploy` and `penstock run` of what it wrote.

python -m benchmarks.scheduler.deployed QUICKSTART [--problem P.yaml] [--staleness N] [--time-scale X] [--steps N]

Unlike pretend machines behind a real scheduler, broker and trainer; generation limits the plan, so that the trainer, a
small model on a CPU, need only keep up. Samples per second over the steps after the first few, in pretended time,
next to the plan's. QUICKSTART is what `penstock quickstart --prepare-only` made (`runs/quickstart/current`). Needs a
machine on which nobody else computes: what the services need to hand samples over does not scale.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.scratch import scratch_folder

NUM_SKIPPED = 8
"""Steps in which queues fill and processes start."""
RUN_ID = "deployed"
PROBLEM: dict[str, Any] = {
    "id": "unlike",
    "gpu_types": {
        "A100-80": {"tflops_bf16": 312, "hbm_GB": 80, "hbm_GBps": 2039, "ar_bus_GBps": 155, "ar_latency_us": 10},
        "L40S": {"tflops_bf16": 362, "hbm_GB": 48, "hbm_GBps": 864, "ar_bus_GBps": 20, "ar_latency_us": 25},
        "L4": {"tflops_bf16": 121, "hbm_GB": 24, "hbm_GBps": 300, "ar_bus_GBps": 12, "ar_latency_us": 25},
    },
    "nodes": [
        {"name": "head", "gpu": "A100-80", "gpus": 2, "region": "here"},
        {"name": "l40s", "gpu": "L40S", "gpus": 2, "region": "there"},
        {"name": "l4", "gpu": "L4", "gpus": 1, "count": 2, "region": "there"},
    ],
    "links": [{"a": "here", "b": "there", "bw_Gbps": 400, "latency_ms": 1}],
    "model": {
        "params": 7.616e9,
        "layers": 28,
        "hidden": 3584,
        "q_heads": 28,
        "kv_heads": 4,
        "head_dim": 128,
        "vocab": 152064,
    },
    "workload": {
        "prompts_per_step": 8,
        "group_size": 8,
        "prompt_len": 20,
        "staleness": 12,
        "output_len": {"type": "lognormal", "median": 100, "sigma": 0.5, "max": 256},
        "train_tasks": [{"name": "actor", "kind": "train"}],
    },
    # The pretend machines take weights between two steps, and have a prefix cache for nobody.
    "cost_model": {"max_num_seqs": 32, "sync_pause_s": 0, "prefix_sharing": False},
}
"""Two GPUs that can hold the training, and slower ones of three machines of another site, which cannot."""


def main() -> int:
    """Plan, deploy, run, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("quickstart", type=Path)
    parser.add_argument("--problem", type=Path, help="another one, of pretend GPUs; generation must limit its plan")
    parser.add_argument("--staleness", type=int, help="versions; the problem's own when left out")
    parser.add_argument("--time-scale", type=float, default=0.5, help="pretended seconds in a real one")
    parser.add_argument("--steps", type=int, default=24)
    options = parser.parse_args()
    # A child that is left behind would keep the ports: after SIGTERM, too, it is killed, and its services with it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with scratch_folder() as folder:
        problem = _written(folder / "problem.yaml", _problem(options))
        run = _written(folder / "run.yaml", _run(options.quickstart.absolute(), folder, options))
        plan = json.loads(_penstock(folder, "plan", str(problem), "--budget-s", "10", "--json", *_deploy(folder, run)))
        if plan["limit"] != "generation":
            parser.error(f"--problem: its plan is limited by {plan['limit']}, which is not pretended here")
        _penstock(folder, "run", str(folder / "out" / "run.yaml"))
        lines = (folder / "runs" / RUN_ID / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines[NUM_SKIPPED:]]
    _tell(plan, steps, options.time_scale)
    return 0


def _problem(options: argparse.Namespace) -> dict[str, Any]:
    stated = PROBLEM if options.problem is None else yaml.safe_load(options.problem.read_text(encoding="utf-8"))
    staleness = {} if options.staleness is None else {"staleness": options.staleness}
    return {**stated, "workload": {**stated["workload"], **staleness}}


def _run(quickstart: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "run": {"id": RUN_ID, "dir": str(folder / "runs"), "num_steps": options.steps, "checkpoint_every_steps": 1000},
        "model": {"path": str(quickstart / "model"), "dtype": "float32"},
        "data": {"train": str(quickstart / "train.jsonl"), "max_prompt_tokens": 128},
        "reward": {"model": "exact_match"},
        "generator": {"engine": "emulated", "emulated": {"time_scale": options.time_scale}},
    }


def _deploy(folder: Path, run: Path) -> Sequence[str]:
    return ("--deploy", str(folder / "out"), "--run", str(run), "--address", "127.0.0.1")


def _written(path: Path, document: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


def _penstock(folder: Path, *arguments: str) -> str:
    """What the command printed. Ends this program with what it said where it fails."""
    command = (sys.executable, "-P", "-m", "console", *arguments)
    told = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=False)
    if told.returncode != 0:
        sys.exit(f"penstock {arguments[0]} ended with {told.returncode}:\n{told.stdout[-4000:]}")
    return told.stdout


def _tell(plan: dict[str, Any], steps: Sequence[dict[str, Any]], time_scale: float) -> None:
    real_s = sum(step["time/step_s"] for step in steps)
    num_samples = sum(step["throughput/samples_per_second"] * step["time/step_s"] for step in steps)
    measured = num_samples / real_s / time_scale
    predicted = plan["samples_per_second"]
    idle = sum(step["time/idle_s"] for step in steps) / real_s
    print(f"{len(steps)} steps in {real_s:.1f} s; the trainer waited for {idle:.0%} of it")
    print(f"samples/s: predicted {predicted:.2f}, measured {measured:.2f} ({measured / predicted:.3f} of it)")


if __name__ == "__main__":
    sys.exit(main())
