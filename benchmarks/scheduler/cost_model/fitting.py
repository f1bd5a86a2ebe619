"""Fits the constants of the calibrated cost model to published measurements.

Four successive least-squares fits on logarithms of rates: decoding; its all-reduces; attention in training; and the
share of a pretraining benchmark's rate that an RL trainer reaches. They shrink steps along one constant at a time,
which suffices for a handful of constants and needs no library.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from benchmarks.scheduler.cost_model.published import NUM_RUNS_FITTED, Row, decode_rows, generation_rows, run_rows
from services.scheduler.cost_model.calibrated import BENCHMARK_MFU, trainer_mfu
from services.scheduler.problem.cost_constants import CostConstants

Constants = dict[str, float]

MFU_BY_CONTEXT: Mapping[str, Mapping[int, float]] = {
    "H100": {2048: 0.46, 4096: 0.40, 8192: 0.37, 32_768: 0.31},
    "A100-80": {2048: 0.64, 4096: 0.55, 8192: 0.55, 32_768: 0.49},
}
"""llm-foundry, FSDP, 7B: counted operations over the peak, by context length."""
_LAYERS, _HIDDEN, _PARAMS = 32, 4096, 6.7e9
_ROUNDS = 40


def fit_decoding() -> Constants:
    """The four constants of a decode step."""
    rows = decode_rows()
    start = {
        "eta_bw": 0.75,
        "step_overhead_s": 1e-3,
        "layer_overhead_s": 2e-5,
        "sequence_overhead_s": 2e-5,
    }
    return _descend(start, lambda values: _error(rows, CostConstants.model_validate(values)), limits={"eta_bw": 0.95})


def fit_allreduce(constants: CostConstants) -> float:
    """Time of each all-reduce of a decode step beyond its latency."""
    rows = generation_rows()

    def error(values: Constants) -> float:
        return _error(rows, constants.model_copy(update={"allreduce_overhead_s": values["each_s"]}))

    return _descend({"each_s": 2e-5}, error, limits={})["each_s"]


def fit_attention() -> float:
    """Rate of attention over the rate of matrix products in training."""

    def error(values: Constants) -> float:
        total = 0.0
        for by_context in MFU_BY_CONTEXT.values():
            ratios = [math.log(mfu / counted_mfu(1.0, length, values["at"])) for length, mfu in by_context.items()]
            mean = sum(ratios) / len(ratios)
            total += sum((ratio - mean) ** 2 for ratio in ratios)
        return total

    return _descend({"at": 0.5}, error, limits={"at": 1.0})["at"]


def counted_mfu(matrix_mfu: float, context: int, attention_efficiency: float) -> float:
    """Rate printed by a benchmark that counts all attention, if only the unmasked half is computed."""
    attention = _LAYERS * _HIDDEN * context
    counted, done = 6 * _PARAMS + 12 * attention, 6 * _PARAMS + 6 * attention / attention_efficiency
    return matrix_mfu * counted / done


def fit_duty(constants: CostConstants) -> float:
    """Share of a pretraining benchmark's rate that RL trainers reach, from whole runs."""
    rows = run_rows()[:NUM_RUNS_FITTED]

    def error(values: Constants) -> float:
        return _error(rows, constants.model_copy(update=trainer_mfu(BENCHMARK_MFU, values["duty"])))

    return _descend({"duty": 0.7}, error, limits={"duty": 1.0})["duty"]


def _error(rows: Sequence[Row], constants: CostConstants) -> float:
    return sum(math.log(row.predict(constants) / row.measured) ** 2 for row in rows)


def _descend(start: Constants, error: Callable[[Constants], float], *, limits: Mapping[str, float]) -> Constants:
    best, least, step = dict(start), error(start), 1.3
    for _ in range(_ROUNDS):
        is_better = False
        for name in start:
            for factor in (step, 1 / step):
                tried = {**best, name: min(best[name] * factor, limits.get(name, math.inf))}
                if (found := error(tried)) < least:
                    best, least, is_better = tried, found, True
        if not is_better:
            step = math.sqrt(step)
    return best
