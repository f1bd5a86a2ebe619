"""Measures the memory of a trainer's processes: `penstock bench trainer.memory`.

Real processes on the CPU load a Qwen3 with random weights in bfloat16, train on it and save a checkpoint. For each of
them, MB of resident memory: `idle` with all libraries loaded; the peaks of `start`, of the second `step` (the first one
makes the moments) and of `checkpoint`. Beside them what `penstock.model.training_memory` says, above `idle`:
`formula_mb` of start and step, `checkpoint_formula_mb` of a checkpoint: with copies if memory was left for them, else
at most that of a step.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np

from benchmarks.children import environment, run_child
from benchmarks.command import Progress, Result, measure, print_table, short, suite_parser
from benchmarks.made_models import SHAPES, make_model
from benchmarks.resident import peak_mb, resident_mb, restart_peak
from benchmarks.scratch import scratch_folder
from penstock.model.model_shape import read_shape
from penstock.model.training_memory import copied_bytes, held_bytes, working_bytes
from services.trainer.batches.packing import Trajectory
from services.trainer.batches.rank_partition import partition
from services.trainer.config import TrainingConfig
from services.trainer.distributed.launch import stay_on_loopback
from services.trainer.model.backend import Backend

SAMPLE_TOKENS, PACK_TOKENS = 128, 256
TIMEOUT_S = 900.0
PHASES = ("idle", "start", "step", "checkpoint")
FORMULAS = ("formula_mb", "checkpoint_formula_mb")
_WORKER = b"services.trainer.worker_process"


def run_role(model: Path, processes: int, algorithm: str, dtype: str = "float32", lora: str = "null") -> Result:
    """One trainer, of which this process is the first."""
    from services.trainer.distributed.coordinator import lead
    from services.trainer.run.policy_loading import local_backend

    config = TrainingConfig.model_validate(
        {
            "model": {"path": str(model), "dtype": dtype},
            "data": {"train": None},
            "algorithm": json.loads(algorithm),
            "lora": json.loads(lora),
            "trainer": {"device": "cpu", "processes": processes, "gradient_checkpointing": False},
        }
    )
    if config.lora is not None:
        # Its libraries are loaded with an adapter only.
        import_module("services.trainer.model.adapters.lora")
    meter = _Meter()
    backend: Backend
    if processes == 1:
        backend = local_backend(config)
    else:
        stay_on_loopback()
        backend = lead(config, build=local_backend, torchrun=None)
    meter.note("start")
    for _ in range(2):
        meter.restart()
        _step(backend)
    meter.note("step")
    meter.restart()
    with tempfile.TemporaryDirectory(dir=model.parent) as folder:
        written = backend.save(Path(folder))
        # Without memory for copies training waits.
        has_copies = not written.done()
        written.result()
    meter.note("checkpoint")
    backend.close()
    formula = _formula(config, has_copies=has_copies)
    ranks = [{**rank, **{name: rank["idle"] + mb for name, mb in formula.items()}} for rank in meter.found]
    return {"processes": processes, "dtype": dtype, "ranks": ranks}


def _formula(config: TrainingConfig, *, has_copies: bool) -> dict[str, float]:
    """MB of a process, without libraries."""
    from services.trainer.run.memory_fit import training_mode

    shape = read_shape(config.model.folder)
    mode = training_mode(
        config, shape, num_shards=len(config.trainer.shares), is_half=config.model.dtype == "bfloat16", is_on_cpus=True
    )
    mode = replace(mode, pack_tokens=PACK_TOKENS)
    held = held_bytes(shape, mode)
    step = (held + working_bytes(shape, mode)) / 1e6
    # Without copies, what the allocator has kept from the step remains.
    checkpoint = (held + copied_bytes(shape, mode)) / 1e6 if has_copies else step
    return {"formula_mb": step, "checkpoint_formula_mb": checkpoint}


def _step(backend: Backend) -> None:
    rng = np.random.default_rng(0)
    trajectories = [_trajectory(rng, backend.vocab_size) for _ in range(2 * PACK_TOKENS // SAMPLE_TOKENS)]
    num_tokens = 0
    for packs in partition(trajectories, max_pack_tokens=PACK_TOKENS, shares=backend.shares):
        num_tokens += backend.forward_backward(*packs).num_tokens
    backend.optimizer_step(divisor=num_tokens)


def _trajectory(rng: np.random.Generator, vocab_size: int) -> Trajectory:
    return Trajectory(
        token_ids=rng.integers(0, vocab_size, SAMPLE_TOKENS).astype(np.int32),
        loss_mask=np.arange(SAMPLE_TOKENS) > 0,
        behavior_logprobs=np.full(SAMPLE_TOKENS, -1.0, np.float32),
        advantages=np.ones(SAMPLE_TOKENS, np.float32),
    )


class _Meter:
    """Peaks of this process and of those it started, this one first."""

    def __init__(self) -> None:
        self.found: list[dict[str, float]] = []
        self._idle = resident_mb()

    def restart(self) -> None:
        """Peaks count from now on."""
        for pid in self._pids():
            restart_peak(pid)

    def note(self, phase: str) -> None:
        """What the peaks were."""
        pids = self._pids()
        if not self.found:
            # The other processes load the same libraries.
            self.found = [{"idle": self._idle} for _ in pids]
        for rank, pid in zip(self.found, pids, strict=True):
            rank[phase] = peak_mb(pid)

    def _pids(self) -> list[str]:
        lists = Path("/proc/self/task").glob("*/children")
        children = {pid for each in lists for pid in each.read_text(encoding="ascii").split()}
        ranks = {pid for pid in children if _WORKER in Path(f"/proc/{pid}/cmdline").read_bytes()}
        return ["self", *sorted(ranks, key=int)]


async def run(
    processes: Sequence[int], *, algorithm: str, dtype: str, lora: str, shape: Mapping[str, object], progress: Progress
) -> Result:
    """A trainer of each number of processes."""
    results = []
    with scratch_folder() as folder:
        model = folder / "model"
        make_model(model, shape)
        for number in processes:
            progress(f"{number} processes")
            log = folder / f"{number}.log"
            command = (
                sys.executable,
                "-m",
                "benchmarks.trainer.memory",
                "--role",
                str(model),
                "--algorithm",
                algorithm,
                "--dtype",
                dtype,
                "--lora",
                lora,
            )
            await run_child(
                *command,
                *("--processes", str(number), "--out", str(folder / "found.json")),
                timeout_s=TIMEOUT_S,
                what=f"a trainer of {number} processes",
                log=log,
                env=environment(num_threads=1),
            )
            results.append(json.loads((folder / "found.json").read_text(encoding="utf-8")))
    return {"trainers": results}


def show(result: Result) -> None:
    """A row for each process."""
    print_table(
        "Memory of a trainer's processes, MB",
        ("processes", "rank", *PHASES, *FORMULAS),
        [
            [(str(trainer["processes"]), str(number), *(short(rank[phase]) for phase in PHASES + FORMULAS))]
            for trainer in result["trainers"]
            for number, rank in enumerate(trainer["ranks"])
        ],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = suite_parser(__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--algorithm", default='{"name": "dapo"}', help="the section of that name, as JSON")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="154m", help="of the model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of matrix products")
    parser.add_argument("--lora", default="null", help="the section of that name, as JSON")
    parser.add_argument("--role", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.role:
        found = run_role(options.role, options.processes[0], options.algorithm, options.dtype, options.lora)
        options.out.write_text(json.dumps(found), encoding="utf-8")
        return 0
    return measure(
        lambda progress: run(
            options.processes,
            algorithm=options.algorithm,
            dtype=options.dtype,
            lora=options.lora,
            shape=SHAPES["tiny" if options.quick else options.shape],
            progress=progress,
        ),
        show,
        is_json=options.json,
    )


if __name__ == "__main__":
    sys.exit(main())
