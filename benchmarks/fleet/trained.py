"""Dispatches by forecasts that a real scheduler learned: prompts show part of their difficulty to a ranker.

The prompts are those of `benchmarks.ranker`: lengths follow StreamRL's histogram, and an oracle that sees everything a
prompt shows finds 0.9 of the longest fifth. The scheduler starts from a file of NUM_PAIRS of them with lengths; the
measured step has other prompts.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.broker.processes import free_port
from benchmarks.fleet.generation import Pace, Surroundings, measure_undisturbed
from benchmarks.fleet.machines import machines
from benchmarks.fleet.workload import TAIL_SHARES, Workload, group_id, recall
from benchmarks.ranker.made_set import MadePrompt, make_set
from penstock.network.rpc import call, open_channel, wait_until_serving
from penstock.v1 import scheduler_pb2, scheduler_pb2_grpc
from penstock.wire.codec import int32_bytes

NUM_PAIRS = 4_096
FIT_TIMEOUT_S = 60.0
START_TIMEOUT_S = 30.0
BASELINE = ("random", "none")
ARMS = (BASELINE, ("lpt", "trained"), ("streamrl", "trained"), ("lpt", "oracle"), ("streamrl", "oracle"))


async def compare(
    around: Surroundings,
    *,
    num_samples: int,
    cells: Sequence[tuple[str, str]],
    num_repetitions: int,
    time_scale: float,
    progress: Callable[[str], None],
) -> dict[str, dict[str, list[float]]]:
    """Emulated seconds by table and arm; the table `recall` has the scheduler's recall of the longest instead."""
    found: dict[str, dict[str, list[float]]] = {}
    for repetition in range(num_repetitions):
        made = make_set(seed=repetition, num_prompts=NUM_PAIRS + num_samples)
        pairs = _write_pairs(around.folder / f"pairs-{repetition}.jsonl", made[:NUM_PAIRS])
        workload = _workload(made[NUM_PAIRS:])
        scheduler = await _start_scheduler(around, pairs)
        settings = (f"scheduler={scheduler}",)
        _, broker = await around.stage.start_broker(settings)
        learned = _Learned(scheduler, workload)
        for fleet, regime in cells:
            for dispatch, forecast in ARMS:
                table, arm = f"{fleet}_{regime}_trained", dispatch if forecast == "none" else f"{dispatch}_{forecast}"
                progress(f"{table}, {arm}: repetition {repetition + 1} of {num_repetitions}")
                is_trained = forecast == "trained"
                step = await measure_undisturbed(
                    replace(around, broker=broker, foresee=learned.wait) if is_trained else around,
                    progress=progress,
                    name=f"{table}-{arm}-{repetition}",
                    machines=machines(fleet, regime),
                    workload=workload,
                    dispatch=dispatch,
                    forecast="none" if is_trained else forecast,
                    pace=Pace.scaled(time_scale),
                    seed=repetition,
                )
                found.setdefault(table, {}).setdefault(arm, []).append(step.generation_s)
        for share in TAIL_SHARES:
            said = recall(workload.lengths, learned.forecasts, share)
            found.setdefault("recall", {}).setdefault(f"recall_of_longest_{share:.0%}", []).append(said)
    return found


def recalls(found: dict[str, list[float]]) -> dict[str, Any]:
    """Means over the repetitions."""
    return {name: statistics.fmean(values) for name, values in found.items()}


class _Learned:
    """Waits for a scheduler's model of a run."""

    def __init__(self, address: str, workload: Workload) -> None:
        self._address = address
        self._queries = [
            scheduler_pb2.LengthQuery(
                group_id=group_id(index),
                num_prompt_tokens=len(prompt.token_ids) // 4,
                prompt_token_ids=prompt.token_ids,
            )
            for index, prompt in enumerate(workload.prompts(range(len(workload.lengths))))
        ]
        self.forecasts: list[float | None] = []
        """The newest forecasts."""

    async def wait(self, run_id: str, _forecasts: Sequence[float | None]) -> None:
        """Wait until a model forecasts the run's lengths; a run starts from the scheduler's file of pairs."""
        request = scheduler_pb2.ForecastLengthsRequest(run_id=run_id, queries=self._queries)
        async with open_channel(self._address) as channel, asyncio.timeout(FIT_TIMEOUT_S):
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            while True:
                answer = await call(stub.ForecastLengths, request, peer="scheduler")
                if answer.model_version:
                    break
                await asyncio.sleep(0.2)
        self.forecasts = [forecast.expected_tokens for forecast in answer.forecasts]


async def _start_scheduler(around: Surroundings, pairs: Path) -> str:
    """A scheduler process as `penstock serve scheduler` starts one; returns its address."""
    address = f"127.0.0.1:{free_port()}"
    await around.stage.start(
        *(sys.executable, "-m", "console", "serve", "scheduler", f"lengths.pairs_file={pairs}", "--listen", address)
    )
    if not await wait_until_serving(address, timeout_s=START_TIMEOUT_S):
        raise RuntimeError("the scheduler did not start")
    return address


def _write_pairs(path: Path, made: Sequence[MadePrompt]) -> Path:
    rows = ({"prompt_token_ids": item.prompt.words.tolist(), "num_completion_tokens": item.length} for item in made)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _workload(made: Sequence[MadePrompt]) -> Workload:
    lengths = [item.length for item in made]
    return Workload(
        lengths=lengths,
        forecasts={"oracle": [float(length) for length in lengths], "none": [None] * len(lengths)},
        prompt_token_ids=[int32_bytes(item.prompt.words.astype(np.int32)) for item in made],
    )
