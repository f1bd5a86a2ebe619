"""Checks that a deployed plan reaches its prediction: `penstock plan --deploy`, and `penstock run` of its output.

penstock bench scheduler.deployed QUICKSTART [--only NAME,...] [--problem P.yaml] [--time-scale X] [--steps N]

Unlike emulated machines behind a real scheduler, broker and trainer; generation limits the plan, so that the trainer, a
small model on a CPU, need only keep up. Samples per second over the steps after the first few, in emulated time, next
to the two that `penstock plan` reports: the cost model's and the simulated one. QUICKSTART is what `penstock quickstart
--prepare-only` made (`runs/quickstart/current`). Needs an otherwise idle machine: the services' time for delivering
samples does not scale.
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

from benchmarks.scheduler.problems.emulated_machines import VARIATIONS, variation
from benchmarks.scratch import scratch_folder

NUM_SKIPPED = 8
"""Steps in which queues fill and processes start."""
RUN_ID = "deployed"


def main() -> int:
    """Plan, deploy, run, compare, each problem in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("quickstart", type=Path)
    parser.add_argument("--only", default=",".join(VARIATIONS), help=f"some of {', '.join(VARIATIONS)}; default: all")
    parser.add_argument("--problem", type=Path, help="another problem of emulated GPUs; generation must limit its plan")
    parser.add_argument("--time-scale", type=float, default=0.5, help="emulated seconds per real second")
    parser.add_argument("--steps", type=int, default=24)
    options = parser.parse_args()
    if unknown := [name for name in options.only.split(",") if name not in VARIATIONS]:
        parser.error(f"--only: {unknown[0]!r} is none of {', '.join(VARIATIONS)}")
    if options.steps <= NUM_SKIPPED:
        parser.error(f"--steps: {options.steps} must be more than the first {NUM_SKIPPED}, which are left out")
    problems = {name: variation(name) for name in options.only.split(",")}
    if options.problem is not None:
        problems = {options.problem.stem: yaml.safe_load(options.problem.read_text(encoding="utf-8"))}
    # A leftover child would keep the ports: it is killed after SIGTERM too, with its services.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print("samples/s in emulated time; how many times the prediction was reached\n")
    print("| problem | cost model | simulated | measured | trainer waited |\n|---|---|---|---|---|", flush=True)
    for name, problem in problems.items():
        print(_compared(name, problem, options), flush=True)
    return 0


def _compared(name: str, problem: dict[str, Any], options: argparse.Namespace) -> str:
    """One row of the result."""
    with scratch_folder() as folder:
        stated = _written(folder / "problem.yaml", problem)
        run = _written(folder / "run.yaml", _run(options.quickstart.absolute(), folder, options))
        plan = json.loads(_penstock(folder, "plan", str(stated), "--budget-s", "10", "--json", *_deploy(folder, run)))
        if plan["limit"] != "generation":
            sys.exit(f"{name}: its plan is limited by {plan['limit']}, which is not emulated here")
        _penstock(folder, "run", str(folder / "out" / "run.yaml"))
        lines = (folder / "runs" / RUN_ID / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return _row(name, plan, [json.loads(line) for line in lines[NUM_SKIPPED:]], options.time_scale)


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
    """The command's output. Exits this program with it if the command fails."""
    command = (sys.executable, "-P", "-m", "console", *arguments)
    told = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=False)
    if told.returncode != 0:
        sys.exit(f"penstock {arguments[0]} ended with {told.returncode}:\n{told.stdout[-4000:]}")
    return told.stdout


def _row(name: str, plan: dict[str, Any], steps: Sequence[dict[str, Any]], time_scale: float) -> str:
    real_s = sum(step["time/step_s"] for step in steps)
    num_samples = sum(step["throughput/samples_per_second"] * step["time/step_s"] for step in steps)
    measured = num_samples / real_s / time_scale
    told = (plan["samples_per_second"], plan["simulated_samples_per_second"])
    expected = " | ".join("none" if rate is None else f"{rate:.1f} ({measured / rate:.2f})" for rate in told)
    waited = sum(step["time/idle_s"] for step in steps) / real_s
    return f"| {name} | {expected} | {measured:.1f} | {waited:.0%} |"


if __name__ == "__main__":
    sys.exit(main())
