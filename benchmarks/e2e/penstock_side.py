"""Runs Penstock's side: the quick start's own configuration through `penstock run`, followed by its metrics.jsonl."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.children import ROOT, child, environment, run_child, tail
from benchmarks.e2e.curve import Curve, Step
from benchmarks.e2e.task import Task
from services.trainer.reporting.metrics import JsonLines

CONFIG_FILE = ROOT / "examples" / "quickstart.yaml"
STEP_TIMEOUT_S = 300.0
"""Longest wait for a step, including the services' start for the first one."""
EXPORT_TIMEOUT_S = 120.0
_POLL_S = 0.1
_STEPS_AFTERWARDS = 1000


async def train(task: Task, folder: Path, *, recording: Path | None = None) -> Curve:
    """Train in `folder`, which is empty; the samples trained on go to `recording` once the curve is complete.

    Raises:
        RuntimeError: The run failed.
        TimeoutError: It took no step for STEP_TIMEOUT_S.
    """
    log = folder / "console.log"
    command = (sys.executable, "-m", "console", "run", str(CONFIG_FILE), *_settings(task, folder))
    async with child(*command, log=log, env=environment(num_threads=1)) as process:
        curve = await follow(process, folder / "run" / "metrics.jsonl", task, log)
        if recording is not None:
            # The run continues meanwhile, but is no longer measured.
            export = (sys.executable, "-m", "console", "export", str(folder / "run"), "--out", str(recording))
            await run_child(*export, timeout_s=EXPORT_TIMEOUT_S, what="exporting the samples", log=log)
    return curve


def _settings(task: Task, folder: Path) -> tuple[str, ...]:
    values: Mapping[str, object] = {
        "run.id": "run",
        "run.dir": str(folder),
        "run.seed": task.seed,
        # Stopped only once the curve is complete: until then its broker has the samples.
        "run.num_steps": task.num_steps + _STEPS_AFTERWARDS,
        "run.checkpoint_every_steps": task.num_steps + _STEPS_AFTERWARDS,
        "run.num_eval_prompts": 0,
        "model.path": str(task.model_dir),
        "data.train": str(task.train_path),
        "data.eval": None,
        "sampling.temperature": task.temperature,
        "sampling.max_new_tokens": task.max_new_tokens,
        "algorithm.group_size": task.group_size,
        "algorithm.prompts_per_step": task.prompts_per_step,
        "optimizer.learning_rate": task.learning_rate,
        "optimizer.decay_steps": 0,
        "optimizer.max_grad_norm": task.max_grad_norm,
    }
    return tuple(f"{key}={json.dumps(value)}" for key, value in values.items())


async def follow(process: asyncio.subprocess.Process, metrics: Path, task: Task, log: Path) -> Curve:
    """A run's curve from its metrics.jsonl, until the reward or the number of steps is reached.

    Raises:
        RuntimeError: Its process ended first.
        TimeoutError: No step for STEP_TIMEOUT_S.
    """
    steps: list[Step] = []
    begin_s = 0.0
    while True:
        async with asyncio.timeout(STEP_TIMEOUT_S):
            lines = await _more_lines(process, JsonLines(metrics), len(steps), log)
        for line in lines:
            if not steps:
                begin_s = line["time"] - line["time/step_s"]
            steps.append(_step(line))
            curve = Curve(begin_s=begin_s, steps=tuple(steps))
            is_reached = task.until_reward is not None and curve.steps_to_reward(task.until_reward) is not None
            if is_reached or len(steps) == task.num_steps:
                return curve


async def _more_lines(
    process: asyncio.subprocess.Process, metrics: JsonLines, num_known: int, log: Path
) -> list[dict[str, float]]:
    """At least one line beyond the first `num_known`."""
    while True:
        has_ended = process.returncode is not None
        lines = await asyncio.to_thread(metrics.read)
        if len(lines) > num_known:
            return lines[num_known:]
        if has_ended:
            raise RuntimeError(f"Penstock's run ended with status {process.returncode}\n{tail(log)}")
        await asyncio.sleep(_POLL_S)


def _step(line: Mapping[str, float]) -> Step:
    return Step(
        time_s=line["time"],
        reward=line["reward/mean"],
        num_samples=int(line["step/samples"]),
        num_tokens=int(line["step/response_tokens"]),
    )
