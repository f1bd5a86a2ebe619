"""Measures log-probs of long samples: memory beside weights, activations and gradients, and time next to all logits.

penstock bench trainer.logits [--tokens 32768] [--vocabulary 151936] [--hidden 1024] [--json]

Forward and backward pass of an output layer in float32 on the CPU, each in a process of its own. The ratio of times is
the median of pairs by turns at `--plain-tokens`, where all logits and their gradient fit into memory. `extra_gb` is the
peak of resident memory less weight, hidden states and the gradients of both, which any way of computing them needs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.children import environment, run_child
from benchmarks.resident import peak_mb, resident_mb, restart_peak
from services.trainer.model.token_logprobs import TokenLogprobs

NUM_PAIRS = 3
TIMEOUT_S = 3_000.0


class _OutputLayer(nn.Module):  # type: ignore[misc]  # torch declares no types for it
    """A causal model of an output layer alone; its inputs are hidden states."""

    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def forward(self, hidden_1th: Tensor, logits_to_keep: Any = slice(None)) -> SimpleNamespace:
        return SimpleNamespace(logits=self.head(hidden_1th[:, logits_to_keep]))


def measure_here(way: str, num_tokens: int, hidden: int, vocabulary: int) -> dict[str, float]:
    """One forward and backward pass in this process."""
    torch.manual_seed(0)
    model = _OutputLayer(hidden, vocabulary)
    states_1th = torch.randn(1, num_tokens, hidden, requires_grad=True)
    targets_n = torch.randint(vocabulary, (num_tokens,))
    logprobs = TokenLogprobs(model, inputs={"hidden_1th": states_1th[:, :2].detach()})
    needed = 2 * 4 * (model.head.weight.numel() + states_1th.numel())
    base = 1e6 * resident_mb() - needed // 2
    restart_peak()
    begin_s, begin_cpu_s = time.monotonic(), time.process_time()
    if way == "plain":
        found_n = -cross_entropy(model(states_1th).logits[0], targets_n, reduction="none")
    else:
        found_n = logprobs.of(
            model, {"hidden_1th": states_1th}, positions_n=torch.arange(num_tokens), targets_n=targets_n
        )
    found_n.mean().backward()
    return {
        "seconds": time.monotonic() - begin_s,
        "cpu_seconds": time.process_time() - begin_cpu_s,
        "extra_gb": (1e6 * peak_mb() - base - needed) / 1e9,
        "mean_logprob": float(found_n.detach().mean()),
    }


async def measure(*, num_tokens: int, plain_tokens: int, hidden: int, vocabulary: int, threads: int) -> dict[str, Any]:
    """The large one by slices, and both ways by turns at a size that fits."""

    async def one(way: str, count: int) -> dict[str, float]:
        print(f"{way}: {count} tokens", file=sys.stderr)
        with TemporaryDirectory() as folder:
            log = Path(folder) / "result.json"
            arguments = ("--way", way, "--tokens", str(count), "--hidden", str(hidden), "--vocabulary", str(vocabulary))
            await run_child(
                sys.executable,
                "-m",
                "benchmarks.trainer.logits",
                *arguments,
                timeout_s=TIMEOUT_S,
                what=f"{way}, {count} tokens",
                log=log,
                env=environment(num_threads=threads),
            )
            return dict(json.loads(log.read_text(encoding="utf-8").splitlines()[-1]))

    pairs = [(await one("sliced", plain_tokens), await one("plain", plain_tokens)) for _ in range(NUM_PAIRS)]
    large = await one("sliced", num_tokens)
    return {
        "num_tokens": num_tokens,
        "hidden": hidden,
        "vocabulary": vocabulary,
        "logits_extra_gb": large["extra_gb"],
        "seconds": large["seconds"],
        "plain_tokens": plain_tokens,
        "plain_extra_gb": statistics.median(plain["extra_gb"] for _, plain in pairs),
        "sliced_extra_gb": statistics.median(sliced["extra_gb"] for sliced, _ in pairs),
        "cpu_ratio_to_plain": statistics.median(
            sliced["cpu_seconds"] / plain["cpu_seconds"] for sliced, plain in pairs
        ),
    }


def main() -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--plain-tokens", type=int, default=2_048)
    parser.add_argument("--hidden", type=int, default=1_024)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--way", choices=("plain", "sliced"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measure_here(options.way, options.tokens, options.hidden, options.vocabulary)))
        return 0
    found = asyncio.run(
        measure(
            num_tokens=options.tokens,
            plain_tokens=options.plain_tokens,
            hidden=options.hidden,
            vocabulary=options.vocabulary,
            threads=options.threads,
        )
    )
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        for name, value in found.items():
            print(f"{name:20} {value:.3g}" if isinstance(value, float) else f"{name:20} {value}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
