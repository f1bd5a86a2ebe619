"""Measures the memory of a trainer's processes: `penstock bench trainer.memory`.

Real processes on the CPU load a Qwen3 with random weights in bfloat16, train on it and save a checkpoint. For each of
them, MB of resident memory: `idle` with all libraries loaded; the peaks of `start`, of the second `step` (the first one
makes the moments) and of `checkpoint`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.children import environment, run_child
from benchmarks.command import Progress, Result, measure, print_table, short, suite_parser
from benchmarks.scratch import scratch_folder
from services.trainer.batches.packing import Trajectory
from services.trainer.batches.rank_partition import partition
from services.trainer.config import TrainingConfig
from services.trainer.distributed.launch import stay_on_loopback
from services.trainer.model.backend import Backend

SHAPE: Mapping[str, object] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
"""With the default options 154 M parameters."""
QUICK_SHAPE = {**SHAPE, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SAMPLE_TOKENS, PACK_TOKENS = 128, 256
TIMEOUT_S = 600.0
PHASES = ("idle", "start", "step", "checkpoint")
_WORKER = b"services.trainer.worker_process"


def make_model(folder: Path, shape: Mapping[str, object]) -> None:
    """A Qwen3 with random weights in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3Config(**shape)).bfloat16().save_pretrained(folder)


def run_role(model: Path, processes: int, algorithm: str) -> Result:
    """One trainer, of which this process is the first."""
    from services.trainer.distributed.coordinator import lead
    from services.trainer.run.policy_loading import local_backend

    config = TrainingConfig.model_validate(
        {
            "model": {"path": str(model), "dtype": "float32"},
            "data": {"train": None},
            "algorithm": json.loads(algorithm),
            "trainer": {"device": "cpu", "processes": processes},
        }
    )
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
        backend.save(Path(folder)).result()
    meter.note("checkpoint")
    backend.close()
    return {"processes": processes, "ranks": meter.found}


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
        self._idle = _memory_mb("self", "VmRSS")

    def restart(self) -> None:
        """Peaks count from now on."""
        for pid in self._pids():
            Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")

    def note(self, phase: str) -> None:
        """What the peaks were."""
        pids = self._pids()
        if not self.found:
            # The other processes load the same libraries.
            self.found = [{"idle": self._idle} for _ in pids]
        for rank, pid in zip(self.found, pids, strict=True):
            rank[phase] = _memory_mb(pid, "VmHWM")

    def _pids(self) -> list[str]:
        lists = Path("/proc/self/task").glob("*/children")
        children = {pid for each in lists for pid in each.read_text(encoding="ascii").split()}
        ranks = {pid for pid in children if _WORKER in Path(f"/proc/{pid}/cmdline").read_bytes()}
        return ["self", *sorted(ranks, key=int)]


def _memory_mb(pid: str, name: str) -> float:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError(f"/proc says no {name} of process {pid}")


async def run(processes: Sequence[int], *, algorithm: str, shape: Mapping[str, object], progress: Progress) -> Result:
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
        ("processes", "rank", *PHASES),
        [
            [(str(trainer["processes"]), str(number), *(short(rank[phase]) for phase in PHASES))]
            for trainer in result["trainers"]
            for number, rank in enumerate(trainer["ranks"])
        ],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = suite_parser(__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--algorithm", default='{"name": "dapo"}', help="the section of that name, as JSON")
    parser.add_argument("--vocab", type=int, default=65_536, help="rows of the embedding, which is the head, too")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--role", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.role:
        found = run_role(options.role, options.processes[0], options.algorithm)
        options.out.write_text(json.dumps(found), encoding="utf-8")
        return 0
    shape = (
        QUICK_SHAPE if options.quick else {**SHAPE, "vocab_size": options.vocab, "num_hidden_layers": options.layers}
    )
    return measure(
        lambda progress: run(options.processes, algorithm=options.algorithm, shape=shape, progress=progress),
        show,
        is_json=options.json,
    )


if __name__ == "__main__":
    sys.exit(main())
