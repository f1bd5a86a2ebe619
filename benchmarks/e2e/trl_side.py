"""Runs TRL's side: its GRPOTrainer in its own process, set up by `trl_worker`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from benchmarks.children import ROOT, environment, run_child
from benchmarks.e2e.curve import Curve, Step
from benchmarks.e2e.task import WINDOW_STEPS, Task

WORKER = ROOT / "benchmarks" / "e2e" / "trl_worker.py"
START_TIMEOUT_S = 300.0
STEP_TIMEOUT_S = 120.0
NUM_MICROBATCHES = 4
"""Microbatches of a step: 256 samples, 64 at a time."""


async def train(task: Task, folder: Path, *, python: Path, num_threads: int) -> Curve:
    """Train in `folder`, which is empty. Raises RuntimeError if the process fails."""
    out = folder / "steps.jsonl"
    document = asdict(task) | {
        "model_dir": str(task.model_dir),
        "train_path": str(task.train_path),
        "window_steps": WINDOW_STEPS,
        "num_microbatches": NUM_MICROBATCHES,
        "num_threads": num_threads,
    }
    await run_child(
        *(str(python), str(WORKER), json.dumps(document), str(out)),
        timeout_s=START_TIMEOUT_S + task.num_steps * STEP_TIMEOUT_S,
        what="TRL",
        log=folder / "trl.log",
        env=environment(num_threads=num_threads),
    )
    return read_curve(out)


def read_curve(path: Path) -> Curve:
    """The worker's output."""
    begin, *lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    steps = [
        Step(
            time_s=line["time"],
            reward=line["reward"],
            num_samples=line["num_samples"],
            num_tokens=line["num_tokens"],
        )
        for line in lines
    ]
    return Curve(begin_s=begin["time"], steps=steps)
