"""Compares learning on samples that are 0, 1, 4 and 8 versions old with a plain synchronous loop.

penstock bench trainer.convergence PREPARED --out results.jsonl [--lags 0 1 4 8] [--corrections none truncated]
    [--seeds 0 1 2] [--minibatches 4] [--steps 40] [--prompts 16] [--group 8] [--max-prompt-tokens 128]
    [--max-new-tokens 256] [--algorithm dr_grpo] [--plot plot.png]

PREPARED is a folder of the quick start (runs/quickstart/current): model, train.jsonl, eval.jsonl. One process and one
thread. The step is the trainer's own; samples come from weights that are exactly this many versions old, decoded in
this process, so the lag does not depend on the machine's speed. Outcomes are appended to the file as they finish; cells
that it contains are not run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.trainer.cells import PLAIN, Cell, StepOutcome, run_cell
from services.trainer.config import TrainingConfig

NUM_LAST_STEPS = 5
TOKENS_PER_PACK = 2048
"""A minibatch of a few groups in one pass."""
_LINES = {"none": "--", "truncated": ":", "masked": "-."}
"""How a correction is drawn in the plot."""
TBA_KL = 0.01
"""Trajectory balance needs a KL term; the others run without it."""
Document = dict[str, Any]


def main() -> int:
    options = _options()
    done = read_outcomes(options.out)
    cells = list(_cells(options))
    for cell in cells:
        if not any(_is_of(document, cell, options) for document in done):
            done.append(_measured(cell, options))
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(done[-1]) + "\n")
    wanted = [document for document in done if any(_is_of(document, cell, options) for cell in cells)]
    print("\n".join(table(wanted)))
    if options.plot is not None:
        plot(wanted, options.plot)
    return 0


def read_outcomes(path: Path) -> list[Document]:
    """Results measured earlier."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def table(documents: Sequence[Document]) -> Iterator[str]:
    """Markdown: each lag and correction over its seeds."""
    yield f"| lag, correction | seeds | reward, last {NUM_LAST_STEPS} steps | held out, at the end | clipped tokens |"
    yield "|---|---|---|---|---|"
    for name, group in _by_name(documents).items():
        last = [statistics.fmean(step["reward"] for step in one["steps"][-NUM_LAST_STEPS:]) for one in group]
        held_out = [one["held_out"] for one in group]
        clipped = [step["metrics"].get("clip_fraction") for one in group for step in one["steps"]]
        known = [value for value in clipped if value is not None]
        share = f"{statistics.fmean(known):.3f}" if known else "-"
        yield f"| {name} | {len(group)} | {_spread(last)} | {_spread(held_out)} | {share} |"


def plot(documents: Sequence[Document], path: Path) -> None:
    """Mean reward of the batch over steps, averaged over seeds and five steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    lags = sorted({document["cell"]["lag"] for document in documents})
    for name, group in _by_name(documents).items():
        curve = _smooth([statistics.fmean(rewards) for rewards in zip(*map(_rewards, group), strict=True)])
        cell = group[0]["cell"]
        axes.plot(curve, label=name, color=f"C{lags.index(cell['lag'])}", linestyle=_LINES.get(cell["correction"], "-"))
    axes.set_xlabel("optimiser step")
    axes.set_ylabel("mean reward of the batch")
    axes.legend(title="lag, correction", fontsize="small", loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _cells(options: argparse.Namespace) -> Iterator[Cell]:
    """Seeds outermost, so that an interrupted run has complete comparisons. The plain loop is the quick start's."""
    for seed in options.seeds:
        if options.algorithm == "dr_grpo":
            yield Cell(lag=0, correction=PLAIN, seed=seed, minibatches=options.minibatches)
        for lag in options.lags:
            for correction in options.corrections:
                yield Cell(lag=lag, correction=correction, seed=seed, minibatches=options.minibatches)


def _measured(cell: Cell, options: argparse.Namespace) -> Document:
    started_s = time.monotonic()

    def tell(version: int, outcome: StepOutcome) -> None:
        seconds = time.monotonic() - started_s
        print(f"{cell.name} seed {cell.seed}: step {version} {outcome.reward:.3f} {seconds:.0f} s", file=sys.stderr)

    outcome = run_cell(_config(options), cell, on_step=tell)
    return {**outcome.document(), "settings": _settings(options), "seconds": time.monotonic() - started_s}


def _settings(options: argparse.Namespace) -> Document:
    return {
        "task": options.prepared.resolve().name,
        "steps": options.steps,
        "prompts": options.prompts,
        "group": options.group,
        "max_prompt_tokens": options.max_prompt_tokens,
        "max_new_tokens": options.max_new_tokens,
        "learning_rate": options.learning_rate,
        "algorithm": options.algorithm,
    }


def _is_of(document: Document, cell: Cell, options: argparse.Namespace) -> bool:
    return bool(document["cell"] == asdict(cell) and document["settings"] == _settings(options))


def _config(options: argparse.Namespace) -> TrainingConfig:
    """The quick start's configuration, changed by the options."""
    return TrainingConfig.model_validate(
        {
            "run": {"num_steps": options.steps, "num_eval_prompts": 256},
            "model": {"path": options.prepared / "model", "dtype": "float32"},
            "data": {
                "train": options.prepared / "train.jsonl",
                "eval": options.prepared / "eval.jsonl",
                "max_prompt_tokens": options.max_prompt_tokens,
            },
            "sampling": {"max_new_tokens": options.max_new_tokens},
            "algorithm": {
                "name": options.algorithm,
                "normalization": "tokens" if options.algorithm == "dr_grpo" else None,
                "kl_coefficient": TBA_KL if options.algorithm == "tba" else 0.0,
                "group_size": options.group,
                "prompts_per_step": options.prompts,
            },
            "optimizer": {"learning_rate": options.learning_rate},
            "trainer": {"num_threads": 1, "device": "cpu", "tokens_per_pack": TOKENS_PER_PACK},
        }
    )


def _by_name(documents: Sequence[Document]) -> dict[str, list[Document]]:
    groups: dict[str, list[Document]] = defaultdict(list)
    for document in documents:
        groups[Cell(**document["cell"]).name].append(document)
    return groups


def _rewards(document: Document) -> list[float]:
    return [step["reward"] for step in document["steps"]]


def _smooth(values: Sequence[float], *, width: int = 5) -> list[float]:
    return [statistics.fmean(values[max(0, index - width + 1) : index + 1]) for index in range(len(values))]


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prepared", type=Path, help="a prepared folder of the quick start")
    parser.add_argument("--out", type=Path, required=True, help="file of JSON lines to append outcomes to")
    parser.add_argument("--lags", type=int, nargs="*", default=[0, 1, 4, 8])
    parser.add_argument("--corrections", nargs="*", default=["none", "truncated"])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--minibatches", type=int, default=1, help="optimiser steps per batch")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=16, help="groups per step")
    parser.add_argument("--group", type=int, default=8, help="samples per group")
    parser.add_argument("--max-prompt-tokens", type=int, default=128, help="longer problems are left out")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=4e-4)
    parser.add_argument("--algorithm", default="dr_grpo", help="default: the quick start's")
    parser.add_argument("--plot", type=Path, default=None, help="file to plot to; needs matplotlib")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
