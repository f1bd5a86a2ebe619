"""Counts the bytes that a trainer's processes exchange: `penstock bench trainer.traffic`.

Real processes on the CPU (gloo) train a Qwen3 with random weights in a network namespace of their own, whose loopback
interface counts every byte. Beside them what `penstock.model.training_traffic` says, summed over the processes: of
`train` a forward and a backward pass of every process, of `score` a forward pass alone. Counted are also packets'
headers and the calls between the processes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.children import environment, run_child
from benchmarks.command import Progress, Result, measure, print_table, short, suite_parser
from benchmarks.made_models import SHAPES, make_model
from benchmarks.scratch import scratch_folder
from penstock.model.model_shape import read_shape
from penstock.model.training_memory import TrainingMode
from penstock.model.training_traffic import gathered_bytes, reduced_bytes
from services.trainer.batches.packing import Pack, Trajectory, join
from services.trainer.config import TrainingConfig
from services.trainer.distributed.launch import stay_on_loopback

PACK_TOKENS = 128
TIMEOUT_S = 600.0
PASSES = ("train", "score")
_OWN_NETWORK = ("--net", "--map-root-user", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")


def run_role(model: Path, processes: int, dtype: str) -> Result:
    """One trainer, of which this process is the first; its loopback interface is its own."""
    from services.trainer.distributed.coordinator import lead
    from services.trainer.run.policy_loading import local_backend

    config = TrainingConfig.model_validate(
        {
            "model": {"path": str(model), "dtype": dtype},
            "data": {"train": None},
            "trainer": {"device": "cpu", "processes": processes, "gradient_checkpointing": False},
        }
    )
    stay_on_loopback()
    backend = lead(config, build=local_backend, torchrun=None)
    packs = [_pack(number, backend.vocab_size) for number in range(processes)]

    def train() -> None:
        backend.forward_backward(*packs)

    def score() -> None:
        backend.score(*packs, quantity="logprobs")

    passes: Mapping[str, Callable[[], None]] = {"train": train, "score": score}
    counted = {name: _bytes_of(passes[name]) for name in PASSES}
    backend.close()
    return {"processes": processes, "dtype": dtype, "counted": counted, "formula": _formula(model, processes, dtype)}


def _formula(model: Path, processes: int, dtype: str) -> dict[str, float]:
    shape = read_shape(model)
    mode = TrainingMode(num_shards=processes, pack_tokens=PACK_TOKENS, is_half=dtype == "bfloat16")
    train = gathered_bytes(shape, mode, num_passes=1) + reduced_bytes(shape, mode, num_passes=1)
    score = gathered_bytes(shape, mode, num_passes=0, num_scoring_passes=1)
    # Each process exchanges all but its own part.
    return {"train": (processes - 1) * train, "score": (processes - 1) * score}


def _bytes_of(make_pass: Callable[[], None]) -> int:
    # The first one opens connections.
    make_pass()
    before = _received_bytes()
    make_pass()
    return _received_bytes() - before


def _received_bytes() -> int:
    for line in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[0])
    raise OSError("no loopback interface")


def _pack(seed: int, vocab_size: int) -> Pack:
    rng = np.random.default_rng(seed)
    trajectory = Trajectory(
        token_ids=rng.integers(0, vocab_size, PACK_TOKENS).astype(np.int32),
        loss_mask=np.arange(PACK_TOKENS) > 0,
        behavior_logprobs=np.full(PACK_TOKENS, -1.0, np.float32),
        advantages=np.ones(PACK_TOKENS, np.float32),
    )
    return join([trajectory], [0])


async def run(
    processes: Sequence[int], *, dtypes: Sequence[str], shape: Mapping[str, object], progress: Progress
) -> Result:
    """A trainer of each number of processes, in each type."""
    unshare = shutil.which("unshare")
    assert unshare is not None
    results = []
    with scratch_folder() as folder:
        model = folder / "model"
        make_model(model, shape)
        for number in processes:
            for dtype in dtypes:
                progress(f"{number} processes, {dtype}")
                role = (sys.executable, "-m", "benchmarks.trainer.traffic", "--role", str(model), "--dtypes", dtype)
                await run_child(
                    unshare,
                    *_OWN_NETWORK,
                    *role,
                    *("--processes", str(number), "--out", str(folder / "found.json")),
                    timeout_s=TIMEOUT_S,
                    what=f"a trainer of {number} processes",
                    log=folder / f"{number}-{dtype}.log",
                    env=environment(num_threads=1),
                )
                results.append(json.loads((folder / "found.json").read_text(encoding="utf-8")))
    return {"trainers": results}


def show(result: Result) -> None:
    """A row for each trainer and kind of pass."""
    print_table(
        "Bytes between a trainer's processes in one pass, MB",
        ("processes", "type", "pass", "counted", "formula", "ratio"),
        [
            [
                (
                    str(trainer["processes"]),
                    trainer["dtype"],
                    name,
                    short(trainer["counted"][name] / 1e6),
                    short(trainer["formula"][name] / 1e6),
                    short(trainer["counted"][name] / trainer["formula"][name]),
                )
            ]
            for trainer in result["trainers"]
            for name in PASSES
        ],
    )


def has_own_network() -> bool:
    """Whether this system lets a process have a network namespace of its own."""
    unshare = shutil.which("unshare")
    if unshare is None or shutil.which("ip") is None:
        return False
    return subprocess.run((unshare, *_OWN_NETWORK, "true"), capture_output=True, check=False).returncode == 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = suite_parser(__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--dtypes", choices=("float32", "bfloat16"), nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="154m", help="of the model")
    parser.add_argument("--role", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.role:
        found = run_role(options.role, options.processes[0], options.dtypes[0])
        options.out.write_text(json.dumps(found), encoding="utf-8")
        return 0
    if not has_own_network():
        parser.error("this needs unshare and ip, and the right to a network namespace: other traffic would be counted")
    return measure(
        lambda progress: run(
            options.processes,
            dtypes=options.dtypes,
            shape=SHAPES["tiny" if options.quick else options.shape],
            progress=progress,
        ),
        show,
        is_json=options.json,
    )


if __name__ == "__main__":
    sys.exit(main())
