"""Measures what publishing costs a trainer of several processes: `penstock bench trainer.publication`.

Real processes on the CPU train a Qwen3 with random weights, bfloat16 on disk, and publish each step as a run does. For
steps that begin only once the version before is offered (`apart`: the trainer waits for samples) and for steps that
follow at once (`together`), medians of:

    pause_share     part of the step in which training waits: for the copy, and for the version before
    offer_s         from the end of the optimiser step until the version is offered
    bare_s          the same bytes copied, written and digested by bare processes on these cores (`bare_publication`);
                    beside as many processes that compute, for steps that follow at once
    offer_ratio     bare_s / offer_s
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.children import environment, run_child
from benchmarks.command import Progress, Result, measure, print_table, short, suite_parser
from benchmarks.made_models import SHAPES, make_model
from benchmarks.scratch import scratch_folder
from benchmarks.trainer.bare_publication import measure_bare
from penstock.clock import SystemClock
from services.trainer.batches.packing import Trajectory
from services.trainer.batches.rank_partition import partition
from services.trainer.compute.compute_thread import ComputeThread
from services.trainer.config import TrainingConfig
from services.trainer.distributed.launch import stay_on_loopback
from services.trainer.model.backend import Backend
from services.trainer.publishing.publisher import WeightPublisher
from services.trainer.publishing.version_store import WeightStore

SAMPLE_TOKENS = 128
TIMEOUT_S = 3600.0
MODES = ("apart", "together")


async def run_role(model: Path, *, processes: int, steps: int, samples: int) -> Result:
    """A trainer, of which this process is the first."""
    from services.trainer.distributed.coordinator import lead
    from services.trainer.run.policy_loading import local_backend

    config = TrainingConfig.model_validate(
        {
            "model": {"path": str(model), "dtype": "bfloat16"},
            "data": {"train": None},
            "trainer": {"device": "cpu", "processes": processes, "num_threads": 1},
        }
    )
    compute = ComputeThread(clock=SystemClock(), on_span=lambda _begin_s, _end_s: None)
    stay_on_loopback()
    backend: Backend
    if processes == 1:
        backend = await compute.run(local_backend, config)
    else:
        backend = await compute.run(lead, config, build=local_backend, torchrun=None)
    publisher = WeightPublisher(
        store=WeightStore(),
        run_id="bench",
        directory=model.parent / "weights",
        base_url="http://127.0.0.1:1",
        clock=SystemClock(),
    )
    publisher.open()
    trainer = _Trainer(compute, backend, publisher, samples)
    # The first step makes the moments.
    await trainer.step()
    found = {}
    for mode in MODES:
        rows = []
        for _ in range(steps):
            if mode == "apart":
                await publisher.finish()
                await publisher.finish_deltas()
            rows.append(await trainer.step())
        # Its own offer, and that of the version before.
        await publisher.finish()
        trainer.note_offer()
        found[mode] = {"steps": rows, "offers": trainer.take_offers()[-steps:]}
        await publisher.finish_deltas()
    await publisher.close()
    await compute.run(backend.close)
    compute.close()
    return found


class _Trainer:
    """Steps that are published as by `services.trainer.run.loop.StepLoop.take_step`."""

    def __init__(self, compute: ComputeThread, backend: Backend, publisher: WeightPublisher, samples: int) -> None:
        self._compute, self._backend, self._publisher = compute, backend, publisher
        self._samples = samples
        self._version = 0
        self._offers: list[dict[str, float]] = []

    async def step(self) -> dict[str, float]:
        """One step; its parts, seconds."""
        begun_s = time.monotonic()
        await self._compute.run(_step, self._backend, self._samples)
        stepped_s = time.monotonic()
        self._version += 1
        await self._publisher.finish()
        self.note_offer()
        waited_s = time.monotonic()
        place = {"policy_version": self._version, "history": 0}
        written = await self._compute.run(self._backend.write_weights, self._publisher.path(**place))
        self._publisher.begin(written, **place, adapter=None, stepped_s=stepped_s)
        ended_s = time.monotonic()
        return {
            "step_s": ended_s - begun_s,
            "wait_s": waited_s - stepped_s,
            "copy_s": ended_s - waited_s,
            "pause_share": (ended_s - stepped_s) / (ended_s - begun_s),
        }

    def note_offer(self) -> None:
        """Remember how long the version offered last took, once."""
        offer = self._publisher.last_offer
        if offer is not None:
            row = {"offer_s": offer.offer_s, "write_s": offer.write_s, "digest_s": offer.digest_s}
            row["bytes"] = float(offer.num_bytes)
            if not self._offers or self._offers[-1] != row:
                self._offers.append(row)

    def take_offers(self) -> list[dict[str, float]]:
        """All since the last call."""
        offers, self._offers = self._offers, []
        return offers


def _step(backend: Backend, samples: int) -> None:
    rng = np.random.default_rng(0)
    trajectories = [_trajectory(rng, backend.vocab_size) for _ in range(samples)]
    num_tokens = 0
    for packs in partition(trajectories, max_pack_tokens=4 * SAMPLE_TOKENS, shares=backend.shares):
        num_tokens += backend.forward_backward(*packs).num_tokens
    backend.optimizer_step(divisor=num_tokens)


def _trajectory(rng: np.random.Generator, vocab_size: int) -> Trajectory:
    return Trajectory(
        token_ids=rng.integers(0, vocab_size, SAMPLE_TOKENS).astype(np.int32),
        loss_mask=np.arange(SAMPLE_TOKENS) > 0,
        behavior_logprobs=np.full(SAMPLE_TOKENS, -1.0, np.float32),
        advantages=np.ones(SAMPLE_TOKENS, np.float32),
    )


async def run(options: argparse.Namespace, *, shape: Mapping[str, object], progress: Progress) -> Result:
    """The bare processes, then the trainer."""
    with scratch_folder(options.folder) as folder:
        model = folder / "model"
        await asyncio.to_thread(make_model, model, shape)
        bare = {}
        for mode in MODES:
            progress(f"bare processes, {mode}")
            seconds = await asyncio.to_thread(
                measure_bare,
                model / "model.safetensors",
                processes=options.processes,
                repetitions=options.steps,
                is_busy=mode == "together",
            )
            bare[mode] = statistics.median(seconds)
        progress("the trainer")
        await run_child(
            *(sys.executable, "-m", "benchmarks.trainer.publication", "--role", str(model)),
            *("--processes", str(options.processes), "--steps", str(options.steps)),
            *("--samples", str(options.samples), "--out", str(folder / "found.json")),
            timeout_s=TIMEOUT_S,
            what="the trainer",
            log=folder / "log",
            env=environment(num_threads=1),
        )
        found = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    return {mode: _medians(found[mode], bare_s=bare[mode]) for mode in MODES}


def _medians(found: Mapping[str, Sequence[Mapping[str, float]]], *, bare_s: float) -> Result:
    columns: dict[str, float] = {}
    for rows in (found["steps"], found["offers"]):
        columns |= {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    offers = [row["offer_s"] for row in found["offers"]]
    return {
        **columns,
        "bare_s": bare_s,
        "offer_ratio": bare_s / columns["offer_s"],
        "spread": {"offer_s": [min(offers), max(offers)]},
        "pause_shares": [row["pause_share"] for row in found["steps"]],
    }


def show(result: Result) -> None:
    """A row for each number."""
    names = [name for name, value in result["apart"].items() if isinstance(value, float)]
    print_table(
        "Publishing from the trainer's processes",
        ("", *MODES),
        [[(name, *(short(result[mode][name]) for mode in MODES)) for name in names]],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = suite_parser(__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b", help="of the model")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="of either kind")
    parser.add_argument("--samples", type=int, default=8, help="of 128 tokens, in a step")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; by default the temporary folder")
    parser.add_argument("--role", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.role:
        found = asyncio.run(
            run_role(options.role, processes=options.processes, steps=options.steps, samples=options.samples)
        )
        options.out.write_text(json.dumps(found), encoding="utf-8")
        return 0
    shape = SHAPES["tiny" if options.quick else options.shape]
    return measure(
        lambda progress: run(options, shape=shape, progress=progress),
        show,
        is_json=options.json,
    )


if __name__ == "__main__":
    sys.exit(main())
