"""Runs a model of a real size end to end: `penstock bench size`.

A Qwen3 with random weights in the shape of Qwen3-0.6B, bfloat16, trained for three steps of eight short samples by
`penstock run`: vLLM on the CPU, two trainer processes, and all other services. Before, the same with a tiny model, for
what processes take without one. Afterwards, alone: the bytes of a version written and digested by bare processes, and
the log-probs of one long sample.

    processes           peak of resident memory, and formula: the same process' with a tiny model, and for the model
                        weights, gradients, moments, one pack's pass and the copies of a published version; in the
                        engine weights and KV cache, in the generator and the engine a version's file. own_mb is the
                        most without pages of mapped files, read every half second
    other_peaks_mb      of the processes that hold no model
    load_s              from the beginning of the trainer's load until all of its processes hold their part
    step_s              median over the steps after the first, as everything below
    publish_pause_share share of a step in which training waited for a publication
    offer_ratio         bare processes' time for a version's bytes, over that from step to offer; both beside computing
    swap_s              how long decoding stood still for a new version
    logits_extra_gb     memory beside weights, hidden states and their gradients that long_sample_tokens take
    link_bytes          sent over TCP between two processes, in the whole run
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.children import environment, run_child
from benchmarks.command import Progress, Result, measure, print_table, short, suite_parser
from benchmarks.made_models import SHAPES, make_model
from benchmarks.scratch import scratch_folder
from benchmarks.size.expected import model_mb
from benchmarks.size.run import PROCESSES, Size, document, observed_run
from benchmarks.trainer.bare_publication import measure_bare
from penstock.model.model_shape import read_shape
from services.trainer.config import TrainingConfig
from services.trainer.run.memory_fit import training_mode

LONG_SAMPLE_TOKENS, QUICK_LONG_SAMPLE_TOKENS = 8_192, 64
TIMEOUT_S = 900.0
BASELINE = "tiny"
NUM_BARE = 3


async def run(*, shape: str, long_sample_tokens: int, progress: Progress) -> Result:
    """The runs, and what is measured beside them."""
    with scratch_folder() as folder:
        progress("a run of a tiny model")
        tiny, expected = await _one(folder / BASELINE, BASELINE)
        libraries = {name: tiny["peaks_mb"][name] - mb for name, mb in expected.items()}
        found = tiny
        if shape != BASELINE:
            progress(f"a run of {shape}")
            found, expected = await _one(folder / shape, shape)
        progress("what disk and digests bear")
        bare_s = statistics.median(
            await asyncio.to_thread(
                measure_bare,
                folder / shape / "model" / "model.safetensors",
                processes=PROCESSES,
                repetitions=NUM_BARE,
                is_busy=True,
            )
        )
        progress(f"a sample of {long_sample_tokens} tokens")
        found |= await _long_sample(folder, shape, long_sample_tokens)
    peaks, own = found.pop("peaks_mb"), found.pop("own_mb")
    return {
        "shape": shape,
        "processes": {
            name: {"peak_mb": peaks[name], "formula_mb": libraries[name] + mb, "own_mb": own[name]}
            for name, mb in expected.items()
        },
        "other_peaks_mb": {name: mb for name, mb in sorted(peaks.items()) if name not in expected},
        "offer_ratio": bare_s / found["offer_s"],
        "bare_offer_s": bare_s,
        **found,
    }


async def _one(folder: Path, shape: str) -> tuple[Result, dict[str, float]]:
    """What a run of a new model says, and what its processes need for the model, MB."""
    size, model = Size(), folder / "model"
    await run_child(
        *(sys.executable, "-m", "benchmarks.size", "--make", str(model), "--shape", shape),
        timeout_s=TIMEOUT_S,
        what="making a model",
        log=folder.parent / f"{shape}.log",
        env=environment(num_threads=2),
    )
    found = await observed_run(folder / "run", model, size)
    config = _trainer_config(folder, model, size)
    mode = training_mode(config, read_shape(model), num_shards=PROCESSES, is_half=True, is_on_cpus=True)
    return found, model_mb(model, mode, kv_cache_gib=size.kv_cache_gib)


def _trainer_config(folder: Path, model: Path, size: Size) -> TrainingConfig:
    """The part of the run's configuration that its trainer gets."""
    sections = document(folder, model, size)
    names = sections.keys() & TrainingConfig.model_fields
    return TrainingConfig.model_validate({name: sections[name] for name in names})


async def _long_sample(folder: Path, shape: str, num_tokens: int) -> Result:
    log = folder / "logits.log"
    sizes = ("--hidden", str(SHAPES[shape]["hidden_size"]), "--vocabulary", str(SHAPES[shape]["vocab_size"]))
    await run_child(
        *(sys.executable, "-m", "benchmarks.trainer.logits", "--way", "sliced", "--tokens", str(num_tokens), *sizes),
        timeout_s=TIMEOUT_S,
        what="a long sample",
        log=log,
        env=environment(num_threads=2),
    )
    found = json.loads(log.read_text(encoding="utf-8").splitlines()[-1])
    return {
        "logits_extra_gb": found["extra_gb"],
        "long_sample_tokens": num_tokens,
        "long_sample_s": found["seconds"],
    }


def show(result: Result) -> None:
    """Processes, links, and everything else."""
    print_table(
        f"Memory of processes, {result['shape']}, MB",
        ("process", "peak", "formula", "without mapped files"),
        [
            [
                (name, *(short(each[key]) for key in ("peak_mb", "formula_mb", "own_mb")))
                for name, each in result["processes"].items()
            ]
        ],
    )
    print_table("Other processes, MB", ("process", "peak"), [_rows(result["other_peaks_mb"])])
    print_table("Links, bytes", ("link", "value"), [_rows(result["link_bytes"])])
    numbers = {name: value for name, value in result.items() if isinstance(value, int | float)}
    print_table("Times and shares", ("number", "value"), [_rows(numbers)])


def _rows(numbers: dict[str, float]) -> list[tuple[str, str]]:
    return [(name, short(value)) for name, value in numbers.items()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = suite_parser(__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b", help="of the model")
    parser.add_argument("--long-sample-tokens", type=int, default=LONG_SAMPLE_TOKENS)
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.make:
        _make(options.make, options.shape)
        return 0
    shape = BASELINE if options.quick else options.shape
    tokens = QUICK_LONG_SAMPLE_TOKENS if options.quick else options.long_sample_tokens
    return measure(
        lambda progress: run(shape=shape, long_sample_tokens=tokens, progress=progress), show, is_json=options.json
    )


def _make(folder: Path, shape: str) -> None:
    """The model, with a tokenizer of bytes: its other words occur in completions only."""
    from quickstart.tiny_model import build_tokenizer

    make_model(folder, SHAPES[shape])
    build_tokenizer().save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main())
