"""The calibrated cost model: RM-1's equations with the terms it omits, and constants fitted to published measurements.

Added: attention runs slower than matrix products, each layer, each sequence and each all-reduce of a decode step costs
a fixed time on any GPU, and each sample costs the trainer time that more GPUs do not shorten. `penstock bench
scheduler.calibration --fit` refits the constants and prints the error on every row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from penstock.config import ConfigError
from services.scheduler.config import CostModelName
from services.scheduler.cost_model.reference import CostModel
from services.scheduler.problem.problem import Problem

CALIBRATED = "calibrated"
COST_MODELS: tuple[str, ...] = get_args(CostModelName)

BENCHMARK_MFU: Mapping[str, float] = {
    "default": 0.42,
    "H200": 0.45,
    "H100": 0.45,
    "H800": 0.45,
    "H20": 0.345,
    "A100-80": 0.62,
    "A100-40": 0.53,
    "L40S": 0.345,
    "L4": 0.365,
    "RTX4090": 0.47,
}
"""Matrix products in pretraining, share of the peak. H100 and A100: means over llm-foundry's models of 1B to 70B with
attention taken out; H800 as H100 (AReaL's trainer: 0.39 to 0.46); H20 from AReaL-Hex's costs, 0.11 of an H800's rate;
the rest is RM-1's assumption, scaled up as the H100's is."""
TRAINER_DUTY = 0.82
"""Share of that efficiency that RL trainers reach, given uneven lengths, small batches and waits."""
SAMPLE_OVERHEAD_S = 0.0074
"""Trainer time per sample beside the GPUs' work, independent of their number: 61 s for 8,192 samples (verl, whose step
times on 16, 32 and 64 GPUs fit a / n + b)."""
DECODING: Mapping[str, float] = {
    "eta_bw": 0.82,
    "step_overhead_s": 0.0024,
    "layer_overhead_s": 18e-6,
    "sequence_overhead_s": 22e-6,
}
ALLREDUCE_OVERHEAD_S = 54e-6
"""Fixed time of each all-reduce in a decode step, on any GPU: StreamRL's 32B and 72B on 40 and 80 H800."""
ATTENTION_EFFICIENCY = 0.29


def calibrated(problem: Problem) -> Problem:
    """The problem with the fitted constants in place of its own.

    Memory, batch limits and the cost of an update keep the problem's values: they describe how a run is set up.
    Measured rates still replace computed ones.
    """
    workload = problem.workload
    fitted: dict[str, Any] = {
        **DECODING,
        "allreduce_overhead_s": ALLREDUCE_OVERHEAD_S,
        **trainer_mfu(BENCHMARK_MFU, TRAINER_DUTY),
        "attention_efficiency": ATTENTION_EFFICIENCY,
        "train_overhead_s": SAMPLE_OVERHEAD_S * workload.prompts_per_step * workload.group_size,
    }
    return problem.model_copy(update={"cost_model": problem.cost_model.model_copy(update=fitted)})


def trainer_mfu(benchmark: Mapping[str, float], duty: float) -> dict[str, dict[str, float]]:
    """Both training efficiencies of a trainer that reaches this share of a pretraining benchmark."""
    shares = {gpu: share * duty for gpu, share in benchmark.items()}
    return {"mfu_train": shares, "mfu_infer": shares}


def with_constants(problem: Problem, cost_model: str) -> Problem:
    """The problem with the constants of the named cost model, one of COST_MODELS."""
    return calibrated(problem) if cost_model == CALIBRATED else problem


def make_model(problem: Problem, cost_model: str) -> CostModel:
    """A cost model by name, one of COST_MODELS. Raises ConfigError."""
    if cost_model not in COST_MODELS:
        raise ConfigError(f"--cost-model: {cost_model!r} is unknown; there is: {', '.join(COST_MODELS)}")
    return CostModel(with_constants(problem, cost_model), name=cost_model)
