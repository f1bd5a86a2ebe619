"""Compares the cost models with published measurements, row by row, and fits the calibrated one's constants.

penstock bench scheduler.calibration [--fit] [--json]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from functools import partial

from benchmarks.scheduler.cost_model.fitting import (
    MFU_BY_CONTEXT,
    counted_mfu,
    fit_allreduce,
    fit_attention,
    fit_decoding,
    fit_duty,
)
from benchmarks.scheduler.cost_model.published import Row, decode_rows, generation_rows, held_out_rows, run_rows
from services.scheduler.cost_model.calibrated import (
    ALLREDUCE_OVERHEAD_S,
    ATTENTION_EFFICIENCY,
    BENCHMARK_MFU,
    DECODING,
    SAMPLE_OVERHEAD_S,
    TRAINER_DUTY,
    trainer_mfu,
)
from services.scheduler.problem.cost_constants import CostConstants

RM1_CONSTANTS = CostConstants()
CONSTANTS = CostConstants.model_validate(
    {
        **DECODING,
        "allreduce_overhead_s": ALLREDUCE_OVERHEAD_S,
        **trainer_mfu(BENCHMARK_MFU, TRAINER_DUTY),
        "attention_efficiency": ATTENTION_EFFICIENCY,
        "train_overhead_s": SAMPLE_OVERHEAD_S,
    }
)
"""Constants of the calibrated model; `train_overhead_s` is per sample, see `with_constants`."""


def sections() -> dict[str, list[Row]]:
    """All rows, by what they measure."""
    return {
        "decoding, tokens/s (fitted)": decode_rows(),
        "decoding, tokens/s (not fitted)": held_out_rows(),
        "generation of a step, samples/s (fitted)": generation_rows(),
        "training MFU by context (fitted)": _training_rows(),
        "whole runs, samples/s (the first five fitted)": run_rows(),
    }


def table() -> str:
    """Markdown: each row's measurement, and the ratio of both models to it."""
    lines = ["| measurement | measured | RM-1 | calibrated |", "|---|---|---|---|"]
    for title, rows in sections().items():
        lines.append(f"| **{title}** | | {_spread(rows, RM1_CONSTANTS)} | {_spread(rows, CONSTANTS)} |")
        lines += [
            f"| {row.name} | {row.measured:.4g} | {_ratio(row, RM1_CONSTANTS):.2f} | {_ratio(row, CONSTANTS):.2f} |"
            for row in rows
        ]
    return "\n".join(lines)


def main() -> int:
    """Print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", action="store_true", help="refit the constants and print them")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.fit:
        fitted = {
            **fit_decoding(),
            "allreduce_overhead_s": fit_allreduce(CONSTANTS),
            "attention_efficiency": fit_attention(),
            "duty": fit_duty(CONSTANTS),
        }
        print(json.dumps(fitted, indent=2), file=sys.stderr)
    if options.json:
        print(
            json.dumps(
                [
                    {"name": row.name, "measured": row.measured, "predicted": row.predict(CONSTANTS)}
                    for rows in sections().values()
                    for row in rows
                ],
                indent=2,
            )
        )
    else:
        print(table())
    return 0


def _training_rows() -> list[Row]:
    return [
        Row(f"llm-foundry, 7B, {gpu}, context {context}, MFU", mfu, partial(_benchmark_mfu, gpu, context))
        for gpu, by_context in MFU_BY_CONTEXT.items()
        for context, mfu in by_context.items()
    ]


def _benchmark_mfu(gpu: str, context: int, constants: CostConstants) -> float:
    """Rate of pretraining: the calibrated model's trainers reach TRAINER_DUTY of it."""
    duty = TRAINER_DUTY if constants is CONSTANTS else 1.0
    return counted_mfu(constants.mfu(gpu, "train") / duty, context, constants.attention_efficiency)


def _ratio(row: Row, constants: CostConstants) -> float:
    return row.predict(constants) / row.measured


def _spread(rows: Sequence[Row], constants: CostConstants) -> str:
    """Typical error factor: the root mean square of logarithms."""
    logs = [math.log(_ratio(row, constants)) for row in rows]
    return f"x{math.exp(math.sqrt(sum(each**2 for each in logs) / len(logs))):.2f}"


if __name__ == "__main__":
    sys.exit(main())
