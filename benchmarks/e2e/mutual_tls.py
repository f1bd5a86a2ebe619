"""Compares samples/s of a run under mutual TLS with the same run in plain text, alternately.

    penstock bench e2e.mutual_tls runs/quickstart/current [ROUNDS]

Both train the quick start's model with one generator; the first steps, which warm up, do not count for samples/s.
Processor seconds are of all processes and steps, start included: they are more reliable on a shared machine.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import yaml

from benchmarks.scratch import scratch_folder

NUM_STEPS, NUM_WARM = 14, 4
PROMPTS, GROUP_SIZE = 16, 8
ROUNDS = 3


def certificates(folder: Path) -> dict[str, str]:
    """The environment of an operator with a certificate and a token."""
    files = folder / "issued"
    command = [sys.executable, "-P", "-m", "console", "certs"]
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    holder = ["operator", "--run", "*", "--site", "*", "--name", "operator", "--dir", str(folder), "--out", str(files)]
    for arguments in (["init", str(folder)], ["issue", *holder]):
        subprocess.run([*command, *arguments], env=env, stdout=subprocess.DEVNULL, check=True)
    named = {"CA": "ca.pem", "CERT": "cert.pem", "KEY": "key.pem"}
    return {
        **{f"PENSTOCK_TLS_{name}": str(files / file) for name, file in named.items()},
        "PENSTOCK_TOKEN": "of-a-benchmark",
    }


def measured(task: Path, folder: Path, env: Mapping[str, str]) -> tuple[float, float]:
    """Samples/s of one run, and its processor seconds. Raises CalledProcessError if it fails."""
    folder.mkdir()
    document = {
        "run": {"dir": str(folder), "id": "r", "num_steps": NUM_STEPS, "eval_every_steps": 0, "num_eval_prompts": 1},
        "model": {"path": str(task / "model"), "dtype": "float32"},
        "data": {"train": str(task / "train.jsonl"), "eval": str(task / "eval.jsonl"), "max_prompt_tokens": 128},
        "sampling": {"max_new_tokens": 64},
        "algorithm": {"group_size": GROUP_SIZE, "prompts_per_step": PROMPTS, "max_staleness": 1},
        "generator": {"engine": "transformers", "max_concurrent_samples": 64},
    }
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(document))
    command = [sys.executable, "-P", "-m", "console", "run", str(config)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    clean["PYTHONPATH"] = os.getcwd()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, env={**clean, **env}, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    steps = [json.loads(line) for line in (folder / "r" / "metrics.jsonl").read_text().splitlines()]
    taken_s = steps[-1]["time"] - steps[NUM_WARM - 1]["time"]
    processor_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return (len(steps) - NUM_WARM) * PROMPTS * GROUP_SIZE / taken_s, processor_s


def main() -> None:
    """Print each round and the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", type=Path, help="output of `penstock quickstart`: runs/quickstart/current")
    parser.add_argument("rounds", type=int, nargs="?", default=ROUNDS)
    options = parser.parse_args()
    task, rounds = options.task.resolve(), options.rounds
    found: dict[str, list[tuple[float, float]]] = {"plain": [], "mutual TLS": []}
    with scratch_folder() as scratch:
        tls = certificates(scratch / "authority")
        for index in range(rounds):
            # The order alternates, too.
            for kind in list(found) if index % 2 == 0 else reversed(list(found)):
                env = tls if kind == "mutual TLS" else {}
                rate, processor_s = measured(task, scratch / f"{kind.split()[0]}-{index}", env)
                found[kind].append((rate, processor_s))
                print(f"round {index + 1}, {kind}: {rate:.2f} samples/s, {processor_s:.1f} processor s", flush=True)
    for index, what in enumerate(("samples/s", "processor s")):
        medians = {kind: statistics.median(values[index] for values in all_of) for kind, all_of in found.items()}
        ratio = medians["mutual TLS"] / medians["plain"]
        print(f"median {what}: {medians}; under mutual TLS {ratio:.3f} of plain text")


if __name__ == "__main__":
    main()
