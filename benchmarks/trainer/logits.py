"""Measures log-probs of long samples: memory beside weights, activations and gradients, and time next to all logits.

penstock bench trainer.logits [--tokens 32768] [--vocabulary 151936] [--hidden 1024] [--layers 8] [--json]

Forward and backward pass of an output layer in float32 on the CPU, each in a process of its own. The ratio of times is
the median of pairs by turns at `--plain-tokens`, where all logits and their gradient fit into memory. `extra_gb` is the
peak of resident memory less weight, hidden states and the gradients of both, which any way of computing them needs.
`--layers` adds pairs of whole passes of a Qwen3 with so many layers below that output layer, tied to its embedding,
computed in bfloat16 as a trainer does (`step_cpu_ratio_to_plain`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.children import environment, run_child
from benchmarks.made_models import SHAPES
from benchmarks.resident import peak_mb, resident_mb, restart_peak
from services.trainer.model.precision import computing_in
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
    """One forward and backward pass of the output layer in this process."""
    torch.manual_seed(0)
    model = _OutputLayer(hidden, vocabulary)
    states_1th = torch.randn(1, num_tokens, hidden, requires_grad=True)
    needed = 2 * 4 * (model.head.weight.numel() + states_1th.numel())
    base = 1e6 * resident_mb() - needed // 2
    found = _pass(way, model, {"hidden_1th": states_1th}, {"hidden_1th": states_1th[:, :2].detach()})
    return found | {"extra_gb": (1e6 * peak_mb() - base - needed) / 1e9}


def measure_step_here(way: str, num_tokens: int, hidden: int, vocabulary: int, num_layers: int) -> dict[str, float]:
    """The same of a whole model."""
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "vocab_size": vocabulary, "num_hidden_layers": num_layers}
    model = AutoModelForCausalLM.from_config(Qwen3Config(**{**SHAPES["qwen3-0.6b"], **sizes}))
    tokens_1t = torch.randint(vocabulary, (1, num_tokens))
    with computing_in(torch.bfloat16, torch.device("cpu")):
        return _pass(way, model, {"input_ids": tokens_1t}, {"input_ids": tokens_1t[:, :2]})


def _pass(way: str, model: Any, inputs: dict[str, Tensor], first_inputs: dict[str, Tensor]) -> dict[str, float]:
    num_tokens = next(iter(inputs.values())).shape[1]
    targets_n = torch.randint(model.get_output_embeddings().out_features, (num_tokens,))
    logprobs = TokenLogprobs(model, inputs=first_inputs)
    restart_peak()
    begin_s, begin_cpu_s = time.monotonic(), time.process_time()
    if way == "plain":
        found_n = -cross_entropy(model(**inputs).logits[0].float(), targets_n, reduction="none")
    else:
        found_n = logprobs.of(model, inputs, positions_n=torch.arange(num_tokens), targets_n=targets_n)
    found_n.mean().backward()
    return {
        "seconds": time.monotonic() - begin_s,
        "cpu_seconds": time.process_time() - begin_cpu_s,
        "mean_logprob": float(found_n.detach().mean()),
    }


async def measure(
    *, num_tokens: int, plain_tokens: int, hidden: int, vocabulary: int, layers: int, threads: int
) -> dict[str, Any]:
    """The large one by slices, and both ways by turns at a size that fits."""

    async def one(way: str, count: int, *, layers: int = 0) -> dict[str, float]:
        print(f"{way}: {count} tokens, {layers} layers below the output layer", file=sys.stderr)
        with TemporaryDirectory() as folder:
            log = Path(folder) / "result.json"
            sizes = {"tokens": count, "hidden": hidden, "vocabulary": vocabulary, "layers": layers}
            arguments = [text for name, size in sizes.items() for text in (f"--{name}", str(size))]
            await run_child(
                sys.executable,
                "-m",
                "benchmarks.trainer.logits",
                "--way",
                way,
                *arguments,
                timeout_s=TIMEOUT_S,
                what=f"{way}, {count} tokens",
                log=log,
                env=environment(num_threads=threads),
            )
            return dict(json.loads(log.read_text(encoding="utf-8").splitlines()[-1]))

    async def by_turns(*, layers: int = 0) -> list[tuple[dict[str, float], dict[str, float]]]:
        return [
            (await one("sliced", plain_tokens, layers=layers), await one("plain", plain_tokens, layers=layers))
            for _ in range(NUM_PAIRS)
        ]

    pairs = await by_turns()
    steps = (
        {} if layers == 0 else {"step_layers": layers, "step_cpu_ratio_to_plain": _ratio(await by_turns(layers=layers))}
    )
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
        "cpu_ratio_to_plain": _ratio(pairs),
        **steps,
    }


def _ratio(pairs: Sequence[tuple[dict[str, float], dict[str, float]]]) -> float:
    return statistics.median(sliced["cpu_seconds"] / plain["cpu_seconds"] for sliced, plain in pairs)


def main() -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--plain-tokens", type=int, default=2_048)
    parser.add_argument("--hidden", type=int, default=1_024)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--layers", type=int, default=0, help="of whole passes to measure as well; 0 for none")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--way", choices=("plain", "sliced"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        sizes = (options.way, options.tokens, options.hidden, options.vocabulary)
        print(json.dumps(measure_step_here(*sizes, options.layers) if options.layers else measure_here(*sizes)))
        return 0
    found = asyncio.run(
        measure(
            num_tokens=options.tokens,
            plain_tokens=options.plain_tokens,
            hidden=options.hidden,
            vocabulary=options.vocabulary,
            layers=options.layers,
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
